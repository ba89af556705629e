"""The Ray launcher on a real Ray of several machines, each with its own address."""

import os
import re
import subprocess

import pytest

from tests.machines import machines

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(400)]
PORT = 6379


@pytest.fixture
def ray_machines():
    """A head and two more nodes, two devices each. They end with their machines."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'arealite[ray]')")
    with machines(3) as net:
        for machine in net:
            place = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if machine is not net[0]:
                place = [f"--address={net[0].address}:{PORT}"]
            command = ["-m", "ray.scripts.scripts", "start", *place, f"--node-ip-address={machine.address}"]
            command += ["--num-cpus=4", "--num-gpus=2", "--object-store-memory=100000000", "--disable-usage-stats"]
            env = {**os.environ, "RAY_worker_niceness": "0"}
            started = machine.start(command, warm=False, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output, _ = started.communicate(timeout=120)
            assert started.returncode == 0, output
        yield net


def test_a_job_over_machines_with_addresses_of_their_own(work, arguments, ray_machines):
    more = ["server.device=cpu", "actor.device=cpu", "cluster.n_nodes=3", "cluster.n_gpus_per_node=2"]
    process = ray_machines[0].start(
        ["-m", "arealite.launcher.ray", "script.py", *arguments(*more, mode="sglang.d4p1t1+d2p1t1")],
        warm=False,
        cwd=work,
        env={**os.environ, "RAY_ADDRESS": f"{ray_machines[0].address}:{PORT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    (addresses,) = re.findall(r"rank 0 of 2 servers (\S+)", output)
    hosts = [address.split(":")[0] for address in addresses.split(",")]
    assert len(hosts) == 4 and len(set(hosts)) == 2 and set(hosts) < {m.address for m in ray_machines}, addresses
