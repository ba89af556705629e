"""Runs that are described by a config alone: `python -m arealite.cli.main …`."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import ConfigError
from arealite.cli.main import MainConfig, flatten
from arealite.cli.report import main as report
from arealite.trainer.answers import read_answers
from arealite.trainer.stats_logger import read_stats
from arealite.utils.config import load_config
from arealite.utils.rundir import RunDir
from tests import warm_python

ROOT = Path(__file__).resolve().parents[2]


def cli(folder: Path, *arguments: str) -> str:
    command = ["-m", "arealite.cli.main", f"cluster.fileroot={folder}", *arguments]
    done = warm_python.run(command, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("layout", "sampling"),
    [
        ("embedded.d1+d1", ["n_samples=2", "temperature=0.6"]),
        pytest.param("embedded.d1+d2", ["n_samples=1", "temperature=0"], marks=pytest.mark.slow),
    ],
)
def test_evaluation_without_training_reports_the_mean_reward_and_keeps_all_answers(
    model_path, gsm8k_path, tmp_path, layout, sampling, capsys
):
    printed = cli(
        tmp_path,
        *("trainer.type=null", f"valid_dataset.path={gsm8k_path}", f"allocation_mode={layout}"),
        *(f"trainer.grpo.actor.path={model_path}", "trainer.grpo.gconfig.max_new_tokens=4"),
        *(f"trainer.grpo.eval_gconfig.{key}" for key in sampling),
        "trainer.grpo.server.max_total_tokens=8192",
    )
    assert "pass@1" in printed and "valid" in printed
    (line,) = (tmp_path / "arealite" / "eval" / "stats.jsonl").read_text().splitlines()
    stats = json.loads(line)
    assert stats["step"] == -1 and stats["eval/valid/num_questions"] == 32
    assert stats["eval/valid/pass@1"] == pytest.approx(stats["eval/valid/reward"])
    assert 0 <= stats["eval/valid/pass@1/low"] <= stats["eval/valid/pass@1"] < stats["eval/valid/pass@1/high"] < 1
    assert stats["eval/valid/answer_len"] <= 4 and ("eval/valid/maj@2" in stats) == ("n_samples=2" in sampling)
    answers = read_answers(RunDir(tmp_path / "arealite" / "eval").answers_path(0, "valid"))
    assert len(answers) == 32 * int(sampling[0].removeprefix("n_samples=")) and answers[-1].question == 31
    with sqlite3.connect(tmp_path / "arealite" / "eval" / "run.sqlite") as database:
        answers = database.execute("SELECT reward, preview FROM rollouts").fetchall()
    assert len(answers) == 32 * int(sampling[0].removeprefix("n_samples="))
    assert abs(sum(reward for reward, *_ in answers) / len(answers) - stats["eval/valid/reward"]) < 1e-6
    report([str(tmp_path / "arealite" / "eval"), "--rollouts", "32"])
    printed = capsys.readouterr().out
    assert "evaluated" in printed and printed.count("evaluation of version 0") == 32
    assert "31pensandgets32.Howmany?" in "".join(printed.split())


@pytest.mark.parametrize("kind", ["dpo", pytest.param("rw", marks=pytest.mark.slow)])
def test_preference_pairs_train(model_path, tmp_path, kind):
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{i}: ", "chosen": "good", "rejected": "bad"} for i in range(8)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"trainer.{kind}.model.path={model_path}", f"trainer.{kind}.model.dtype=float32"]
    keys += [f"trainer.{kind}.model.optimizer.lr=1e-2"]
    if kind == "dpo":
        keys += [f"trainer.dpo.ref.path={model_path}", "trainer.dpo.ref.dtype=float32"]
    data = [f"train_dataset.path={pairs}", "train_dataset.batch_size=4"]
    data += [f"valid_dataset.path={pairs}", "evaluator.freq_epochs=2"]
    cli(tmp_path, f"trainer.type={kind}", "allocation_mode=d1", "total_train_epochs=4", *keys, *data)
    first, *steps = read_stats(RunDir(tmp_path / "arealite" / kind))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [step["step"] for step in steps if "eval/valid/loss" in step] == [3, 7]
    assert steps[7]["eval/valid/loss"] < first["eval/valid/loss"] and steps[7]["eval/valid/accuracy"] == 1


def test_kto_trains_on_single_answers(model_path, tmp_path):
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": f"{i}: ", "completion": ["bad", "good"][i % 3 > 0], "label": i % 3 > 0} for i in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"trainer.dpo.{part}.path={model_path}" for part in ("model", "ref")]
    keys += [f"trainer.dpo.{part}.dtype=float32" for part in ("model", "ref")]
    keys += ["trainer.dpo.model.loss=kto", "trainer.dpo.model.optimizer.lr=1e-2", "trainer.type=dpo"]
    data = [f"{name}.path={path}" for name in ("train_dataset", "valid_dataset")]
    cli(tmp_path, *keys, *data, "train_dataset.batch_size=3", "allocation_mode=d1", "total_train_epochs=4",
        "evaluator.freq_epochs=4")  # fmt: skip
    first, *steps = read_stats(RunDir(tmp_path / "arealite" / "dpo"))
    assert first["eval/valid/loss"] == pytest.approx(0.5, abs=1e-4) and steps[-1]["eval/valid/loss"] < 0.45


@pytest.mark.parametrize(
    ("kind", "name", "servers"),
    [("grpo", "grpo", True), ("null", "eval", True), ("sft", "sft", False), ("rw", "rw", False)],
)
def test_each_kind_of_run_has_a_directory_and_only_the_devices_it_needs(kind, name, servers):
    argv = [f"trainer.type={kind}", "valid_dataset.path=some"]
    flat = flatten(load_config(argv, MainConfig))
    assert flat.trial_name == name and ("embedded" in flat.allocation_mode) == servers
    assert flatten(load_config([*argv, "trial_name=t"], MainConfig)).trial_name == "t"


def test_the_tree_becomes_the_flat_config_of_a_script():
    config = load_config(["trainer.grpo.actor.path=m", "trainer.grpo.gconfig.n_samples=8"], MainConfig)
    flat = flatten(config)
    assert isinstance(flat, GRPOConfig)
    assert flat.actor.path == "m" and flat.gconfig.n_samples == 8


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trainer.type=grop", "use one of grpo, sft"),
        ("trainer.type=null", "set valid_dataset.path"),
        ("mode=cloud", "local, torchrun, ray, slurm"),
        ("trainer.grpo.actor.pth=x", "did you mean trainer.grpo.actor.path"),
        ("allocation_mode=sglang.d4x2", "\\^"),
    ],
)
def test_mistakes_are_errors_before_anything_starts(argument, message):
    with pytest.raises(ConfigError, match=message):
        load_config([argument], MainConfig)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("eval/vaild/pass@1", "its name begins with eval/valid/ or eval/mawps/"),
        ("reward", "its name begins with eval/valid/"),
        ("eval/mawps/pass@8", r"eval_gconfig\.n_samples=4 gives pass@1, pass@2, pass@4, maj@2, maj@4"),
        ("eval/valid/maj@1", "is not measured"),
        ("eval/valid/pass@1x", "is not measured"),
        ("eval/valid/acuracy", "is not measured.*and there is reward"),
    ],
)
def test_a_best_metric_that_no_evaluation_has_is_refused(metric, message):
    sets = ["valid_dataset.path=v", "valid_datasets.mawps.path=m"]
    sampling = ["trainer.grpo.eval_gconfig.n_samples=4", "trainer.grpo.eval_gconfig.temperature=1"]
    for known in ("eval/valid/pass@1", "eval/mawps/maj@4", "eval/mawps/reward"):
        load_config([*sets, *sampling, f"saver.best_metric={known}"], MainConfig)
    with pytest.raises(ConfigError, match=message):
        load_config([*sets, *sampling, f"saver.best_metric={metric}"], MainConfig)
    with pytest.raises(ConfigError, match=r"set valid_dataset\.path too"):
        load_config([f"saver.best_metric={metric}"], MainConfig)


def test_a_best_metric_of_all_answers_is_known_if_their_number_is_no_power_of_two():
    sampling = ["trainer.grpo.eval_gconfig.n_samples=5", "trainer.grpo.eval_gconfig.temperature=1"]
    for name in ("pass@4", "pass@5", "maj@5"):
        load_config(["valid_dataset.path=v", *sampling, f"saver.best_metric=eval/valid/{name}"], MainConfig)
    with pytest.raises(ConfigError, match="gives pass@1, pass@2, pass@4, pass@5, maj@2, maj@4, maj@5"):
        load_config(["valid_dataset.path=v", *sampling, "saver.best_metric=eval/valid/maj@3"], MainConfig)
    supervised = ["trainer.type=sft", "valid_dataset.path=v"]
    load_config([*supervised, "saver.best_metric=eval/valid/loss"], MainConfig)
    with pytest.raises(ConfigError, match="sft generates no answers and measures its loss"):
        load_config([*supervised, "saver.best_metric=eval/valid/pass@1"], MainConfig)
