"""The examples on GSM8K, reasoning-gym, TL;DR and HH-RLHF run on a tiny model."""

import importlib
import json
from pathlib import Path

import pytest

from arealite.trainer.stats_logger import read_stats
from arealite.utils.rundir import RunDir
from tests import warm_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "arealite"
SMALL = ["train_dataset.batch_size=4", "total_train_steps=2", "stats_logger.console=false"]


def run(command, folder):
    done = warm_python.run([*command, f"cluster.fileroot={folder}"], timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def policy(model, prefix="", **more):
    keys = {"actor.path": model, "actor.dtype": "float32", "gconfig.n_samples": 2, "gconfig.max_new_tokens": 6}
    keys |= {"server.max_total_tokens": 8192, "actor.gradient_checkpointing": "false", **more}
    return [f"{prefix}{key}={value}" for key, value in keys.items()]


def script(name, folder, *overrides):
    config = ["--config", str(EXAMPLES / "configs" / f"{name}.yaml")]
    run(["-m", "arealite.launcher.local", str(EXAMPLES / f"{name}.py"), *config, *SMALL, *overrides], folder)
    (path,) = folder.glob("*/*/stats.jsonl")
    return read_stats(RunDir(path.parent))


@pytest.mark.slow
def test_ppo(model_path, gsm8k_path, tmp_path):
    settings = policy(model_path, **{"critic.dtype": "float32"})
    data = [f"train_dataset.path={gsm8k_path}", "allocation_mode=embedded.d1+d1"]
    stats = script("gsm8k_ppo", tmp_path, *data, *settings)
    assert len(stats) == 2 and all("critic/loss" in step for step in stats)


def test_reward_model_of_gsm8k(model_path, gsm8k_path, tmp_path):
    model = [f"model.path={model_path}", "model.dtype=float32", "model.optimizer.lr=1e-2"]
    stats = script("gsm8k_rw", tmp_path, f"train_dataset.path={gsm8k_path}", "allocation_mode=d1", *model)
    assert len(stats) == 2 and "accuracy" in stats[-1]


@pytest.mark.slow
def test_reasoning_gym(model_path, tmp_path):
    pytest.importorskip("reasoning_gym")
    small = ["train_dataset.options.size=24", "valid_dataset.options.size=8"]
    stats = script("reasoning_gym_grpo", tmp_path, *small, *policy(model_path))
    assert sum("reward" in step for step in stats) == 2
    # Four rows are shown in the prompt; those that are too long for the model are left out.
    assert 0 < stats[0]["eval/valid/num_questions"] <= 4


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "stages"), [("tldr", "sft,rw,grpo"), ("hhrlhf", "sft,dpo")])
def test_stages_continue_from_each_other(model_path, tmp_path, name, stages):
    rows = [
        {"prompt": f"post {i}\n\nTL;DR:", "chosen": " short", "rejected": " no", "completion": " short"}
        for i in range(8)
    ]
    if name == "hhrlhf":
        start = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: {}\n\nAssistant:"
        rows = [{"chosen": start.format(i) + " good", "rejected": start.format(i) + " bad"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"train_dataset.path={tmp_path / 'rows.jsonl'}", *SMALL, *policy(model_path, "trainer.grpo.")]
    for stage in ("sft", "rw", "dpo"):
        keys += [f"trainer.{stage}.model.path={model_path}", f"trainer.{stage}.model.dtype=float32"]
    run([str(EXAMPLES / f"{name}.py"), stages, *keys, "experiment_name=mine"], tmp_path / "runs")
    for stage in stages.split(","):
        stats = read_stats(RunDir(tmp_path / "runs" / "mine" / stage))
        assert len(stats) == 2, stage
    if "grpo" in stages:
        # The scores of a reward model, not 0 or 1.
        assert stats[-1]["reward"] not in (0.0, 1.0)


def test_wrong_answers_of_gsm8k_differ_in_negative_results(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    change_results = importlib.import_module("gsm8k_rw").change_results
    for answer in ("The average was -7.\n#### -7", "The largest is <<-47=-47>>-47.\n#### -47", "2+1=3\n#### 3"):
        assert change_results(answer).rpartition("#")[2] != answer.rpartition("#")[2]
