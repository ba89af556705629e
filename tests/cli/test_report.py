import contextlib
import json
import re
import sqlite3
import subprocess
import sys

import pytest

from arealite.api.errors import CheckpointError, ConfigError
from arealite.cli.report import main
from arealite.core.foresee.recording import RecordingError
from arealite.core.ledger.rollouts import RolloutRow
from arealite.core.ledger.store import EpisodeRow, Ledger
from arealite.utils.rundir import RunDir
from tests import warm_python
from tests.core.foresee.test_recording import write_run


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    made = RunDir(tmp_path / "e" / "t").create()
    lines = [
        f'{{"step": {i}, "time": 1, "reward": {i / 100}, "loss": null, '
        '"time/step": 2.0, "time/rollout": 1.5, "time/update": 0.5}'
        for i in range(100)
    ]
    made.stats_path.write_text("\n".join(lines) + "\n")
    ledger = Ledger(made.db_path)
    ledger.record(EpisodeRow(0, "trained"))
    ledger.record(EpisodeRow(1, "failed", "reward [raised] ZeroDivisionError"))
    ledger.commit(lambda: [RolloutRow(0, 0, 4, 1.0, 3, 4, 5, "abcde>", "[bold]edcba\x1b[31m" + "x" * 999)])
    ledger.close()
    return made


def test_the_report_shows_steps_times_episodes_and_rollouts(run_dir, capsys):
    main([str(run_dir.path), "--steps", "5"])
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out.splitlines() if line[:4].strip().isdigit()]
    assert rows[:5] == ["1", "26", "51", "75", "100"]
    assert "75%" in out and "25%" in out, "shares of rollout and update"
    assert "reward [raised] ZeroDivisionError" in out and "trained" in out
    assert "[bold]edcba\\x1b[31m" in out and "x" * 999 not in out, "text of a model is data"


@pytest.mark.parametrize("name", ["steps", "rollouts"])
def test_negative_numbers_are_refused(run_dir, name):
    with pytest.raises(ConfigError, match=f"--{name} is -3: give 0 or more"):
        main([str(run_dir.path), f"--{name}", "-3"])


def test_the_start_is_a_line_and_no_phase(run_dir, capsys):
    with run_dir.stats_path.open("a") as file:
        start = '"time/startup/load": 3, "time/startup/imports": 9, "time/startup/total": 12.5'
        file.write(f'{{"step": 100, "time": 1, "reward": 0.1, "time/step": 1, {start}}}\n')
    main([str(run_dir.path)])
    out = capsys.readouterr().out
    assert "start before step 101: 12.5 s until its update (imports 9.0, load 3.0)\n" in out
    assert "startup" not in out


def test_alarms_are_listed_by_step(run_dir, capsys):
    with run_dir.stats_path.open("a") as file:
        file.write('{"step": 100, "time": 1, "reward": 0.1, "alarms": 2, "alarm/reward": 1, "alarm/behav_kl/k3": 1}\n')
    main([str(run_dir.path)])
    assert "alarms after step 101: reward, behav_kl/k3\n" in capsys.readouterr().out


def test_alarms_of_the_ledger_are_listed_with_their_texts(run_dir, capsys):
    with contextlib.closing(Ledger(run_dir.db_path)) as ledger:
        for step in range(22):
            ledger.event("audit", f"{step}% [b]of[/b] the episodes were dropped", step, "alarm")
        ledger.event("checkpoint", "saved", 3, "info")
    main([str(run_dir.path)])
    out = capsys.readouterr().out
    assert "2 earlier alarms are in run.sqlite" in out and "saved" not in out
    assert "alarm after step 3: 2% [b]of[/b] the episodes" in out and "alarm after step 2:" not in out
    assert out.index("alarm after step 3:") < out.index("alarm after step 22:")


def test_lines_of_other_programs_and_ones_that_were_cut_are_no_error(run_dir, capsys):
    with run_dir.stats_path.open("a") as file:
        file.write('{"step": 100, "reward": "high", "loss": [1], "time/step": "long", "time/startup/load": "x"}\n')
        file.write('{"step": 101, "reward": 0.5, "eval/valid/pass@1": "good", "eval/valid/reward": 0.75}\n')
        file.write('{"step": 102, "reward": NaN, "time/step": NaN}\n{"step": "last"}\n{"step": 103, "rew')
    main([str(run_dir.path), "--steps", "200"])
    out = capsys.readouterr().out
    assert "103 steps" in out and "0.75" in out and "good" not in out


def test_a_run_without_episodes_has_no_table_of_them(tmp_path, capsys):
    made = RunDir(tmp_path / "e" / "t").create()
    made.stats_path.write_text('{"step": 0, "time": 1, "loss": 0.5, "time/step": 2.0}\n')
    with contextlib.closing(Ledger(made.db_path)) as ledger:
        ledger.event("checkpoint", "trained model: x", 0, "info")
    main([str(made.path)])
    out = capsys.readouterr().out
    assert "1 steps" in out and "outcome" not in out


def test_a_run_that_has_just_begun(tmp_path, capsys):
    run_dir = RunDir(tmp_path / "demo" / "reverse").create()
    with pytest.raises(ConfigError, match=r"reverse is not a run directory: it has no config.yaml: give the folder of"):
        main([str(run_dir.path)])
    run_dir.config_path.write_text("")
    main([str(run_dir.path)])
    out = capsys.readouterr().out
    assert "no step is finished: nothing has run here: there are no logs\nwhat to do: start the run, or give" in out
    with run_dir.lock():
        main([str(run_dir.path)])
    assert "no step is finished yet: the run goes on" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"is not a run directory: .* Runs below it: .*demo/reverse"):
        main([str(tmp_path)])
    with pytest.raises(ConfigError, match=r"there is no run directory .*: give the folder of a run"):
        main([str(tmp_path / "none")])


# A trainer that ends in some way before its first step, or waits for the end of its input.
TRAINER = """
import os, signal, sys
from arealite.api.errors import ServerError
from arealite.utils.status.writer import status
status.begin(sys.argv[1], "rank0", "trainer", has_thread=False)
if sys.argv[2] == "fails":
    status.note_error(ServerError("[bold]no server answers"))
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "stopped":
    status.note_error(KeyboardInterrupt())
if sys.argv[2] == "runs":
    print("begun", flush=True)
    sys.stdin.read()
status.end("ended")
"""


@pytest.mark.parametrize(
    ("how", "verdict", "remedy"),
    [
        ("fails", "the run has ended with an error: ServerError: [bold]no server answers", "recover.mode=auto"),
        ("killed", "the run is dead: rank0 ended without a word: SIGKILL", "see `dmesg` for a reason"),
        ("stopped", "the run was stopped by SIGINT (Ctrl+C)", "recover.mode=auto"),
        ("ends", "the run has ended without an error", "check total_train_steps"),
    ],
)
def test_a_run_that_ended_before_its_first_step_says_how(tmp_path, capsys, how, verdict, remedy):
    run_dir = RunDir(tmp_path).create()
    run_dir.config_path.write_text("")
    (run_dir.logs / "rank0.log").write_text("the last line\x1b[31m\n")
    warm_python.run(["-c", TRAINER, tmp_path, how], timeout=60)
    main([str(tmp_path)])
    out = capsys.readouterr().out
    assert f"no step is finished: {verdict}" in out and "\x1b" not in out
    (todo,) = [line for line in out.splitlines() if line.startswith("what to do: ")]
    assert remedy in todo


def test_a_run_that_is_before_its_first_step_goes_on(tmp_path, capsys):
    run_dir = RunDir(tmp_path).create()
    run_dir.config_path.write_text("")
    command = [sys.executable, "-c", TRAINER, str(tmp_path), "runs"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "begun\n"
        main([str(tmp_path)])
        trainer.communicate()
    assert f"no step is finished yet: the run goes on; {run_dir.logs} shows" in capsys.readouterr().out


def test_logs_without_a_status_are_those_of_a_run_that_ended(tmp_path, capsys):
    run_dir = RunDir(tmp_path).create()
    run_dir.config_path.write_text("")
    (run_dir.logs / "node0.log").write_text("error: no such model\n")
    main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "no step is finished: the run has ended, or was made by another version" in out
    assert "  - node0: error: no such model\nwhat to do: see " in out


def test_it_only_reads(run_dir):
    with sqlite3.connect(run_dir.db_path) as database:
        before = database.execute("SELECT COUNT(*) FROM episodes").fetchone()
    assert warm_python.run(["-m", "arealite.cli.report", run_dir.path], timeout=60).returncode == 0
    with sqlite3.connect(run_dir.db_path) as database:
        assert database.execute("SELECT COUNT(*) FROM episodes").fetchone() == before


@pytest.mark.parametrize("table", ["rollout_data", "events"])
def test_a_ledger_of_another_version_is_one_clear_line(run_dir, table):
    with sqlite3.connect(run_dir.db_path) as database:
        database.executescript(f"PRAGMA user_version = 1; DROP TABLE {table}")
    with pytest.raises(CheckpointError, match=r"no such table.*of another arealite version") as info:
        main([str(run_dir.path)])
    assert "\n" not in str(info.value)


@pytest.fixture
def recorded(tmp_path) -> RunDir:
    made = RunDir(tmp_path / "e" / "recorded").create()
    stats = write_run(made.path, steps=6)
    made.stats_path.write_text("".join(json.dumps({"time": 1, "reward": 0.5} | line) + "\n" for line in stats))
    return made


def test_the_report_says_what_was_waited_for_and_what_would_help(recorded, capsys):
    main([str(recorded.path)])
    out = capsys.readouterr().out
    assert "the trainer waited 50% of 5.0 s: 25% reward, 25% joining the batch" in out
    assert re.search(r"predicted time of a step: .*twice as fast: −\d+%", out)


def test_what_if_answers_a_question(recorded, capsys):
    main([str(recorded.path), "--what-if", "max_head_offpolicyness=0", "reward_speed=2"])
    out = capsys.readouterr().out
    assert "recorded: 1.00 s a step" in out and "samples by age: 0: 100%" in out
    assert "importance weights are not known: the run kept no log-probs" in out
    with pytest.raises(ConfigError, match="did you mean servers"):
        main([str(recorded.path), "--what-if", "server=2"])


def test_the_analysis_as_json(recorded, capsys):
    main([str(recorded.path), "--json", "--what-if", "servers=3"])
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["servers"] == 2 and len(found["critical_path"]["steps"]) == 5
    assert found["what_if"]["question"] == "servers=3" and found["recorded_step_s"] == 1.0


def test_a_run_without_times_is_reported_without_an_analysis(run_dir, recorded, capsys):
    (recorded.path / "config.yaml").unlink()
    main([str(recorded.path)])
    assert "what the trainer waited for is not known: cannot read" in capsys.readouterr().out
    main([str(run_dir.path)])
    assert "waited for" not in capsys.readouterr().out
    with pytest.raises(RecordingError, match="no finished episode: the run trains on fixed data"):
        main([str(run_dir.path), "--json"])
