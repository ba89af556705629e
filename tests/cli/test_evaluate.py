"""`arealite evaluate`: which checkpoints it evaluates, with which settings, and real ones of a tiny run."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from arealite.api.cli_args import GRPOConfig, SFTConfig
from arealite.api.errors import ConfigError
from arealite.cli.evaluate import evaluate_checkpoint, find_new, main, read_settings
from arealite.trainer.answers import compare_answers, read_answers
from arealite.trainer.stats_logger import read_stats
from arealite.utils.config import load_config, to_yaml
from arealite.utils.rundir import RunDir
from tests import warm_python
from tests.examples.test_scripts import EXAMPLES, grpo_overrides, run

COMMON = ["experiment_name=e", "trial_name=t", "train_dataset.path=train", "valid_dataset.path=/data/gsm8k.jsonl"]


def make_run(folder: Path, config) -> RunDir:
    run_dir = RunDir(folder).create()
    run_dir.config_path.write_text(to_yaml(config))
    return run_dir


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    keys = ["actor.path=/base", "gconfig.n_samples=4", "actor.lora_rank=8", "allocation_mode=sglang.d4+d4"]
    keys += ["rollout.server_addrs=[a:1]", "server.model_path=/other", "cluster.n_nodes=2", "ref.path=r"]
    keys += ["recover.mode=auto", "recover.retries=2", "gconfig.max_new_tokens=99", "actor.kl_ctl=0.1"]
    return make_run(tmp_path, load_config([*COMMON, *keys], GRPOConfig))


def test_settings_are_those_of_the_run_without_its_servers(run_dir):
    config = read_settings(run_dir, ["eval_gconfig.n_samples=8", "eval_gconfig.temperature=0.6"])
    gconfig = config.evaluation_gconfig
    assert (gconfig.n_samples, gconfig.temperature, gconfig.max_new_tokens) == (8, 0.6, 99)
    assert (config.allocation_mode, config.rollout.server_addrs, config.server.model_path) == (
        "embedded.d1+eval",
        [],
        "",
    )
    assert (config.tokenizer_path, config.cluster.n_nodes, config.recover.mode) == ("/base", 1, "disabled")
    assert config.results_dir == str(run_dir.path) and config.ref is None
    assert config.train_dataset.path == config.validation_sets["valid"].path == "/data/gsm8k.jsonl"
    assert read_settings(run_dir, ["allocation_mode=sglang.d2+eval"]).allocation_mode == "sglang.d2+eval"


def test_a_supervised_run_is_evaluated_too(tmp_path):
    run_dir = make_run(tmp_path, load_config([*COMMON, "model.path=/base"], SFTConfig))
    config = read_settings(run_dir, ["gconfig.max_new_tokens=7", "valid_datasets.mawps.path=/data/mawps.jsonl"])
    assert config.tokenizer_path == "/base" and list(config.validation_sets) == ["valid", "mawps"]
    assert config.evaluation_gconfig.max_new_tokens == 7


def test_what_cannot_be_evaluated_is_refused(run_dir, tmp_path):
    with pytest.raises(ConfigError, match="there is no run directory"):
        main([str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="no reward is known for the dataset 'own'"):
        main([str(run_dir.path), "valid_dataset.path=own"])
    with pytest.raises(ConfigError, match=r"set valid_dataset\.path"):
        main([str(run_dir.path), "valid_dataset=null"])


def test_a_run_without_checkpoints_and_one_with_all_results_say_so(run_dir, gsm8k_path, capsys):
    argv = [str(run_dir.path), "--once", f"valid_dataset.path={gsm8k_path}"]
    assert main(argv) == 1
    assert f"error: no checkpoint in {run_dir.checkpoints}" in capsys.readouterr().out
    (run_dir.checkpoints / "step000003").mkdir(parents=True)
    (run_dir.checkpoints / "step000003" / "config.json").touch()
    stats = {"step": 2, "eval/valid/pass@1": 0.5, "eval/valid/version/min": 3, "eval/valid/version/max": 3}
    run_dir.stats_path.write_text(json.dumps(stats) + "\n")
    assert main(argv) == 0
    assert "nothing to do: all 1 checkpoints in" in capsys.readouterr().out


def test_finished_checkpoints_without_results_are_new(run_dir):
    for name in ("step000010", "step000002", "step000003", "step000004", "step000003.partial", "best", "step000005"):
        (run_dir.checkpoints / name).mkdir(parents=True)
    for name in ("step000010", "step000002", "step000003", "step000004"):
        (run_dir.checkpoints / name / "config.json").touch()
    # Its tokenizer is still being written.
    (run_dir.checkpoints / "step000004.tokenizer").mkdir()

    def new(*overrides):
        return [each.version for each in find_new(run_dir, read_settings(run_dir, list(overrides)))]

    def add(step, low, high):
        stats = {"step": step, "eval/valid/version/min": low, "eval/valid/version/max": high}
        stats |= {"eval/valid/pass@1": 0.5, "eval/valid/sampling/n_samples": 1.0}
        with run_dir.stats_path.open("a") as file:
            file.write(json.dumps(stats) + "\n")

    assert new() == [2, 3, 10]
    add(2, 3, 3)
    # This evaluation beside training has answers of later weights.
    add(9, 10, 12)
    assert new() == [2, 10]
    add(9, 10, 10)
    assert new() == [2]
    # With more samples, or another set, there is something new to learn.
    assert new("eval_gconfig.n_samples=4", "eval_gconfig.temperature=1") == [2, 3, 10]
    assert new("valid_datasets.mawps.path=m") == [2, 3, 10]


def test_results_of_another_sampling_do_not_count(run_dir):
    (run_dir.checkpoints / "step000003").mkdir(parents=True)
    (run_dir.checkpoints / "step000003" / "config.json").touch()
    # Keys of `arealite train` are understood too.
    sampled = ["trainer.grpo.eval_gconfig.n_samples=5", "trainer.grpo.eval_gconfig.temperature=0.7"]
    settings = read_settings(run_dir, sampled)
    sampling = settings.eval_gconfig.statistics(settings.gconfig)
    assert sampling["sampling/n_samples"] == 5 and sampling["sampling/max_new_tokens"] == 99
    stats = {"pass@1": 0.5, "pass@4": 0.7, "version/min": 3, "version/max": 3, **sampling}
    run_dir.stats_path.write_text(json.dumps({"step": 2} | {f"eval/valid/{k}": v for k, v in stats.items()}) + "\n")
    assert find_new(run_dir, settings) == []
    for others in ([], [*sampled, "eval_gconfig.temperature=1"], [*sampled, "eval_gconfig.max_new_tokens=7"]):
        assert [each.version for each in find_new(run_dir, read_settings(run_dir, others))] == [3]


def test_results_of_other_data_or_of_another_reward_do_not_count(tmp_path):
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.touch()
    keys = [*COMMON, "actor.path=/base", "gconfig.n_samples=4", f"valid_dataset.path={old}", "reward=math"]
    run_dir = make_run(tmp_path / "run", load_config(keys, GRPOConfig))
    (run_dir.checkpoints / "step000003").mkdir(parents=True)
    (run_dir.checkpoints / "step000003" / "config.json").touch()
    stats = {"pass@1": 0.5, "version/min": 3, "version/max": 3}
    run_dir.stats_path.write_text(json.dumps({"step": 2} | {f"eval/valid/{k}": v for k, v in stats.items()}) + "\n")

    def new_versions(*overrides):
        return [each.version for each in find_new(run_dir, read_settings(run_dir, list(overrides)))]

    assert new_versions() == new_versions("valid_dataset.reward=math", "valid_dataset.streaming=true") == []
    changes = [f"valid_dataset.path={new}", "reward=qa", "valid_dataset.max_length=9", "valid_dataset.task=math"]
    assert [new_versions(change) for change in changes] == [[3]] * 4
    # The file has another path on this machine.
    old.unlink()
    assert new_versions(changes[0]) == []


def test_an_evaluation_keeps_of_which_data_its_results_are(run_dir, monkeypatch):
    path = run_dir.checkpoints / "step000003"
    path.mkdir(parents=True)
    (path / "config.json").touch()
    stats = {"pass@1": 0.5, "version/min": 3, "version/max": 3}
    run_dir.stats_path.write_text(json.dumps({"step": 2} | {f"eval/valid/{k}": v for k, v in stats.items()}) + "\n")
    codes = iter((1, 0))
    monkeypatch.setattr("arealite.cli.evaluate.launch", lambda *args: next(codes))
    changed = read_settings(run_dir, ["reward=qa"])
    for expected in (1, 0):
        (checkpoint,) = find_new(run_dir, changed)
        assert evaluate_checkpoint(changed, checkpoint) == expected
    assert find_new(run_dir, changed) == []
    assert find_new(run_dir, read_settings(run_dir, [])) == [checkpoint]
    # Damaged by a crash, it says nothing about the results.
    (data_path,) = run_dir.evaluations.glob("*/data.json")
    for damaged in ("", '{"valid"', "[]", '{"valid": 1}', '{"valid": {"path": "a"}}'):
        data_path.write_text(damaged)
        assert find_new(run_dir, changed) == find_new(run_dir, read_settings(run_dir, [])) == [checkpoint]


def test_a_run_is_in_use_while_its_lock_is_held(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    assert not run_dir.is_in_use()
    with run_dir.lock():
        assert run_dir.is_in_use() and run_dir.is_in_use()
    assert not run_dir.is_in_use()


def train(folder: Path, model: Path, data: Path, *more: str) -> RunDir:
    run(
        *("-m", "arealite.launcher.local", str(EXAMPLES / "gsm8k_grpo.py")),
        *("--config", str(EXAMPLES / "configs" / "gsm8k_grpo.yaml"), *grpo_overrides(model)),
        *(f"cluster.fileroot={folder}", f"train_dataset.path={data}", "train_dataset.batch_size=4"),
        *("total_train_steps=4", "saver.freq_steps=2", "allocation_mode=embedded.d1+d1"),
        *(f"valid_dataset.path={data}", "evaluator.at_start_and_end=false", "actor.optimizer.lr=0.01", *more),
    )
    return RunDir(folder / "gsm8k-grpo" / "trial0")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_checkpoints_of_a_run_are_evaluated_once_each_until_it_ends(model_path, gsm8k_path, tmp_path):
    run_dir = train(tmp_path, model_path, gsm8k_path, "stats_logger.tensorboard=true")
    second, hidden = run_dir.checkpoints / "step000004", run_dir.checkpoints / "hidden"
    second.rename(hidden)
    before = run_dir.stats_path.read_text()
    command = ["-m", "arealite.cli.entry", "evaluate", str(run_dir.path)]
    # The lock stands for a run that goes on; its second checkpoint appears while the first is evaluated.
    with run_dir.lock():
        process = warm_python.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            assert process.stdout is not None
            assert any("evaluating" in line for line in process.stdout)
            hidden.rename(second)
            assert any("evaluating" in line and "step000004" in line for line in process.stdout)
        except BaseException:
            process.kill()
            raise
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert run_dir.stats_path.read_text().startswith(before)
    steps = {step["step"]: step for step in read_stats(run_dir)}
    assert [step for step in steps if "eval/valid/pass@1" in steps[step]] == [1, 3]
    assert all(steps[step]["eval/valid/version/max"] == step + 1 and "reward" in steps[step] for step in (1, 3))
    # The weights differ, and so do their greedy answers.
    paths = [run_dir.answers_path(version, "valid") for version in (2, 4)]
    first, last = (read_answers(path) for path in paths)
    assert len(first) == len(last) == 32 and {answer.version for answer in last} == {4}
    assert [answer.answer for answer in first] != [answer.answer for answer in last]
    assert compare_answers(*paths).num_questions == 32
    assert list((run_dir.tensorboard / "evaluate").iterdir()) and not list((run_dir.evaluations / "jobs").iterdir())
    # A second start finds nothing to do.
    after = run_dir.stats_path.read_text()
    run(*command)
    assert run_dir.stats_path.read_text() == after


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_adapters_are_evaluated_on_their_base_model(model_path, gsm8k_path, tmp_path):
    run_dir = train(tmp_path, model_path, gsm8k_path, "actor.lora_rank=2", "actor.optimizer.lr=0.05")
    shutil.rmtree(run_dir.checkpoints / "step000002")
    run("-m", "arealite.cli.entry", "evaluate", str(run_dir.path), "--once")
    (answers,) = run_dir.evaluations.glob("step*/valid.jsonl")
    assert answers.parent.name == "step000004" and {answer.version for answer in read_answers(answers)} == {4}
    base = tmp_path / "base"
    run(
        *("-m", "arealite.cli.main", "trainer.type=null", f"valid_dataset.path={gsm8k_path}"),
        *("allocation_mode=embedded.d1+eval", f"cluster.fileroot={base}", f"trainer.grpo.actor.path={model_path}"),
        *("trainer.grpo.gconfig.max_new_tokens=8", "trainer.grpo.server.max_total_tokens=4096"),
    )
    plain = read_answers(RunDir(base / "arealite" / "eval").answers_path(0, "valid"))
    assert [answer.answer for answer in plain] != [answer.answer for answer in read_answers(answers)]
