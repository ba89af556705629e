import json
import subprocess
import sys

import pytest

from arealite.api.cli_args import SFTConfig
from arealite.trainer.stats_logger import StatsLogger, read_stats
from arealite.utils.config import load_config
from arealite.utils.rundir import RunDir


def make(tmp_path, *overrides) -> tuple[StatsLogger, RunDir]:
    base = ["experiment_name=e", "trial_name=t", "train_dataset.path=d", "model.path=m"]
    config = load_config([*base, f"cluster.fileroot={tmp_path}", *overrides], SFTConfig)
    return StatsLogger(config, RunDir(config)), RunDir(config)


def test_each_step_is_on_disk_at_once(tmp_path):
    logger, run_dir = make(tmp_path)
    logger.commit(0, {"loss": 1.5})
    logger.commit(1, {"loss": float("nan"), "reward": 1})
    lines = [json.loads(line) for line in run_dir.stats_path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[0]["loss"] == 1.5 and lines[1]["loss"] is None and lines[1]["reward"] == 1.0


def test_resume_drops_steps_that_run_again(tmp_path):
    logger, run_dir = make(tmp_path)
    for step in range(5):
        logger.commit(step, {"loss": step})
    with run_dir.stats_path.open("a") as file:
        # A crash in mid-line.
        file.write('{"step": 5, "lo')
    assert len(read_stats(run_dir)) == 5
    logger.resume(3)
    logger.commit(3, {"loss": 30})
    assert [(s["step"], s["loss"]) for s in read_stats(run_dir)] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_steps_that_a_damaged_file_has_lost_are_told(tmp_path, capsys):
    logger, run_dir = make(tmp_path)
    for step in range(4):
        logger.commit(step, {"loss": 1.0})
    logger.resume(3)
    assert "warning" not in capsys.readouterr().out
    text = run_dir.stats_path.read_text()
    run_dir.stats_path.write_text(text[: len(text) // 2])
    logger.resume(3)
    assert "stats.jsonl lacks 2 of the 3 steps so far (first: 2)" in capsys.readouterr().out


def test_a_line_that_the_disk_takes_in_part_is_reported_and_does_not_spoil_the_next(tmp_path):
    code = (
        "import resource, signal, sys; from tests.trainer.test_stats_logger import make; from pathlib import Path; "
        "logger, _ = make(Path(sys.argv[1])); logger.commit(0, {'loss': 1.0}); "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (70, 70)); "
        "logger.commit(1, {'loss': 1.0})"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "warning: the disk is full:" in ended.stdout and "lacks the statistics of step 2." in ended.stdout
    logger, run_dir = make(tmp_path)
    assert len(run_dir.stats_path.read_bytes()) == 70
    logger.commit(2, {"loss": 3.0})
    assert [(row["step"], row["loss"]) for row in read_stats(run_dir)] == [(0, 1.0), (2, 3.0)]


def test_an_evaluation_replaces_the_results_of_an_earlier_one_of_the_same_set(tmp_path):
    logger, run_dir = make(tmp_path)
    logger.commit(3, {"loss": 1.0})
    logger.commit(3, {"eval/a/pass@1": 0.5, "eval/a/pass@4": 0.9, "eval/ab/pass@4": 0.8})
    logger.commit(3, {"eval/a/pass@1": 0.6})
    (step,) = read_stats(run_dir)
    assert {key: value for key, value in step.items() if key not in ("step", "time")} == {
        "loss": 1.0, "eval/ab/pass@4": 0.8, "eval/a/pass@1": 0.6,
    }  # fmt: skip


def test_damaged_lines_are_skipped(tmp_path):
    logger, run_dir = make(tmp_path)
    for step in range(2):
        logger.commit(step, {"reward": 1.0})
    with run_dir.stats_path.open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n{}\n{"step": 2, "rew\n')
    assert [row["step"] for row in read_stats(run_dir)] == [0, 1]
    logger.resume(1)
    assert [row["step"] for row in read_stats(run_dir)] == [0]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    logger, run_dir = make(tmp_path)
    logger.commit(0, {"loss": 1.0})
    logger.resume(0)
    assert not run_dir.path.exists() and read_stats(run_dir) == []


def test_tensorboard_files(tmp_path):
    pytest.importorskip("tensorboard")
    logger, run_dir = make(tmp_path, "stats_logger.tensorboard=true")
    logger.commit(0, {"loss": 1.0})
    logger.close()
    assert list(run_dir.tensorboard.glob("events*"))


@pytest.mark.parametrize("first", [2, -1], ids=["checkpoint", "none"])
def test_tensorboard_has_steps_that_ran_again_once(tmp_path, first):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger, run_dir = make(tmp_path, "stats_logger.tensorboard=true")
    for step in range(4):
        logger.commit(step, {"loss": 1.0})
    logger.close()
    logger, _ = make(tmp_path, "stats_logger.tensorboard=true")
    logger.resume(first)
    for step in range(max(0, first), 5):
        logger.commit(step, {"loss": 0.5})
    logger.close()
    events = accumulator.EventAccumulator(str(run_dir.tensorboard))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(step, 1.0 if step < first else 0.5) for step in range(5)]
