"""The Ray launcher on a real Ray of several logical nodes on this machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arealite.launcher.ray import launch
from arealite.utils.names import ELASTIC_PREFIX, elastic_names
from arealite.utils.rundir import RunDir
from tests.launcher.conftest import diagnosis, ray_node, wait_until_gone

# Slow tests run beside these.
pytestmark = pytest.mark.timeout(300)

RUN = Path("runs/e/t")
ray_marker = pytest.mark.ray


def start(ray_cluster, argv: list[str], run=("-m", "arealite.launcher.ray")) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *run, "script.py", *argv],
        env={**os.environ, "RAY_ADDRESS": ray_cluster.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def on_cpu(arguments, *more: str, mode: str) -> list[str]:
    return arguments("server.device=cpu", "actor.device=cpu", *more, mode=mode)


def wait_for(condition, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def read_until(process: subprocess.Popen, text: str) -> str:
    """Return the output up to the line with this text."""
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    while text not in lines[-1]:
        assert lines[-1], "".join(lines)
        lines.append(process.stdout.readline())
    return "".join(lines)


def read_rest(process: subprocess.Popen) -> str:
    """Return the output up to its end. `communicate` with a timeout would lose what `readline` has buffered."""
    assert process.stdout is not None
    out = process.stdout.read()
    process.wait(timeout=240)
    return out


def test_dry_run_needs_no_cluster(work, arguments, capsys):
    argv = arguments("cluster.n_nodes=4", "cluster.n_gpus_per_node=4", mode="sglang.d12p1t1+d4p1t1")
    assert launch("script.py", argv, dry_run=True) == 0
    out = capsys.readouterr().out
    assert "server 11: node 2 gpu 3" in out and "rank 3: node 3 gpu 3" in out


@ray_marker
def test_a_job_over_four_nodes(work, arguments, ray_cluster):
    argv = on_cpu(arguments, "cluster.n_nodes=4", "cluster.n_gpus_per_node=2", mode="sglang.d6p1t1+d2p1t1")
    process = start(ray_cluster, argv)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    (addresses,) = re.findall(r"rank 0 of 2 servers (\S+)", out)
    assert len(set(addresses.split(","))) == 6
    assert {p.name for p in (RUN / "logs").glob("node*.log")} == {f"node{i}.log" for i in range(4)}
    wait_until_gone(work, 30)


@ray_marker
def test_devices_come_from_ray(work, arguments, ray_cluster):
    argv = arguments("cluster.n_nodes=2", "cluster.n_gpus_per_node=4", mode="sglang.d4+d4")
    process = start(ray_cluster, argv)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert "devices 0,1,2,3" in out


@ray_marker
def test_too_few_nodes_are_refused_with_the_arithmetic(work, arguments, ray_cluster):
    argv = arguments("cluster.n_nodes=2", "cluster.n_gpus_per_node=8", mode="sglang.d8+d8")
    process = start(ray_cluster, argv)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "needs 2 nodes with 8 GPU each" in out and "4 nodes with 0, 4, 4, 4 GPU: 0 of them fit" in out


@ray_marker
@pytest.mark.parametrize("behaviour", ["raise", "linger"])
def test_a_failing_rank_is_shown(work, arguments, ray_cluster, behaviour):
    argv = on_cpu(
        arguments,
        *("cluster.n_nodes=2", "cluster.n_gpus_per_node=2"),
        f"tokenizer_path={behaviour}",
        mode="sglang.d2+d2",
    )
    process = start(ray_cluster, argv)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "rank one has a problem" in out
    wait_until_gone(work, 30)


@ray_marker
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_launcher_leaves_nothing(work, arguments, ray_cluster, number):
    argv = on_cpu(
        arguments, "cluster.n_nodes=2", "cluster.n_gpus_per_node=2", "tokenizer_path=wait", mode="sglang.d2+d2"
    )
    process = start(ray_cluster, argv)
    wait_for(lambda: (work / "up0").exists() and (work / "up1").exists())
    process.send_signal(number)
    process.communicate(timeout=240)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    wait_until_gone(work, 60)


@ray_marker
def test_a_signal_lets_ranks_save_and_names_the_command_that_resumes(work, arguments, ray_cluster):
    argv = on_cpu(
        arguments, "cluster.n_nodes=2", "cluster.n_gpus_per_node=2", "tokenizer_path=save", mode="sglang.d2+d2"
    )
    process = start(ray_cluster, argv)
    wait_for(lambda: (work / "up0").exists() and (work / "up1").exists())
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM, out
    kind, verdict = diagnosis(work / RUN)
    assert kind == "run_stopped" and "SIGTERM" in verdict
    assert (work / "runs/e/t/recover/step000003").exists(), out
    assert "-m arealite.launcher.ray script.py" in out and out.rstrip().endswith("recover.mode=auto")
    wait_until_gone(work, 60)


@ray_marker
def test_a_killed_node_is_replaced_and_the_run_goes_on(work, arguments, ray_cluster):
    argv = on_cpu(
        arguments,
        *("cluster.n_nodes=4", "cluster.n_gpus_per_node=1", "tokenizer_path=until"),
        *("recover.mode=auto", "recover.retries=1"),
        mode="sglang.d3+d1",
    )
    process = start(ray_cluster, argv)
    wait_for(lambda: (work / "up0").exists())
    ray_cluster.remove_node(next(iter(ray_cluster.worker_nodes)), allow_graceful=False)
    ray_cluster.add_node(**ray_node(num_cpus=1, num_gpus=4))
    # If the node had servers only, they are started again; if it had the trainer, the run restarts.
    out = read_until(process, "was lost")
    (work / "finish").touch()
    out += read_rest(process)
    assert process.returncode == 0, out
    wait_until_gone(work, 30)


@ray_marker
def test_the_next_attempt_waits_for_processes_of_the_one_before(work, arguments, ray_cluster):
    """A node that ends slowly still holds the lock of the run directory: that is no other run."""
    argv = on_cpu(
        arguments,
        *("cluster.n_nodes=2", "cluster.n_gpus_per_node=1", "tokenizer_path=until"),
        *("recover.mode=auto", "recover.retries=1"),
        mode="sglang.d1+d1",
    )
    process = start(ray_cluster, argv)
    wait_for(lambda: (work / "up0").exists())
    slow, trainer = (json.loads((RUN / "status" / f"node{node}.json").read_text())["pid"] for node in (0, 1))
    os.kill(slow, signal.SIGSTOP)
    try:
        os.kill(trainer, signal.SIGKILL)
        out = read_until(process, "waiting for processes of this job that are still ending")
    finally:
        os.kill(slow, signal.SIGKILL)
    (work / "finish").touch()
    out += read_rest(process)
    assert process.returncode == 0 and "attempt 1" in out, out
    wait_until_gone(work, 30)


@ray_marker
def test_a_replaced_node_that_cannot_start_says_why(work, arguments, ray_cluster):
    argv = on_cpu(
        arguments, *("cluster.n_nodes=2", "cluster.n_gpus_per_node=1", "tokenizer_path=until"), mode="sglang.d1+d1"
    )
    process = start(ray_cluster, argv)
    wait_for(lambda: (work / "up0").exists())
    (RUN / "job.json").write_text("{")
    os.kill(json.loads((RUN / "status" / "node0.json").read_text())["pid"], signal.SIGKILL)
    out = read_rest(process)
    assert process.returncode == 2 and "error: node 0 cannot start: cannot read the job " in out, out
    assert "Traceback" not in out
    wait_until_gone(work, 30)


@ray_marker
def test_the_pool_grows_while_requests_wait_and_shrinks_when_idle(work, arguments, ray_cluster):
    argv = on_cpu(
        arguments,
        "cluster.n_nodes=1",
        "cluster.n_gpus_per_node=2",
        "tokenizer_path=until",
        "launcher.max_servers=2",
        mode="sglang.d1+d1",
    )
    # Checks ten times as often, so that the test takes a tenth of the time.
    quick = (
        "import sys, runpy, arealite.launcher.ray_pool as pool; pool.CHECK_INTERVAL_S = 0.2; sys.argv[0] = 'ray'; "
        "runpy.run_module('arealite.launcher.ray', run_name='__main__')"
    )
    process = start(ray_cluster, argv, run=("-c", quick))
    elastic = elastic_names(RunDir(RUN))
    wait_for(lambda: len(elastic.list(ELASTIC_PREFIX)) == 1)
    (work / "idle").touch()
    wait_for(lambda: elastic.list(ELASTIC_PREFIX) == {})
    (work / "finish").touch()
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert "requests are waiting: adding server" in out and "ended idle server" in out
    wait_until_gone(work, 30)
