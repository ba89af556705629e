"""`make_engine`, with which scripts make engines so that they also run in controller mode.

There the driver, which is the process that runs the script, places engines in Ray actors. Each engine gets a placement
group of its own with one actor per rank.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import os
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.engine_api import TrainEngine
from arealite.api.errors import AllocationError, ConfigError
from arealite.controller.controllers import Controller, RolloutController
from arealite.controller.rank import RankActor
from arealite.controller.runtime import Call, Runtime
from arealite.engine.replay.replaying import current_replay
from arealite.launcher.job import Job
from arealite.launcher.ray import connect
from arealite.utils.config import LOG_FILE_ENV
from arealite.utils.process import ATTEMPT_ENV, CONTROLLER_ENV, MARK_ENV, python_path
from arealite.utils.script_check import UnstartedEngine, is_check
from arealite.utils.status.writer import status

# Variables that ranks need: the job's servers, and the mark by which the launcher finds processes of the job.
_ENVIRONMENT = ("AREALITE_SERVER_ADDRS", "AREALITE_NAMES", ATTEMPT_ENV, MARK_ENV, "OMP_NUM_THREADS")

P = ParamSpec("P")
T = TypeVar("T")


def make_engine(cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `cls(*args, **kwargs)`, or in the driver of controller mode a controller of its ranks.

    A controller has the methods and attributes of the engine, and to a type checker it is the engine. It is no instance
    of `cls`. In check mode nothing is made.
    """
    if is_check():
        return cast(T, UnstartedEngine())
    driver, replay = current_driver(), current_replay()
    if replay is not None:
        return replay.make_engine(cls, args, kwargs)
    if driver is None:
        return cls(*args, **kwargs)
    if not isinstance(cls, type):
        raise ConfigError(
            f"make_engine needs an engine class in controller mode, and got {cls!r}: pass the class itself"
        )
    return cast(T, driver.place(cls, args, kwargs))


@functools.cache
def current_driver() -> Driver | None:
    """Return the driver if this process is the one that the Ray launcher started with controller=true."""
    path = os.environ.get(CONTROLLER_ENV)
    return Driver(connect(), Job.load(path)) if path else None


class Driver:
    """Starts the ranks of engines and returns controllers for them."""

    def __init__(self, ray: Any, job: Job):
        self.ray, self.job = ray, job
        self.runtime = Runtime(ray, job.run_dir.logs, job.config.launcher.stop_timeout_s)
        self._names: list[str] = []

    def place(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Controller:
        """Start an engine's ranks: as many as its `ParallelStrategy` has, or one for an inference engine."""
        is_trained = issubclass(cls, TrainEngine)
        strategy = ParallelStrategy()
        if is_trained:
            size = AllocationMode.from_str(self.job.config.allocation_mode).train_world_size
            given = [a for a in (*args, *kwargs.values()) if isinstance(a, ParallelStrategy)]
            strategy = given[0] if given else ParallelStrategy(data=max(1, size))
        on_gpu = is_trained and self.job.on_gpu and self.job.config.train_device != "cpu"
        bundle: dict[str, float] = {"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1}
        name = self._make_name(cls) if is_trained else "rollout"
        group = self._reserve(name, [bundle] * strategy.world_size)
        ranks = [self._start(name, group, rank, on_gpu) for rank in range(strategy.world_size)]
        address, payload = ranks[0].address.remote(), self.runtime.dumps((cls, args, kwargs))
        kind = Controller if is_trained else RolloutController
        controller = kind(self.runtime, cls, name, ranks, group, strategy)
        reports = [rank.make.remote(i, len(ranks), address, payload) for i, rank in enumerate(ranks)]
        self.runtime.add(Call(self.runtime, name, "__init__", reports))
        self.runtime.num_shares = max(self.runtime.num_shares, strategy.data)
        return controller

    def _make_name(self, cls: type) -> str:
        """Name an engine by its class (actor, critic, rw; FSDPEngine: ref). A second one gets a number."""
        name = re.sub("FSDP|PPO|Engine", "", cls.__name__).lower() or "ref"
        self._names.append(name)
        count = self._names.count(name)
        return name if count == 1 else f"{name}{count}"

    def _reserve(self, name: str, bundles: list[dict[str, float]]) -> Any:
        from ray.util.placement_group import placement_group, remove_placement_group

        group, timeout_s = placement_group(bundles, strategy="PACK"), self.job.config.setup_timeout_s
        if not group.wait(timeout_s):
            remove_placement_group(group)
            free = {k: v for k, v in self.ray.available_resources().items() if k in ("CPU", "GPU")}
            raise AllocationError(
                f"Ray did not grant {len(bundles)} × {bundles[0]} for {name} within {timeout_s:.0f} s "
                f"(rollout.setup_timeout_s); free: {free}. In controller mode every model has devices of its own: add "
                "machines, or lower the training side of allocation_mode"
            )
        return group

    def _start(self, name: str, group: Any, rank: int, on_gpu: bool) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        main = multiprocessing.spawn.get_preparation_data(name)
        main = {k: v for k, v in main.items() if k not in ("authkey", "name", "start_method")}
        env = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
        env |= {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}
        env |= {LOG_FILE_ENV: str(self.runtime.log_path(name, rank))}
        env |= status.environment(f"{name}.rank{rank}")
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        options = {"num_cpus": 1, "num_gpus": int(on_gpu), "scheduling_strategy": where}
        actor = self.ray.remote(RankActor).options(runtime_env={"env_vars": env}, **options)
        return actor.remote(main, str(self.job.path))
