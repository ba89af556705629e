"""Training over several machines: servers on some, launcher and trainer on another; machines fail and come back."""

import signal
import sqlite3
import subprocess

import pytest

from tests import warm_python
from tests.chaos.job import ROOT, ChaosJob
from tests.engine.test_fleet import until
from tests.machines import machines
from tests.server_process import API_KEY, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class MachineJob(ChaosJob):
    """A job whose launcher and trainer are on one machine, with servers that were started on others."""

    def __init__(self, folder, model_path, machine, servers, **overrides):
        self.machine = machine
        options = {
            "total_train_steps": 100_000,
            "rollout.server_addrs": f"[{','.join(server.address for server in servers)}]",
            "rollout.weight_update": "auto",
            "server.api_key": API_KEY,
            "recover.freq_steps": 1_000,
            **overrides,
        }
        super().__init__(folder, model_path, **options)

    def start(self):
        command = [*self.machine.python, *self.command[1:]]
        env = {**self.env, "CHAOS_MISBEHAVE": "0"}
        self.launcher = warm_python.start(
            command, cwd=ROOT, env=env, stdout=self.log.fileno(), stderr=subprocess.STDOUT
        )

    def goes_on(self, steps=3):
        """Wait for more steps."""
        self.wait_for_step(self.step() + steps)

    def stop(self):
        """End the run as Ctrl+C does, and check that nothing was lost, nothing came twice and nothing failed."""
        self.launcher.send_signal(signal.SIGINT)
        assert self.finish(60) == 130, self.tail()
        self.steps = self.step()
        self.check()
        assert not self.machine.pids()
        with sqlite3.connect(self.run_dir / "run.sqlite") as db:
            failed = db.execute("SELECT reason FROM episodes WHERE state = 'failed'").fetchall()
        assert not failed, failed

    def end(self):
        self.machine.kill_processes()
        self.launcher.wait(10)
        self.log.close()


@pytest.fixture
def net():
    with machines(4) as made:
        yield made


@pytest.fixture
def serve(model_path, tmp_path):
    """Start a server on a machine."""
    made = []

    def start(machine, **options):
        made.append(ServerProcess(model_path, machine, weight_folders=f"[{tmp_path}]", **options))
        return made[-1]

    yield start
    for server in made:
        server.kill()


@pytest.fixture
def job(tmp_path, model_path, net):
    jobs = []

    def start(*servers, **overrides):
        jobs.append(MachineJob(tmp_path, model_path, net[0], servers, **overrides))
        return jobs[-1]

    yield start
    for each in jobs:
        each.end()


def version(server):
    return int(server.get("model_info")["weight_version"])


def generated(server):
    return server.get("server_info")["generated_tokens"]


def test_a_partitioned_machine_comes_back_and_a_dead_one_is_not_missed(net, serve, job):
    one, two = serve(net[1]), serve(net[2])
    run = job(one, two)
    run.goes_on()
    net[1].partition()
    run.goes_on(4)
    missed, before = version(one), generated(one)
    assert missed < version(two)
    net[1].rejoin()
    until(lambda: version(one) > missed)
    until(lambda: generated(one) > before)
    net[2].kill()
    run.goes_on(4)
    run.stop()


def test_servers_are_replaced_one_after_another(net, serve, job):
    """As for a new version of the software, or when a cloud takes preemptible machines back: SIGTERM, then the end."""
    one, two = serve(net[1]), serve(net[2])
    run = job(one, two, **{"rollout.weight_update": "broadcast"})
    run.goes_on()
    for old, machine in ((one, net[3]), (two, net[1])):
        new = serve(machine, join=run.run_dir)
        until(lambda new=new: version(new) > 0 and generated(new) > 0)
        old.signal(signal.SIGTERM)
        assert old.process.wait(60) == 0
        run.goes_on()
    run.stop()
