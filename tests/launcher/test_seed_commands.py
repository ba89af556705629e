"""Documented command lines: the plan of each, and the clustered ones run for real at the size of the test clusters."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm_python, warm_start
from tests.tiny_model import make_model

ROOT = Path(__file__).parents[2]
SCRIPT = (
    "examples/arealite/gsm8k_grpo.py --config examples/arealite/configs/gsm8k_grpo.yaml "
    "experiment_name=my_experiment trial_name=my_trial"
)
RAY = "allocation_mode=sglang.d12p1t1+d4p1t1 cluster.n_nodes=4 cluster.n_gpus_per_node=4"
SLURM = "allocation_mode=sglang.d96p1t1+d32p1t1 cluster.n_nodes=16 cluster.n_gpus_per_node=8"
MAIN = "arealite.cli.main experiment_name=my-exp trial_name=my-trial"
# Each command, and a line of its plan.
COMMANDS = {
    f"arealite.launcher.ray {SCRIPT} {RAY}": "rank 3: node 3 gpu 3",
    f"arealite.launcher.slurm {SCRIPT} {SLURM}": "server 95: node 11 gpu 7",
    f"{MAIN} trainer.type=grpo trainer.grpo.actor.path=Qwen/Qwen2-0.5B": "model_path=Qwen/Qwen2-0.5B",
    "arealite.cli.main trainer.type=null valid_dataset.path=huggingface/dataset": "arealite/trainer/evaluate.py",
    "arealite.cli.main mode=ray allocation_mode=sglang.d16p1m1+d32p2m1 trainer.type=grpo": "rank 63: node 9 gpu 7",
}  # fmt: skip


def run(command: str, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", *shlex.split(command), *more]
    env = {**os.environ, **warm_start.environment(), "HF_HUB_OFFLINE": "1", **env}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_plan_of_a_command_as_printed(command, tmp_path):
    """A dry run prints the plan; then it reports what a real run would lack on this machine."""
    argv = ["-m", *shlex.split(command), "--dry-run", f"cluster.fileroot={tmp_path}"]
    done = warm_python.run(argv, timeout=60)
    assert COMMANDS[command] in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == [], "a dry run writes nothing"
    if importlib.util.find_spec("datasets") is None:
        assert done.returncode == 2 and "need the package `datasets`" in done.stderr
    elif "huggingface/dataset" in command:
        assert done.returncode == 2 and "no built-in task for dataset 'huggingface/dataset'" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


def scaled(folder: Path, prefix: str = "") -> list[str]:
    """A tiny model on the CPU instead of the real one."""
    model = folder / "model"
    make_model(model)
    rows = folder / "gsm8k.jsonl"
    row = {"question": "1 + 1?", "answer": "#### 2"}
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    settings = {
        "actor.path": model, "actor.dtype": "float32", "actor.device": "cpu", "actor.ppo_n_minibatches": 1,
        "server.device": "cpu", "server.dtype": "float32", "server.max_total_tokens": 4096, "gconfig.max_new_tokens": 8,
        "gconfig.n_samples": 2,
    }  # fmt: skip
    common = [f"cluster.fileroot={folder / 'runs'}", f"train_dataset.path={rows}"]
    common += ["train_dataset.name=null", "train_dataset.batch_size=4", "total_train_steps=2"]
    common += ["launcher.stop_timeout_s=3", "stats_logger.console=false"]
    return [*(f"{prefix}{key}={value}" for key, value in settings.items()), *common]


def steps(folder: Path) -> int:
    (path,) = (folder / "runs").glob("*/*/stats.jsonl")
    return len(path.read_text().splitlines())


@pytest.mark.ray
@pytest.mark.timeout(200)
def test_the_ray_command_on_four_nodes(tmp_path, ray_cluster):
    mode = "allocation_mode=embedded.d3p1t1+d1p1t1 cluster.n_nodes=4 cluster.n_gpus_per_node=1"
    done = run(f"arealite.launcher.ray {SCRIPT} {mode}", *scaled(tmp_path), RAY_ADDRESS=ray_cluster.address)
    assert done.returncode == 0 and steps(tmp_path) == 2, done.stdout + done.stderr


@pytest.mark.ray
@pytest.mark.timeout(200)
def test_the_config_alone_on_ray(tmp_path, ray_cluster):
    mode = "allocation_mode=embedded.d1p1m1+d1p2m1 cluster.n_gpus_per_node=3"
    command = f"arealite.cli.main mode=ray {mode} trainer.type=grpo"
    done = run(command, *scaled(tmp_path, "trainer.grpo."), RAY_ADDRESS=ray_cluster.address)
    assert done.returncode == 0 and steps(tmp_path) == 2, done.stdout + done.stderr


@pytest.mark.slurm
@pytest.mark.timeout(200)
def test_the_slurm_command_on_four_nodes(tmp_path, slurm_cluster):
    mode = "allocation_mode=embedded.d3p1t1+d1p1t1 cluster.n_nodes=4 cluster.n_gpus_per_node=1"
    done = run(f"arealite.launcher.slurm {SCRIPT} {mode}", *scaled(tmp_path), **slurm_cluster.env)
    assert done.returncode == 0 and steps(tmp_path) == 2, done.stdout + done.stderr
