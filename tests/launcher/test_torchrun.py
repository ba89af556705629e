"""The torchrun launcher with a real torchrun: ranks in a real process group, restarted by it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arealite.api.errors import AllocationError, ConfigError
from arealite.launcher.elastic_rank import fit_mode
from arealite.launcher.torchrun import launch
from tests import warm_start
from tests.launcher.conftest import find_leftovers, wait_until_gone
from tests.warm_start.sitecustomize import FOLDER_ENV

SCRIPT = """
import os, pathlib, signal
import torch, torch.distributed as dist
from arealite.api.cli_args import GRPOConfig
from arealite.utils.config import load_config, run_main

def main(argv):
    config = load_config(argv, GRPOConfig)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    servers = os.environ["AREALITE_SERVER_ADDRS"]
    print(f"rank {dist.get_rank()} sum {total.item():g} restart {restart} servers {servers}", flush=True)
    if config.tokenizer_path == "once" and restart == "0" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()

run_main(main)
"""


@pytest.fixture(autouse=True)
def script(work):
    (work / "script.py").write_text(SCRIPT)
    yield
    wait_until_gone(work)


@pytest.fixture
def forks(work, monkeypatch):
    """Let torchrun and ranks be forks: each would import torch, which takes seconds."""
    for name, value in {**warm_start.environment(), FOLDER_ENV: str(work)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_ranks_of_torchrun(work, arguments, capfdbinary):
    assert launch("script.py", arguments()) == 0
    out = capfdbinary.readouterr().out.decode()
    assert "rank 0 sum 2 restart 0 servers 127.0.0.1:" in out and "rank 1 sum" not in out


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_torchrun_restarts_a_dead_rank_while_servers_stay(work, arguments, capfdbinary):
    argv = arguments("tokenizer_path=once", "recover.mode=auto", "recover.retries=1")
    assert launch("script.py", argv) == 0
    out = capfdbinary.readouterr().out.decode()
    assert "sum 2 restart 0" in out and "sum 2 restart 1" in out
    assert out.count("server(s) ready") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_without_retries_the_run_fails(work, arguments):
    assert launch("script.py", arguments("tokenizer_path=once")) != 0


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_two_machines_meet_in_the_run_directory(work, arguments):
    argv = arguments(
        "cluster.n_nodes=2", "cluster.n_gpus_per_node=2", "server.device=cpu", "actor.device=cpu", mode="sglang.d2+d2"
    )
    run = [sys.executable, "-m", "arealite.launcher.torchrun", "script.py", *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    machines = [subprocess.Popen(run, env=os.environ, **pipes) for _ in range(2)]
    outputs = [machine.communicate(timeout=100)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert sum("rank 0 sum 2" in out for out in outputs) == 1
    assert find_leftovers(work) == []


def test_dry_run(work, arguments, capsys):
    assert launch("script.py", arguments(), dry_run=True) == 0
    assert "rank 1: node 0" in capsys.readouterr().out
    assert not Path("runs").exists()


def test_an_elastic_layout_fits_the_ranks_that_are_there():
    assert fit_mode("embedded.d1+d4t2", 4) == "embedded:d1p1t1+fsdp:d2p1t2"
    with pytest.raises(AllocationError, match="3 ranks are left, and a replica of d4p1t2 takes 2"):
        fit_mode("embedded.d1+d4t2", 3)


def test_elastic_jobs_that_cannot_work_are_refused(work, arguments):
    argv = arguments(
        "cluster.n_nodes=2",
        "cluster.min_nodes=1",
        "cluster.n_gpus_per_node=2",
        "actor.device=cpu",
        "server.device=cpu",
        mode="sglang.d3+d1",
    )
    with pytest.raises(ConfigError, match=r"set recover\.mode=auto and recover\.retries"):
        launch("script.py", argv)
    with pytest.raises(ConfigError, match=r"servers \[2\] would be on machines that may leave"):
        launch("script.py", [*argv, "recover.mode=auto", "recover.retries=1"])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("forks")
def test_machines_join_and_leave_a_run(work):
    """A machine joins and is killed: the run continues from its checkpoint with one, two and again one rank."""
    examples = Path(__file__).parents[2] / "examples" / "arealite"
    sys.path.insert(0, str(examples))
    from reverse import make_model

    make_model(work / "model", seed=0)
    argv = [
        *("--config", str(examples / "configs" / "demo.yaml"), "actor.path=model", "total_train_steps=100000"),
        *("allocation_mode=embedded.d1+d2", "gconfig.n_samples=2", "train_dataset.batch_size=4"),
        *("cluster.n_nodes=2", "cluster.min_nodes=1", "cluster.n_gpus_per_node=2", "stats_logger.console=false"),
        *("recover.mode=auto", "recover.retries=3", "recover.freq_steps=1", "launcher.stop_timeout_s=3"),
    ]  # fmt: skip
    script = str(examples / "reverse_grpo.py")
    run = [sys.executable, "-m", "arealite.launcher.torchrun", script, *argv]
    folder = work / "runs" / "demo" / "reverse"
    config = folder / "config.yaml"
    logs = [(work / f"machine{i}.log").open("w") for i in range(2)]

    def steps() -> list[int]:
        path = folder / "stats.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line)["step"] for line in text.splitlines()]

    def wait_for_ranks(count: int) -> None:
        """Until so many ranks have made two steps."""
        deadline, before = time.monotonic() + 100, None
        while before is None or len(steps()) < before + 2:
            ready = config.exists() and f"fsdp:d{count}p" in config.read_text()
            before = len(steps()) if ready and before is None else before
            assert time.monotonic() < deadline, (work / "machine0.log").read_text()[-3000:]
            time.sleep(0.1)

    machines = [subprocess.Popen(run, stdout=logs[0], stderr=logs[0])]
    try:
        wait_for_ranks(1)
        machines.append(subprocess.Popen(run, stdout=logs[1], stderr=logs[1]))
        wait_for_ranks(2)
        machines[1].kill()
        wait_for_ranks(1)
    finally:
        for machine in machines:
            machine.send_signal(signal.SIGINT)
        codes = [machine.wait(60) for machine in machines]
    assert codes == [130, -9]
    assert steps() == list(range(len(steps()))), "each start went on where the last checkpoint was"
