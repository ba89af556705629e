"""GRPO steps through real servers of each kind, started by real launchers; servers killed on the way."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from arealite.launcher.launch_config import LaunchConfig
from tests.servers.conftest import launch_config

SCRIPT = Path(__file__).parent / "grpo_script.py"
pytestmark = pytest.mark.timeout(400)


def arguments(
    folder: Path, backend: str, model: Path, rows: Path, mode: str, steps: int, way: str = "disk"
) -> list[str]:
    """The command line of a small run; flags of the real servers as the client tests have them."""
    config: LaunchConfig = launch_config(backend, model)
    overrides = [
        *("experiment_name=e", "trial_name=t", f"cluster.fileroot={folder}", f"allocation_mode={mode}"),
        *(f"train_dataset.path={rows}", "train_dataset.batch_size=4", f"total_train_steps={steps}"),
        *(f"actor.path={model}", "actor.dtype=float32", "actor.device=cpu", "actor.optimizer.lr=1e-3"),
        *("gconfig.n_samples=4", "gconfig.max_new_tokens=24", "server.device=cpu", "server.dtype=float32"),
        *(f"rollout.weight_update={way}", "rollout.max_head_offpolicyness=1", "launcher.stop_timeout_s=5"),
        "server.max_total_tokens=8192",
    ]  # fmt: skip
    for key in ("sglang", "vllm"):
        if getattr(config, key):
            overrides.append(f"{key}={json.dumps(getattr(config, key))}")
    return overrides


@pytest.fixture
def start(start_launcher) -> Callable[..., subprocess.Popen]:
    return partial(start_launcher, SCRIPT)


def checks(folder: Path) -> list[dict]:
    path = folder / "e" / "t" / "checks.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def finish(process: subprocess.Popen, folder: Path, steps: int, timeout_s: float) -> str:
    out, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, out
    found = checks(folder)
    assert [line["step"] for line in found] == list(range(steps)), out
    assert all(line["gap"] < 2e-3 for line in found), found
    assert sum(line["fresh"] for line in found) > 0, "no token was of the newest weights"
    assert all(line["lag"] <= 1 for line in found), "a sample older than allowed was trained on"
    return out


SGLANG = [pytest.mark.sglang, pytest.mark.timeout(900)]
VLLM = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("backend", "way"),
    [
        ("embedded", "disk"),
        pytest.param("sglang", "broadcast", marks=SGLANG),
        pytest.param("sglang", "shm", marks=[*SGLANG, pytest.mark.soak]),
        pytest.param("vllm", "shm", marks=[*VLLM, pytest.mark.soak]),
    ],
)
def test_grpo_through_the_local_launcher(start, tmp_path, models, gsm8k_path, backend, way):
    mode = f"{backend}.d1p1t1+d1p1t1"
    argv = arguments(tmp_path, backend, models[0], gsm8k_path, mode, 4, way)
    finish(start("local", argv), tmp_path, 4, 400)


@pytest.mark.parametrize(
    ("backend", "way"),
    [pytest.param("embedded", "broadcast", marks=pytest.mark.slow), pytest.param("vllm", "broadcast", marks=VLLM)],
)
def test_training_continues_after_a_server_was_killed(start, tmp_path, models, gsm8k_path, backend, way):
    # Two embedded servers: the other one goes on. One vLLM, which takes long to start: the run waits for it.
    mode, steps = ("embedded.d2+d1", 40) if backend == "embedded" else ("vllm.d1+d1", 6)
    argv = arguments(tmp_path, backend, models[0], gsm8k_path, mode, steps, way)
    process = start("local", argv)
    deadline = time.monotonic() + 480
    while len(checks(tmp_path)) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(server_pid(tmp_path), signal.SIGKILL)
    out = finish(process, tmp_path, steps, 400)
    assert "was ended by SIGKILL" in out and "starting server" in out


def server_pid(folder: Path) -> int:
    """One of the run's servers: a process with its session's number whose output is the server's log."""
    log = str(folder / "e" / "t" / "logs" / "server0.log")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                leads = os.getsid(int(entry.name)) == int(entry.name)
                if leads and os.readlink(entry / "fd" / "1") == log:
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError("no server runs")


@pytest.mark.soak
def test_grpo_through_torchrun_survives_a_killed_rank(start, tmp_path, models, gsm8k_path):
    argv = arguments(tmp_path, "embedded", models[0], gsm8k_path, "embedded.d1+d2", steps=30)
    argv += ["recover.mode=auto", "recover.retries=1", "recover.freq_steps=2"]
    process = start("torchrun", argv)
    deadline = time.monotonic() + 250
    while len(checks(tmp_path)) < 5:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    found = subprocess.run(["pgrep", "-f", str(SCRIPT)], text=True, capture_output=True).stdout.split()
    ranks = [pid for pid in map(int, found) if "LOCAL_RANK=1" in environment(pid)]
    os.kill(ranks[0], signal.SIGKILL)
    out, _ = process.communicate(timeout=250)
    assert process.returncode == 0, out
    steps = [line["step"] for line in checks(tmp_path)]
    assert steps[-1] == 29 and sorted(set(steps)) == list(range(30)), "resumed from the checkpoint, not from the start"
    assert len(steps) < 40


def environment(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return []
