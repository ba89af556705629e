"""The examples of workflows, agents and trainers train on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm_python, warm_start

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "arealite"
TINY = {
    "actor.dtype": "float32",
    "actor.ppo_n_minibatches": 1,
    "gconfig.n_samples": 2,
    "gconfig.max_new_tokens": 4,
    "server.max_total_tokens": 8192,
    "rollout.max_concurrent_rollouts": 8,
}
# Script, what it needs besides a model, and statistics that its workflow reports.
SCRIPTS = {
    "multi_turn_math": ({"train_dataset.path": "GSM8K"}, ["turns", "success"]),
    "tool_math": ({"train_dataset.path": "GSM8K"}, ["tool_calls", "tool_failures", "turns"]),
    "search_agent": ({"train_dataset.path": "SQUAD"}, ["tool_calls"]),
    "countdown": ({}, []),
    "gymnasium_agent": ({}, ["steps", "finished"]),
    "agents_sdk": ({"train_dataset.path": "GSM8K"}, ["calls", "turns", "drift_calls"]),
    "custom_loss": ({"train_dataset.path": "GSM8K"}, []),
}

# Not `agents` itself: the folder tests/agents can be imported by that name.
NEEDS = {"gymnasium_agent": "gymnasium", "agents_sdk": "agents.run"}
# Threads of the SDK, which the launcher imports with the script, do not survive its forks.
PLAIN = {"agents_sdk"}


def overrides(folder: Path, model: Path, prefix: str = "") -> list[str]:
    keys = {f"{prefix}{key}": value for key, value in {"actor.path": model, **TINY}.items()}
    keys |= {"cluster.fileroot": folder, "train_dataset.batch_size": 2, "total_train_steps": 2}
    return [f"{key}={value}" for key, value in keys.items()]


def train(command: list[str], is_warm: bool = True, **options) -> None:
    if is_warm:
        done = warm_python.run(command, timeout=240, **options)
    else:
        env = {**os.environ, **warm_start.environment()}
        done = subprocess.run(
            [sys.executable, *command], env=env, timeout=240, capture_output=True, text=True, **options
        )
    assert done.returncode == 0, done.stdout + done.stderr


def check_stats(run_dir: Path, names: list[str]) -> None:
    steps = [json.loads(line) for line in (run_dir / "stats.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    keys = ["reward", *(f"rollout/{name}" for name in names)]
    assert [key for step in steps for key in keys if step.get(key) is None] == []


@pytest.fixture
def squad_path(tmp_path: Path) -> Path:
    rows = [
        {
            "question": f"Who has {i} pens?",
            "context": f"Tom number {i} has {i} pens.",
            "answers": {"text": [f"Tom {i}"]},
        }
        for i in range(16)
    ]
    path = tmp_path / "squad.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_scripts(name, model_path, gsm8k_path, squad_path, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    own, statistics = SCRIPTS[name]
    data = {"GSM8K": gsm8k_path, "SQUAD": squad_path}
    extra = [f"{key}={data.get(value, value)}" for key, value in own.items()]
    script, config = EXAMPLES / f"{name}.py", EXAMPLES / "configs" / f"{name}.yaml"
    command = ["-m", "arealite.launcher.local", str(script), "--config", str(config)]
    train([*command, *overrides(tmp_path, model_path), *extra], is_warm=name not in PLAIN)
    check_stats(tmp_path / name.replace("_", "-") / "trial0", statistics)


@pytest.mark.parametrize(
    ("name", "statistics"), [("custom_workflow", ["tries"]), pytest.param("custom_trainer", [], marks=pytest.mark.slow)]
)
def test_code_that_a_configuration_names(name, statistics, model_path, gsm8k_path, tmp_path):
    config = EXAMPLES / "configs" / f"{name}.yaml"
    command = ["-m", "arealite.cli.main", "--config", str(config), f"train_dataset.path={gsm8k_path}"]
    command += overrides(tmp_path, model_path, "trainer.grpo.")
    # A launcher of its own asks the script for its configuration, in a folder that its forks would remove.
    train(command, is_warm=name == "custom_workflow", cwd=str(EXAMPLES))
    check_stats(tmp_path / name.replace("_", "-") / "trial0", statistics)
