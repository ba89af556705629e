"""One node of several: how it waits for the others, and when it ends because of them."""

import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from arealite.launcher.job import SEE_NODE, Job, named_cause
from arealite.launcher.launch_config import read_launch_config
from arealite.launcher.node import NodeFailure, NodePart, run_node
from arealite.launcher.placement import cluster_slots
from arealite.launcher.supervisor import Supervisor
from arealite.launcher.torchrun import TorchrunPart
from arealite.utils.names import FileNames
from arealite.utils.process import signal_name
from tests.launcher.conftest import wait_until_gone

SIZES = ("cluster.n_gpus_per_node=2", "server.device=cpu", "actor.device=cpu")


@pytest.fixture
def make_job(work, arguments):
    """A saved job of nodes with two places each: the servers are on node 0, the ranks on the others."""

    def make(mode: str = "sglang.d2+d2") -> Job:
        argv = arguments(*SIZES, "rollout.setup_timeout_s=60", mode=mode)
        config = read_launch_config("script.py", argv)
        job = Job(config, "script.py", argv, *cluster_slots(config))
        job.save()
        return job

    yield make
    wait_until_gone(work)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_node_that_waits_for_servers(make_job, number):
    job = make_job()
    waiting = subprocess.Popen([sys.executable, "-m", "arealite.launcher.node", job.path, "1"])
    deadline, names = time.monotonic() + 30, FileNames(job.names_folder)
    # The node publishes this name right before it waits.
    while not names.get("master"):
        assert time.monotonic() < deadline and waiting.poll() is None
        time.sleep(0.05)
    waiting.send_signal(number)
    assert waiting.wait(20) == 128 + number


def test_a_node_that_waits_ends_with_one_that_failed(make_job, capsys):
    job = make_job()
    FileNames(job.names_folder).publish("ended/0", "3")
    assert run_node(job, 1) == 3
    assert "node 0 failed; see its log" in capsys.readouterr().err


def test_servers_end_when_the_machine_with_the_ranks_is_gone(make_job, capsys):
    """A machine that was killed cannot announce its end: its lease expires."""
    job = make_job()
    other = FileNames(job.run_dir.names, ttl_s=0.5)

    class Meeting(FileNames):
        has_joined = False

        def list(self, prefix: str) -> dict[str, str]:
            # Published at the first look, so that the lease cannot expire before it; nobody renews it.
            if not self.has_joined:
                self.has_joined = True
                other.publish("node/1", "elsewhere/1")
            return super().list(prefix)

    FileNames(job.names_folder).publish("master", "127.0.0.1:1")
    assert run_node(job, 0, partial(TorchrunPart, meeting=Meeting(job.run_dir.names, ttl_s=0.5))) == 1
    assert "node 1 is gone" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_machine_ends_the_others(work, make_job, arguments):
    argv = arguments(*SIZES, "cluster.n_nodes=2", "tokenizer_path=wait")
    run = [sys.executable, "-m", "arealite.launcher.torchrun", "script.py", *argv]
    machines = [subprocess.Popen(run) for _ in range(2)]
    deadline = time.monotonic() + 60
    while not (work / "up0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    holder = FileNames(work / "runs/e/t/names").get("node/1")
    assert holder is not None
    ranks = next(m for m in machines if m.pid == int(holder.split("/")[1]))
    machines.remove(ranks)
    ranks.kill()
    assert machines[0].wait(60) == 1


def test_nodes_that_have_ended_are_remembered_after_their_names_expire(make_job):
    job = make_job(mode="sglang.d2+d4")
    names = FileNames(job.names_folder)
    names.publish("master", "127.0.0.1:1")
    with Supervisor() as supervisor:
        part = NodePart(job, 0, names, supervisor)
        names.publish("ended/1", "0")
        # The job goes on without a server of the pool.
        names.publish("ended/-1", "1")
        part.check_other_nodes()
        names.withdraw("ended/1")
        names.publish("ended/2", "0")
        part.serve_until_ranks_end()
        names.publish("ended/2", "1")
        with pytest.raises(NodeFailure, match="node 2 failed"):
            part.check_other_nodes()


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (34, "SIGRTMIN"), (40, "SIGRTMIN+6"), (64, "SIGRTMAX")])
def test_every_signal_has_a_name(number, name):
    assert signal_name(number) == name


def test_a_node_that_ends_because_of_another_one_names_it():
    assert named_cause(SEE_NODE.format(12)) == 12 and named_cause(SEE_NODE.format(-3)) == -3
    assert named_cause("rank 1 ended with code 1; node 2 failed; see its log") is None
