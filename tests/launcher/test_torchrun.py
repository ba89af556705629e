"""The torchrun launcher with a real torchrun: ranks in a real process group, restarted by it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from arealite.launcher.torchrun import launch
from tests.launcher.conftest import carriers, wait_until_gone

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
    print(f"rank {dist.get_rank()} sum {total.item():g} restart {restart} servers {os.environ['AREALITE_SERVER_ADDRS']}", flush=True)
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


def test_ranks_of_torchrun(work, arguments, capfdbinary):
    assert launch("script.py", arguments()) == 0
    out = capfdbinary.readouterr().out.decode()
    assert "rank 0 sum 2 restart 0 servers 127.0.0.1:" in out and "rank 1 sum" not in out


@pytest.mark.slow
def test_torchrun_restarts_a_dead_rank_while_servers_stay(work, arguments, capfdbinary):
    argv = arguments("tokenizer_path=once", "recover.mode=auto", "recover.retries=1")
    assert launch("script.py", argv) == 0
    out = capfdbinary.readouterr().out.decode()
    assert "sum 2 restart 0" in out and "sum 2 restart 1" in out
    assert out.count("server(s) ready") == 1


@pytest.mark.slow
def test_without_retries_the_run_fails(work, arguments):
    assert launch("script.py", arguments("tokenizer_path=once")) != 0


@pytest.mark.slow
def test_two_machines_meet_in_the_run_directory(work, arguments):
    argv = arguments("cluster.n_nodes=2", "cluster.n_gpus_per_node=2", "server.device=cpu", "actor.device=cpu", mode="sglang.d2+d2")  # fmt: skip
    run = [sys.executable, "-m", "arealite.launcher.torchrun", "script.py", *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    machines = [subprocess.Popen(run, env=os.environ, **pipes) for _ in range(2)]
    outputs = [machine.communicate(timeout=100)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert sum("rank 0 sum 2" in out for out in outputs) == 1
    assert carriers(work) == []


def test_dry_run(work, arguments, capsys):
    assert launch("script.py", arguments(), dry_run=True) == 0
    assert "rank 1: node 0" in capsys.readouterr().out
    assert not Path("runs").exists()
