"""A pool of extra servers on a Ray cluster.

Grows while requests wait at all servers and shrinks when servers idle. The Ray launcher uses it if
`launcher.max_servers` is set. Each server of the pool runs in an actor that Ray places; it joins the running job by its
lease and loads the current weights before its first request. When it leaves, its requests continue on other servers.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arealite.api.errors import ServerError
from arealite.launcher.job import Job
from arealite.launcher.node import NodePart, run_node
from arealite.launcher.placement import ServerPlacement
from arealite.launcher.servers import server_load
from arealite.launcher.supervisor import Child
from arealite.utils.config import REFUSED
from arealite.utils.names import ELASTIC_PREFIX, FileNames, elastic_names
from arealite.utils.startup import prepare_process

CHECK_INTERVAL_S = 2.0
# Checks in a row with the same result before the pool changes: short queues and pauses do not count.
BUSY_CHECKS, IDLE_CHECKS = 2, 15


class PoolPart(NodePart):
    """One server of the pool. Ends with the job, or with an error if the server dies."""

    def run(self) -> None:
        assert self.placement.mode.gen is not None
        # Makes the server join by its lease.
        self.is_up = True
        devices = tuple(range(self.placement.mode.gen.instance_size)) if self.job.on_gpu else ()
        self.start_server(ServerPlacement(pool_index(self.node), ((self.node, devices),)))
        self.serve_until_ranks_end()

    def handle_server_end(self, child: Child) -> None:
        if child.code == REFUSED:
            super().handle_server_end(child)
        raise ServerError(f"a server of the pool died: {child.describe_end()}")


def pool_index(node: int) -> int:
    """Return the server index of a pool node (−1, −2, …), above any index of a placement."""
    return 100_000 - node


class NodeActor:
    """Ray actor that runs one node's part of the job, or one server of the pool."""

    def run(self, job_path: str, attempt: int, node: int) -> int:
        import ray

        prepare_process()
        job = Job.load(job_path)
        job.attempt = attempt
        os.chdir(job.cwd)
        # For a driver that this node starts.
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        log = log_path(job, node).open("a")
        with log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            return run_node(job, node, PoolPart if node < 0 else NodePart)


def log_path(job: Job, node: int) -> Path:
    return job.run_dir.logs / (f"pool{-node}.log" if node < 0 else f"node{node}.log")


@dataclass
class _Member:
    actor: Any
    ref: Any
    num_idle_checks: int = 0


class ServerPool:
    """Grows and shrinks with the load of the servers."""

    def __init__(self, ray: Any, job: Job):
        self.ray, self.job, self.placement = ray, job, job.placement()
        limit = job.config.launcher.max_servers or 0
        self.max_members = max(0, limit - len(self.placement.servers))
        self.members: dict[int, _Member] = {}
        self.names = FileNames(job.names_folder)
        self.elastic = elastic_names(job.run_dir)
        self.num_busy_checks = 0
        self.num_started = 0
        self._next_check = time.monotonic() + CHECK_INTERVAL_S

    def update(self) -> None:
        """Start or end at most one server if the load asks for it. Cheap, to be called often."""
        if not self.max_members or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + CHECK_INTERVAL_S
        key = self.job.config.server.api_key
        addresses = self.names.list("servers/")
        loads = {name: server_load(address, key) for name, address in addresses.items()}
        known = [load for load in loads.values() if load is not None]
        self.remove_ended()
        is_busy = bool(known) and all(waiting > 0 for _, waiting in known)
        self.num_busy_checks = self.num_busy_checks + 1 if is_busy else 0
        if self.num_busy_checks >= BUSY_CHECKS and len(self.members) < self.max_members:
            self.num_busy_checks = 0
            self.grow()
        for node, member in list(self.members.items()):
            load = loads.get(f"servers/{pool_index(node)}")
            member.num_idle_checks = member.num_idle_checks + 1 if load == (0, 0) else 0
            if member.num_idle_checks >= IDLE_CHECKS:
                self.end(node)

    def grow(self) -> None:
        assert self.placement.mode.gen is not None
        self.num_started += 1
        node = -self.num_started
        gpus = self.placement.mode.gen.instance_size if self.job.on_gpu else 0
        actor = self.ray.remote(NodeActor).options(num_cpus=1, num_gpus=gpus).remote()
        started = actor.run.remote(str(self.job.path), self.job.attempt, node)
        self.members[node] = _Member(actor, started)
        print(f"requests are waiting: adding server {pool_index(node)} of the pool", flush=True)

    def end(self, node: int) -> None:
        """End a server. Its names are withdrawn first, so that it gets no more requests."""
        name = f"servers/{pool_index(node)}"
        address = self.names.get(name)
        self.elastic.withdraw(f"{ELASTIC_PREFIX}{address}")
        self.names.withdraw(name)
        self.ray.kill(self.members.pop(node).actor)
        print(f"ended idle server {pool_index(node)} of the pool", flush=True)

    def remove_ended(self) -> None:
        """Remove servers that have ended or failed; the job goes on without them."""
        for node, member in list(self.members.items()):
            ended, _ = self.ray.wait([member.ref], timeout=0)
            if ended:
                del self.members[node]
                log = log_path(self.job, node).name
                print(f"server {pool_index(node)} of the pool ended; see logs/{log}", flush=True)
                if self.has_refused(member):
                    print("it refuses its configuration or model: the pool gets no more servers", flush=True)
                    self.max_members = 0

    def has_refused(self, member: _Member) -> bool:
        """Whether a server that has ended would refuse to start again."""
        try:
            return self.ray.get(member.ref) == REFUSED
        except self.ray.exceptions.RayError:
            # Its node was lost.
            return False

    def close(self) -> None:
        for member in self.members.values():
            self.ray.kill(member.actor)
        self.members.clear()
