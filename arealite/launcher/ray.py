"""On a Ray cluster: `python -m arealite.launcher.ray script.py --config file.yaml cluster.n_nodes=4 … [--dry-run]`.

Reserves the nodes in one placement group (all or nothing, one bundle per machine) and runs `arealite.launcher.node` in an actor on each. A lost node
with servers alone is replaced while training goes on; a lost trainer node ends the attempt, and `recover.retries` starts the next. Uses the
cluster of RAY_ADDRESS or of this machine; without one it starts Ray here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arealite.api.errors import AllocationError, AReaLiteError, ConfigError
from arealite.launcher.job import Follower, Job
from arealite.launcher.local import command_line, run_attempts
from arealite.launcher.node import run_node
from arealite.launcher.plan import cluster_slots, read_launch_config
from arealite.launcher.ray_pool import ServerPool
from arealite.launcher.supervisor import Interrupted
from arealite.utils.config import run_main
from arealite.utils.process import tail

_LOOK_INTERVAL_S = 0.5


def launch(script: str | Path, argv: list[str], dry_run: bool = False) -> int:
    """Run `script` on the Ray cluster; returns the exit code."""
    config = read_launch_config(str(script), argv)
    devices, on_gpu = cluster_slots(config)
    script = str(Path(script).absolute()) if str(script).endswith(".py") else str(script)
    job = Job(config, script, argv, devices, on_gpu)
    if dry_run:
        print(job.describe())
        return 0
    job.plan()
    ray = connect()
    _check_nodes(ray, job)
    print(f"run directory: {job.run_dir.path}", flush=True)
    return run_attempts(job, lambda attempt: _Attempt(ray, attempt).run())


def connect() -> Any:
    """The `ray` module, connected to a cluster."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("mode=ray needs Ray: pip install 'arealite[ray]'") from error
    if not ray.is_initialized():
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), **options)
        except ConnectionError as error:
            if "RAY_ADDRESS" in os.environ:
                address = os.environ["RAY_ADDRESS"]
                raise ConfigError(f"cannot reach the Ray cluster at {address}: {error}") from error
            ray.init(include_dashboard=False, **options)
    return ray


def _check_nodes(ray: Any, job: Job) -> None:
    """Refuse a plan that the machines of the cluster cannot hold, with the arithmetic."""
    need = {"GPU": len(job.devices[0])} if job.on_gpu else {"CPU": 1}
    ((kind, count),) = need.items()
    nodes = sorted(node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"])
    fitting = sum(have >= count for have in nodes)
    if fitting < len(job.devices):
        has = ", ".join(f"{have:g}" for have in nodes)
        raise AllocationError(
            f"the job needs {len(job.devices)} nodes with {count} {kind} each (cluster.n_nodes, cluster.n_gpus_per_node); the Ray "
            f"cluster has {len(nodes)} nodes with {has} {kind}: {fitting} of them fit"
        )


class NodeActor:
    """Lives on one machine of the cluster and runs its part of the job."""

    def run(self, job_path: str, attempt: int, node: int) -> int:
        job = Job.load(job_path)
        job.attempt = attempt
        os.chdir(job.cwd)
        log = _log(job, node).open("a")
        with log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            return run_node(job, node)


class _Attempt:
    """One placement group, one actor per node, and the watch over them."""

    def __init__(self, ray: Any, job: Job):
        self.ray, self.job, self.plan = ray, job, job.plan()
        self.num_replaced = 0
        self.signals: list[int] = []
        self.running: dict[Any, int] = {}
        self.actors: dict[int, Any] = {}
        self.pool: ServerPool | None = None

    def run(self) -> int:
        from ray.util.placement_group import placement_group, remove_placement_group

        bundle = {"CPU": 1} | ({"GPU": len(self.job.devices[0])} if self.job.on_gpu else {})
        strategy = "STRICT_SPREAD" if len(self.job.devices) > 1 else "PACK"
        self.group = placement_group([bundle] * len(self.job.devices), strategy=strategy)
        shown = Follower(self.job.run_dir.logs / "rank0.log")
        try:
            with _noting_signals(self.signals):
                self.wait_for_devices(bundle)
                for node in range(len(self.job.devices)):
                    self.start(node)
                self.pool = ServerPool(self.ray, self.job)
                return self.watch(shown)
        except Interrupted as interrupt:
            print(f"{interrupt}: stopping {len(self.actors)} nodes", file=sys.stderr, flush=True)
            return 128 + interrupt.number
        finally:
            for actor in self.actors.values():
                self.ray.kill(actor)
            if self.pool is not None:
                self.pool.close()
            remove_placement_group(self.group)
            shown.copy()

    def wait_for_devices(self, bundle: dict[str, int]) -> None:
        timeout_s = self.job.config.setup_timeout_s
        deadline = time.monotonic() + timeout_s
        while not self.group.wait(1):
            self.raise_if_interrupted()
            if time.monotonic() > deadline:
                raise AReaLiteError(
                    f"Ray did not grant {len(self.job.devices)} × {bundle} within {timeout_s:.0f} s (rollout.setup_timeout_s): "
                    "other jobs hold the devices (see `ray status`)"
                )

    def raise_if_interrupted(self) -> None:
        if self.signals:
            raise Interrupted(self.signals[0])

    def start(self, node: int) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=node)
        gpus = len(self.job.devices[node]) if self.job.on_gpu else 0
        options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": where}
        actor = self.ray.remote(NodeActor).options(**options).remote()
        path = str(self.job.run_dir.path / "job.json")
        self.actors[node] = actor
        self.running[actor.run.remote(path, self.job.attempt, node)] = node

    def watch(self, shown: Follower) -> int:
        """Until all nodes have ended well (0), or one has not (its code)."""
        while self.running:
            ended, _ = self.ray.wait(list(self.running), timeout=_LOOK_INTERVAL_S)
            shown.copy()
            self.raise_if_interrupted()
            assert self.pool is not None
            self.pool.look()
            for ref in ended:
                node = self.running.pop(ref)
                try:
                    code = self.ray.get(ref)
                except self.ray.exceptions.RayActorError as error:
                    if not self.replace(node, error):
                        return 1
                    continue
                if code:
                    log = _log(self.job, node)
                    print(f"error: node {node} ended with code {code}; the last lines of {log}:\n{tail(log)}", file=sys.stderr, flush=True)  # fmt: skip
                    return code
        return 0

    def replace(self, node: int, error: Exception) -> bool:
        """Start a lost node's servers again where Ray finds room; a lost trainer cannot be replaced within an attempt."""
        reason = str(error).strip().splitlines()[0]
        print(f"warning: node {node} was lost: {reason}", file=sys.stderr, flush=True)
        self.num_replaced += 1
        if self.plan.ranks_on(node) or self.num_replaced > self.job.config.launcher.server_restarts:
            return False
        self.start(node)
        return True


def _log(job: Job, node: int) -> Path:
    return job.run_dir.logs / f"node{node}.log"


@contextlib.contextmanager
def _noting_signals(caught: list[int]) -> Iterator[None]:
    """Note signals instead of raising from them: an exception out of the middle of Ray's own code would be lost there."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = {n: signal.signal(n, lambda number, _: caught.append(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    run_main(command_line("ray", launch, __doc__))
