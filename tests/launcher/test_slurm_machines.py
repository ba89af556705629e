"""The Slurm launcher on a real Slurm of two machines, each with its own address."""

import os
import re
import subprocess

import pytest

from tests.launcher.conftest import wait_until_gone
from tests.launcher.slurm_cluster import SlurmCluster, why_not
from tests.machines import ROOT, machines

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(200)]


@pytest.fixture
def slurm_machines(tmp_path):
    """A controller and a node on one machine, a node on another."""
    if reason := why_not():
        pytest.skip(reason)
    with machines(2) as net, SlurmCluster(tmp_path / "slurm", machines=net) as cluster:
        yield cluster


def test_a_job_over_machines_with_addresses_of_their_own(slurm_machines, work, arguments):
    more = ["server.device=cpu", "actor.device=cpu", "cluster.n_nodes=2", "cluster.n_gpus_per_node=1"]
    first, _ = slurm_machines.machines
    process = first.start(
        ["-m", "arealite.launcher.slurm", "script.py", *arguments(*more, mode="sglang.d1p1t1+d1p1t1")],
        warm=False,
        cwd=work,
        env={**os.environ, **slurm_machines.env, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    (log,) = (work / "runs/e/t/logs").glob("slurm-*.log")
    # The rank on the second node has asked the server on the first one for its health.
    assert re.findall(r"^(\d): rank 0 of 1 servers (\S+):\d+", log.read_text(), re.M) == [("1", first.address)], output
    wait_until_gone(work)
