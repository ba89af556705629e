"""A pool of further servers on a Ray cluster: added while requests wait at all servers, ended when one has been idle for a while.

Used by the Ray launcher when `launcher.max_servers` is set. Each server of the pool lives in an actor that Ray places where there is room; it joins the running
job by its lease and gets the current weights before its first request. Its requests go on elsewhere when it leaves.
"""

from __future__ import annotations

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
from arealite.utils.names import ELASTIC_PREFIX, FileNames, elastic_names
from arealite.utils.process import raise_file_limit

LOOK_EVERY_S = 2.0
# So many looks in a row before acting: a queue or a lull of a moment means nothing.
BUSY_LOOKS, IDLE_LOOKS = 2, 15


class PoolPart(NodePart):
    """One server beyond the plan; ends when the job does, and with an error if the server does."""

    def run(self) -> None:
        assert self.placement.mode.gen is not None
        self.is_up = True  # so that it joins by lease
        devices = tuple(range(self.placement.mode.gen.instance_size)) if self.job.on_gpu else ()
        self.start_server(ServerPlacement(pool_index(self.node), ((self.node, devices),)))
        self.serve_until_ranks_end()

    def server_ended(self, child: Child) -> None:
        raise ServerError(f"a server of the pool died: {child.describe_end()}")


def pool_index(node: int) -> int:
    """Servers of the pool are nodes −1, −2, …; their numbers start where no plan reaches."""
    return 100_000 - node


class NodeActor:
    """Lives on one machine of the cluster and runs a node's part of the job, or one server of the pool."""

    def run(self, job_path: str, attempt: int, node: int) -> int:
        import ray

        raise_file_limit()
        job = Job.load(job_path)
        job.attempt = attempt
        os.chdir(job.cwd)
        # for a driver that it starts
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
    idle_looks: int = 0


class ServerPool:
    """Grows and shrinks with the load. `look` is called often and acts now and then."""

    def __init__(self, ray: Any, job: Job):
        self.ray, self.job, self.placement = ray, job, job.placement()
        limit = job.config.launcher.max_servers or 0
        self.max_members = max(0, limit - len(self.placement.servers))
        self.members: dict[int, _Member] = {}
        self.names = FileNames(job.names_folder)
        self.elastic = elastic_names(job.run_dir)
        self.busy_looks = 0
        self.num_started = 0
        self._next_look = time.monotonic() + LOOK_EVERY_S

    def look(self) -> None:
        """Compare load and size; start or end at most one server."""
        if not self.max_members or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_EVERY_S
        key = self.job.config.server.api_key
        addresses = self.names.list("servers/")
        loads = {name: server_load(address, key) for name, address in addresses.items()}
        known = [load for load in loads.values() if load is not None]
        self.forget_ended()
        is_busy = bool(known) and all(waiting > 0 for _, waiting in known)
        self.busy_looks = self.busy_looks + 1 if is_busy else 0
        if self.busy_looks >= BUSY_LOOKS and len(self.members) < self.max_members:
            self.busy_looks = 0
            self.grow()
        for node, member in list(self.members.items()):
            load = loads.get(f"servers/{pool_index(node)}")
            member.idle_looks = member.idle_looks + 1 if load == (0, 0) else 0
            if member.idle_looks >= IDLE_LOOKS:
                self.end(node)

    def grow(self) -> None:
        assert self.placement.mode.gen is not None
        self.num_started += 1
        node = -self.num_started
        gpus = self.placement.mode.gen.instance_size if self.job.on_gpu else 0
        actor = self.ray.remote(NodeActor).options(num_cpus=1, num_gpus=gpus).remote()
        started = actor.run.remote(str(self.job.path), self.job.attempt, node)
        self.members[node] = _Member(actor, started)
        print(f"requests wait: adding server {pool_index(node)} of the pool", flush=True)

    def end(self, node: int) -> None:
        """Withdraw its names first, so that nobody is sent there, then end it."""
        name = f"servers/{pool_index(node)}"
        address = self.names.get(name)
        self.elastic.withdraw(f"{ELASTIC_PREFIX}{address}")
        self.names.withdraw(name)
        self.ray.kill(self.members.pop(node).actor)
        print(f"idle: ended server {pool_index(node)} of the pool", flush=True)

    def forget_ended(self) -> None:
        """A server of the pool that failed costs nothing but itself."""
        for node, member in list(self.members.items()):
            ended, _ = self.ray.wait([member.ref], timeout=0)
            if ended:
                del self.members[node]
                log = log_path(self.job, node).name
                print(f"server {pool_index(node)} of the pool ended; see logs/{log}", flush=True)

    def close(self) -> None:
        for member in self.members.values():
            self.ray.kill(member.actor)
        self.members.clear()
