"""Small real processes for launcher tests: a server that answers /health, and a script that behaves as configured."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from arealite.doctor.collect import collect
from arealite.doctor.evidence import read_evidence
from arealite.doctor.rules import diagnose
from tests import warm_start
from tests.launcher.slurm_cluster import SlurmCluster, why_not

SERVER = """
import http.server, os, subprocess, sys, time
print("the fake server starts", os.environ.get("CUDA_MPS_PIPE_DIRECTORY"), flush=True)
if os.environ.get("FAKE_SERVER") == "dies":
    sys.exit("cannot load the model: no such file")
if os.environ.get("FAKE_SERVER") == "refuses":
    print("starts", file=open("starts", "a"))
    os.write(1, b"loading\\nerror: \\x1b[31mconfig.json is broken\\x80\\n")
    sys.exit(2)
if os.environ.get("FAKE_SERVER") == "hangs":
    time.sleep(600)
while os.environ.get("FAKE_SERVER") == "loads" and not os.path.exists("loaded"):
    time.sleep(0.05)
subprocess.Popen(["sleep", "600"], start_new_session=True)   # a worker in its own session, like those of real servers
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path in ("/health", "/server_info") else 404)
        self.end_headers()
        if self.path == "/server_info":     # busy until the file `idle` exists
            count = 0 if os.path.exists("idle") else 5
            self.wfile.write(b'{"running": %d, "waiting": %d}' % (count, count))
    def log_message(self, *args): pass
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--config" in flags:     # prints its settings, as SGLang does
    print("api_key=" + repr(open(flags["--config"]).read().split()[-1]), flush=True)
http.server.ThreadingHTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
"""

SCRIPT = """
import os, pathlib, signal, subprocess, sys, time
from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import DatasetError
from arealite.launcher.servers import health_problem
from arealite.utils.config import load_config, run_main

def wait_for_servers(addresses):    # as an engine does when it is initialized
    deadline = time.monotonic() + 60
    while any(health_problem(address) for address in addresses if address):
        assert time.monotonic() < deadline, addresses
        time.sleep(0.02)

def main(argv):
    config = load_config(argv, GRPOConfig)
    rank, behaviour = os.environ["RANK"], config.tokenizer_path
    servers, attempt = os.environ["AREALITE_SERVER_ADDRS"], os.environ["AREALITE_ATTEMPT"]
    devices, mps = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    size = os.environ["WORLD_SIZE"]
    print(f"rank {rank} of {size} servers {servers} attempt {attempt} devices {devices} mps {mps}", flush=True)
    if behaviour == "refuse":
        raise DatasetError("no rows")
    if behaviour == "load":
        pathlib.Path("loaded").touch()
    wait_for_servers(servers.split(","))
    if behaviour in ("raise", "linger") and rank == "1":
        raise RuntimeError("rank one has a problem")
    if behaviour == "linger":   # so that the other nodes end before the one with the failure
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour in ("SIGKILL", "SIGTERM", "SIGINT") and attempt == "0":
        os.kill(os.getpid(), signal.Signals[behaviour])
        time.sleep(600)
    if behaviour in ("wait", "raise", "linger") or (behaviour == "requeue" and attempt == "0"):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        pathlib.Path(f"up{rank}").touch()
        time.sleep(600)

    if behaviour == "save":     # as `Interrupt` does after the first step
        def save(number, frame):
            if rank == "0":
                pathlib.Path("runs/e/t/recover/step000003").mkdir(parents=True)     # fails if it is there
                pathlib.Path("runs/e/t/recover/step000003/state.json").touch()
            sys.exit(130)
        signal.signal(signal.SIGTERM if "SLURM_JOB_ID" in os.environ else signal.SIGINT, save)
        pathlib.Path(f"up{rank}").touch()
        time.sleep(600)

    if behaviour == "hang":     # a checkpoint that is never complete
        signal.signal(signal.SIGINT, lambda number, frame: pathlib.Path("asked").touch())
        pathlib.Path(f"up{rank}").touch()
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            time.sleep(1)

    if behaviour in ("until", "load"):
        pathlib.Path(f"up{rank}").touch()
        while not pathlib.Path("finish").exists():
            time.sleep(0.1)

run_main(main)
"""


def diagnosis(run_dir: Path) -> tuple[str, str]:
    """Return kind and verdict of the doctor."""
    case = collect(run_dir, 30.0)
    read_evidence(case)
    finding = diagnose(case)[0]
    return finding.kind, finding.verdict


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with script.py and server.py in it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "server.py").write_text(SERVER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.fixture
def arguments() -> Callable[..., list[str]]:
    """Make the arguments of a run with fake servers, followed by more."""

    def make(*more: str, mode: str = "sglang.d2+d2") -> list[str]:
        return [
            *("experiment_name=e", "trial_name=t", "train_dataset.path=d", "actor.path=m"),
            *("gconfig.n_samples=2", f"allocation_mode={mode}", "launcher.stop_timeout_s=2"),
            f"sglang.command={sys.executable} server.py",
            *more,
        ]

    return make


@pytest.fixture(scope="session")
def ray_cluster():
    """A real Ray of four logical nodes on this machine, for all tests that need one."""
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        assert "CI" not in os.environ, "Ray must be installed in CI"
        pytest.skip("Ray is not installed (pip install 'arealite[ray]')")
    # By default Ray lowers the priority of its workers, and on a busy machine they hardly run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    made = Cluster(initialize_head=True, head_node_args=ray_node(num_cpus=10, num_gpus=0))
    for _ in range(3):
        made.add_node(**ray_node(num_cpus=4, num_gpus=4))
    yield made
    made.shutdown()


def ray_node(**resources: int) -> dict[str, Any]:
    """Return the arguments of a node whose workers are forks."""
    return {**resources, "env_vars": warm_start.environment()}


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real Slurm of four nodes on this machine."""
    reason = why_not()
    if reason:
        assert "CI" not in os.environ, reason
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def find_leftovers(folder: Path) -> list[str]:
    """Return command lines of living processes whose working directory is `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        # A test may have changed the working directory of its own process.
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if os.readlink(entry / "cwd") == str(folder) and (entry / "cmdline").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    # Processes of the test's own Ray cluster do not count.
    return [line for line in found if not any(word in line for word in ("/ray/", "ray::"))]


def wait_until_gone(folder: Path, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while left := find_leftovers(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
