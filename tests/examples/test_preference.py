"""The reward-model and DPO scripts run through the launcher on pairs that a tiny model can separate."""

import json
from pathlib import Path

import pytest

from tests import warm_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "arealite"


@pytest.fixture(scope="module")
def pairs_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"prompt": f"{i} plus {i}?", "chosen": "yes yes", "rejected": "no"} for i in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run_script(name, model_path, pairs_path, tmp_path, *overrides):
    command = ["-m", "arealite.launcher.local", str(EXAMPLES / f"{name}.py")]
    command += ["--config", str(EXAMPLES / "configs" / f"{name}.yaml"), f"model.path={model_path}"]
    command += [f"train_dataset.path={pairs_path}", f"cluster.fileroot={tmp_path}", "model.dtype=float32"]
    command += ["train_dataset.batch_size=4", "total_train_epochs=9", "total_train_steps=6", "model.optimizer.lr=1e-2"]
    command += ["allocation_mode=d1", "model.gradient_checkpointing=false", *overrides]
    done = warm_python.run(command, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (stats,) = tmp_path.rglob("stats.jsonl")
    return [json.loads(line) for line in stats.read_text().splitlines()]


def test_reward_model_script(model_path, pairs_path, tmp_path):
    stats = run_script("preference_rw", model_path, pairs_path, tmp_path)
    assert stats[-1]["loss"] < stats[0]["loss"] and stats[-1]["accuracy"] == 1.0


def test_dpo_script(model_path, pairs_path, tmp_path):
    stats = run_script("preference_dpo", model_path, pairs_path, tmp_path)
    assert stats[-1]["loss"] < stats[0]["loss"] and stats[-1]["accuracy"] == 1.0
