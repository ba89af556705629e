"""The demo at ten times its learning rate: alarms, a stop with its exit code, rollbacks that save the run."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from arealite.utils.config import COLLAPSED
from tests import warm_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "arealite"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def supervised(tmp_path_factory) -> Path:
    """The model with which the demo's reinforcement learning begins: a reward of about 0.37."""
    folder = tmp_path_factory.mktemp("demo")
    sys.path.insert(0, str(EXAMPLES))
    try:
        demo, reverse = importlib.import_module("demo"), importlib.import_module("reverse")
        reverse.make_model(folder / "random", seed=1)
        demo.supervise(folder / "random", folder / "supervised", seed=1)
    finally:
        sys.path.remove(str(EXAMPLES))
    return folder / "supervised"


def run(model: Path, folder: Path, num_steps: int, *arguments: str) -> tuple[int, str, list[dict]]:
    """Train through the launcher; returns exit code, output and the statistics of all steps."""
    done = warm_python.run(
        [
            *("-m", "arealite.launcher.local", str(EXAMPLES / "reverse_grpo.py")),
            *("--config", str(EXAMPLES / "configs" / "demo.yaml"), f"actor.path={model}", f"cluster.fileroot={folder}"),
            *("actor.optimizer.lr=4e-3", f"total_train_steps={num_steps}", *arguments),
        ],
        timeout=400.0,
    )
    lines = (folder / "demo" / "reverse" / "stats.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "reward" in step]
    return done.returncode, done.stdout + done.stderr, steps


def test_a_collapsed_run_stops_with_its_exit_code_and_a_model(supervised, tmp_path):
    code, output, steps = run(supervised, tmp_path, 60, "on_collapse=stop", "recover.mode=auto", "recover.retries=2")
    assert code == COLLAPSED, output
    assert len(steps) < 30 and steps[-1]["alarm/reward"] == 1 and steps[0]["alarm/prox_kl"] == 1
    assert "alarm: the reward fell from" in output and "on_collapse=stop" in output
    assert "starting again" not in output
    assert (tmp_path / "demo" / "reverse" / "checkpoints" / f"step{len(steps):06d}" / "model.safetensors").exists()


@pytest.mark.soak
def test_rollbacks_save_a_run_whose_learning_rate_is_too_high(supervised, tmp_path):
    arguments = ("on_collapse=rollback", "recover.mode=auto", "recover.freq_steps=5")
    code, output, steps = run(supervised, tmp_path, 70, *arguments)
    assert code == 0, output
    rewards = [step["reward"] for step in steps]
    assert 1 <= steps[-1]["rollbacks"] <= 3 and "went back to step0000" in output
    assert min(rewards) < 0.1 and sum(rewards[-5:]) / 5 > max(rewards[:3])
