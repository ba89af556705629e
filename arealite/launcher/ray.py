"""Runs a job on a Ray cluster.

    python -m arealite.launcher.ray SCRIPT.py --config FILE.yaml cluster.n_nodes=4 key=value… [--dry-run]

Reserves the nodes in one placement group (one bundle per machine) and runs `arealite.launcher.node` in an actor on
each. A lost node that had only servers is replaced while training goes on; a lost trainer node ends the attempt, and
`recover.retries` starts the next one. Uses the cluster of RAY_ADDRESS or of this machine; if there is none, it starts
Ray here. `--dry-run` prints what would be started, and needs no cluster.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from arealite.api.errors import AllocationError, AReaLiteError, ConfigError
from arealite.launcher.checks import check_job
from arealite.launcher.job import Job, LogFollower, StopEvent, named_cause
from arealite.launcher.launch_config import read_launch_config
from arealite.launcher.local import command_line, run_attempts, show_plan
from arealite.launcher.placement import Placement
from arealite.launcher.ray_pool import NodeActor, ServerPool, log_path
from arealite.launcher.supervisor import INTERRUPTED, Interrupted
from arealite.utils.activity import activity
from arealite.utils.config import REFUSED, run_main
from arealite.utils.process import last_error, tail
from arealite.utils.text import clean

_WATCH_INTERVAL_S = 0.5


def launch(script: str | Path, argv: list[str], dry_run: bool = False) -> int:
    """Run `script` on the Ray cluster; returns the exit code."""
    config = read_launch_config(str(script), argv, has_controller_mode=True)
    job = Job.on_cluster(config, script, argv)
    if dry_run:
        return show_plan(job, servers_run_here=False)
    check_job(job, servers_run_here=False)
    placement = job.placement()
    num_ranks = len(placement.engines) * placement.mode.train_world_size
    num_cpus = len(_bundles(job, placement)) + (num_ranks + 1 if placement.engines else 0)
    ray = connect(num_cpus)
    _check_nodes(ray, job, num_cpus)
    job.announce()
    return run_attempts(job, lambda attempt: _Attempt(ray, attempt).run())


def connect(num_cpus: int | None = None) -> Any:
    """Return `ray`, connected to a cluster. One started here has at least `num_cpus` CPUs."""
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
            cores = len(os.sched_getaffinity(0))
            ray.init(include_dashboard=False, num_cpus=max(cores, num_cpus or 0), **options)
    return ray


def _bundles(job: Job, placement: Placement) -> list[dict[str, float]]:
    """Return what Ray reserves on each node. In controller mode engines have groups of their own."""
    counts = [len(devices) for devices in job.devices]
    if placement.engines:
        places = [place for server in placement.servers for place in server.places]
        used = max([0, *(node for node, _ in places)]) + 1
        counts = [sum(len(d) for n, d in places if n == node) for node in range(used)]
    return [{"CPU": 1.0, "GPU": float(n if job.on_gpu else 0)} for n in counts]


def _check_nodes(ray: Any, job: Job, num_cpus: int) -> None:
    """Raise with the arithmetic if the cluster is too small for the job."""
    kind, count = ("GPU", len(job.devices[0])) if job.on_gpu else ("CPU", 1)
    nodes = sorted(node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"])
    fitting = sum(have >= count for have in nodes)
    has = ", ".join(f"{have:g}" for have in nodes)
    if fitting < len(job.devices):
        raise AllocationError(
            f"the job needs {len(job.devices)} nodes with {count} {kind} each (cluster.n_nodes, "
            f"cluster.n_gpus_per_node); the Ray cluster has {len(nodes)} nodes with {has} {kind}: {fitting} of them fit"
        )
    if not job.on_gpu and sum(nodes) < num_cpus:
        raise AllocationError(
            f"the job needs {num_cpus} CPU: one for each node with servers, one for rollout and one for each rank of "
            f"{', '.join(job.config.models)}; the Ray cluster has {len(nodes)} nodes with {has} CPU"
        )


class _Attempt:
    """One attempt at a job: a placement group with one actor per node, which it watches."""

    def __init__(self, ray: Any, job: Job):
        self.ray, self.job, self.placement = ray, job, job.placement()
        self.num_replaced = 0
        self.stop, self.is_stopping = StopEvent(), False
        self.running: dict[Any, int] = {}
        self.actors: dict[int, Any] = {}
        self.pool: ServerPool | None = None

    def run(self) -> int:
        from ray.util.placement_group import placement_group, remove_placement_group

        self.bundles = _bundles(self.job, self.placement)
        strategy = "STRICT_SPREAD" if len(self.bundles) > 1 else "PACK"
        self.group = placement_group(self.bundles, strategy=strategy)
        output = LogFollower(self.job.run_dir.logs / "rank0.log")
        try:
            with self.stop:
                self.wait_for_devices()
                for node in range(len(self.bundles)):
                    self.start(node)
                self.pool = ServerPool(self.ray, self.job)
                return self.watch(output)
        except Interrupted as interrupt:
            print(f"{interrupt}: stopping {len(self.actors)} nodes", file=sys.stderr, flush=True)
            return 128 + interrupt.number
        finally:
            for actor in self.actors.values():
                self.ray.kill(actor)
            if self.pool is not None:
                self.pool.close()
            remove_placement_group(self.group)
            output.copy()

    def wait_for_devices(self) -> None:
        timeout_s = self.job.config.setup_timeout_s
        deadline = time.monotonic() + timeout_s
        waiting = f"waiting for Ray to grant {len(self.bundles)} × {self.bundles[0]} (see `ray status`)"
        while not self.group.wait(1):
            self.raise_if_interrupted()
            with activity.doing(waiting):
                activity.tick()
            if time.monotonic() > deadline:
                raise AReaLiteError(
                    f"Ray did not grant {self.bundles} within {timeout_s:.0f} s (rollout.setup_timeout_s): "
                    "other jobs hold the devices (see `ray status`)"
                )

    def raise_if_interrupted(self) -> None:
        if self.stop.is_set():
            raise Interrupted(self.stop.number)

    def start(self, node: int) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=node)
        gpus = self.bundles[node]["GPU"]
        options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": where}
        actor = self.ray.remote(NodeActor).options(**options).remote()
        self.actors[node] = actor
        self.running[actor.run.remote(str(self.job.path), self.job.attempt, node)] = node

    def watch(self, output: LogFollower) -> int:
        """Wait until all nodes have ended (returns 0) or one has failed (returns its code)."""
        first = next(rank.node for rank in self.placement.ranks if rank.rank == 0)
        state = f"{len(self.running)} nodes are starting"
        with activity.doing(lambda: output.describe_start(state, log_path(self.job, first))):
            return self._watch(output)

    def _watch(self, output: LogFollower) -> int:
        while self.running:
            activity.tick()
            ended, _ = self.ray.wait(list(self.running), timeout=_WATCH_INTERVAL_S)
            output.copy()
            self.stop_if_asked()
            assert self.pool is not None
            self.pool.update()
            for ref in ended:
                node = self.running.pop(ref)
                try:
                    code = self.ray.get(ref)
                except self.ray.exceptions.RayActorError as error:
                    if not self.replace(node, error):
                        return 1
                    continue
                except AReaLiteError as error:
                    # Of the job or its lock. Ray puts the traceback into the text, and has the error itself as `cause`.
                    reason = getattr(error, "cause", error)
                    print(clean(f"error: node {node} cannot start: {reason}"), file=sys.stderr, flush=True)
                    return REFUSED if isinstance(error, ConfigError) else 1
                if self.stop.is_set() and code in INTERRUPTED:
                    # Other nodes may still write their part of the checkpoint.
                    continue
                if code:
                    self.show_failure(node, code)
                    return code
        return 128 + self.stop.number if self.is_stopping else 0

    def show_failure(self, node: int, code: int) -> None:
        """Show the log of a failed node, or of the node that it names as the cause.

        A node ends when it learns that another one has failed, often before that one, which first ends its processes.
        """
        shown = {node}
        while (cause := named_cause(last_error(tail(log_path(self.job, node))))) is not None and cause not in shown:
            self.wait_for_end(cause)
            shown.add(cause)
            node = cause
        log = log_path(self.job, node)
        message = f"error: node {node} ended with code {code}; the last lines of {log}:\n{tail(log)}"
        print(message, file=sys.stderr, flush=True)

    def wait_for_end(self, node: int) -> None:
        """Wait until a node that has failed has written its log, up to `launcher.stop_timeout_s`."""
        refs = [ref for ref, running in self.running.items() if running == node]
        deadline = time.monotonic() + self.job.config.launcher.stop_timeout_s
        while refs and not self.stop.is_set() and time.monotonic() < deadline:
            activity.tick()
            _, refs = self.ray.wait(refs, timeout=_WATCH_INTERVAL_S)

    def stop_if_asked(self) -> None:
        """After the first signal have the ranks save a checkpoint and end; raises after the second."""
        if self.stop.count > 1:
            raise Interrupted(self.stop.number)
        if self.stop.is_set() and not self.is_stopping:
            self.is_stopping = True
            self.job.ask_to_stop(self.stop.number)

    def replace(self, node: int, error: Exception) -> bool:
        """Start the servers of a lost node again where Ray finds room; False if the attempt must end."""
        reason = str(error).strip().splitlines()[0]
        print(f"warning: node {node} was lost: {reason}", file=sys.stderr, flush=True)
        self.num_replaced += 1
        if self.placement.ranks_on(node) or self.num_replaced > self.job.config.launcher.server_restarts:
            return False
        self.start(node)
        return True


main = command_line("ray", launch, __doc__)

if __name__ == "__main__":
    run_main(main)
