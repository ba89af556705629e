"""The Ray launcher on a real Ray of several machines, each with its own address."""

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machines import Machine, machines

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
PORT = 6379
# A node that does not answer for about five seconds is lost. By default that takes longer than half a minute.
IMPATIENT = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}


def begin_node(machine: Machine, head: Machine, gpus: int = 2, **variables: str) -> subprocess.Popen:
    """Begin to start Ray on a machine."""
    place = ["--head", f"--port={PORT}", "--include-dashboard=false"]
    if machine is not head:
        place = [f"--address={head.address}:{PORT}"]
    command = ["-m", "ray.scripts.scripts", "start", *place, f"--node-ip-address={machine.address}"]
    command += ["--num-cpus=4", f"--num-gpus={gpus}", "--object-store-memory=100000000", "--disable-usage-stats"]
    env = {**os.environ, "RAY_worker_niceness": "0", **variables}
    return machine.start(command, warm=False, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def end_start(started: subprocess.Popen) -> None:
    output, _ = started.communicate(timeout=120)
    assert started.returncode == 0, output


def launch(machine: Machine, work: Path, argv: list[str], output: int) -> subprocess.Popen:
    return machine.start(
        ["-m", "arealite.launcher.ray", "script.py", *argv],
        warm=False,
        cwd=work,
        env={**os.environ, "RAY_ADDRESS": f"{machine.address}:{PORT}"},
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def arguments_of(arguments, mode: str, *more: str, nodes: int, gpus: int) -> list[str]:
    cpu = ["server.device=cpu", "actor.device=cpu"]
    return arguments(*cpu, f"cluster.n_nodes={nodes}", f"cluster.n_gpus_per_node={gpus}", *more, mode=mode)


@pytest.fixture
def net():
    """Three machines. What runs on them ends with them."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'arealite[ray]')")
    with machines(3) as made:
        yield made


@pytest.mark.soak
def test_a_job_over_machines_with_addresses_of_their_own(work, arguments, net):
    for machine in net:
        end_start(begin_node(machine, net[0]))
    argv = arguments_of(arguments, "sglang.d4p1t1+d2p1t1", nodes=3, gpus=2)
    process = launch(net[0], work, argv, subprocess.PIPE)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    (addresses,) = re.findall(r"rank 0 of 2 servers (\S+)", output)
    hosts = [address.split(":")[0] for address in addresses.split(",")]
    assert len(hosts) == 4 and len(set(hosts)) == 2 and set(hosts) < {m.address for m in net}, addresses


def wait_until(is_true: Callable[[], object], process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 150
    while not is_true():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.soak
def test_a_node_that_is_cut_off_costs_its_servers_only_and_comes_back(work, arguments, net):
    """Its server starts again when the machine is back; the rank on another machine goes on all the time."""
    head, *others = net
    end_start(begin_node(head, head, 0, **IMPATIENT))
    for machine in others:
        end_start(begin_node(machine, head, 1))
    argv = arguments_of(
        arguments, "sglang.d1p1t1+d1p1t1", "tokenizer_path=until", "launcher.server_restarts=3", nodes=2, gpus=1
    )
    log = work / "output.txt"
    with log.open("w") as file:
        process = launch(head, work, argv, file.fileno())
    wait_until(lambda: "rank 0 of 1 servers" in log.read_text(), process, log)
    (address,) = re.findall(r"rank 0 of 1 servers (\S+):\d+ attempt 0", log.read_text())
    lost = next(machine for machine in others if machine.address == address)
    wait_until((work / "up0").exists, process, log)
    lost.partition()
    wait_until(lambda: "warning: node 0 was lost" in log.read_text(), process, log)
    # Ray ends what ran on a node that it has given up; a new one takes its place.
    lost.kill_processes()
    lost.rejoin()
    end_start(begin_node(lost, head, 1))
    node = work / "runs/e/t/logs/node0.log"
    wait_until(lambda: node.read_text().count("ready in") == 2, process, log)
    (work / "finish").touch()
    assert process.wait(timeout=60) == 0, log.read_text()
    # One attempt, in which the rank started once.
    assert len(re.findall("rank 0 of 1", log.read_text())) == 1
