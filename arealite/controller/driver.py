"""Controller mode: a script's engines live in Ray actors, and the script, unchanged, runs once and calls them as if they were here.

`Placed` is the metaclass of engines. In the one process that the Ray launcher starts with `controller=true`, making an engine makes ranks of it in a
placement group of its own and gives a `Controller` with its methods; everywhere else it makes the engine. So a user's own engine is covered like
ours, and no script, loop or engine asks where it runs.
"""

from __future__ import annotations

import abc
import atexit
import functools
import multiprocessing.spawn
import os
import pickle
import re
from pathlib import Path
from typing import Any, NoReturn

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.engine_api import TrainEngine
from arealite.api.errors import AllocationError, TrainingError
from arealite.controller.engines import Call, Controller, RolloutController
from arealite.controller.rank import Head, RankActor
from arealite.engine.fsdp.parallel import fold_pipeline
from arealite.launcher.job import CONTROLLER_ENV, Job
from arealite.launcher.ray import connect
from arealite.utils.config import LOG_FILE_ENV
from arealite.utils.process import MARK_ENV
from arealite.utils.trace import Trace

# What ranks must know of the job: its servers, and the mark by which the launcher finds what it started.
_PASSED_ON = ("AREALITE_SERVER_ADDRS", "AREALITE_NAMES", "AREALITE_API_KEY", "AREALITE_ATTEMPT")
_PASSED_ON += (MARK_ENV, "OMP_NUM_THREADS")


class Placed(abc.ABCMeta):
    """The class of engine classes: an engine is made where the job runs it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        driver = current_driver()
        if driver is None:
            return super().__call__(*args, **kwargs)
        return driver.place(cls, args, kwargs)


@functools.cache
def current_driver() -> Driver | None:
    """The driver that this process is, if it is one."""
    path = os.environ.pop(CONTROLLER_ENV, None)  # processes that it starts are none
    return Driver(connect(), Job.load(path)) if path else None


class Driver:
    """Places engines, and keeps the book of calls under way: whichever of them fails, the driver learns of it at its next wait."""

    def __init__(self, ray: Any, job: Job):
        self.ray, self.job = ray, job
        self.num_shares = 1  # of a batch: the data-parallel ranks of the most parallel engine
        self.outboxes: dict[str, Any] = {}  # weights published for a broadcast
        self.tensor_bytes = 0  # of tensors that passed through this process
        self._names: list[str] = []
        self._under_way: dict[Any, tuple[Call, int]] = {}
        self._seconds: dict[str, float] = {}
        self._trace = Trace(job.run_dir.path / "trace_engines.json", "engines")
        atexit.register(self._trace.close)

    # -------------------------------------------------------------------------------------------- placement

    def place(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Controller:
        """Ranks of an engine in a placement group of their own: as many as its `ParallelStrategy` has, and one for rollout."""
        trains = issubclass(cls, TrainEngine)
        strategy = ParallelStrategy()
        if trains:
            size = AllocationMode.from_str(self.job.config.allocation_mode).train_world_size
            given = [a for a in (*args, *kwargs.values()) if isinstance(a, ParallelStrategy)]
            strategy = fold_pipeline(given[0] if given else ParallelStrategy(data=max(1, size)))
        on_gpu = trains and self.job.on_gpu and self.job.config.train_device != "cpu"
        bundle: dict[str, float] = {"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1}
        name = self._name(cls) if trains else "rollout"
        group = self._reserve(name, [bundle] * strategy.world_size)
        ranks = [self._start(name, group, rank, on_gpu) for rank in range(strategy.world_size)]
        address, made = ranks[0].address.remote(), self.dumps((cls, args, kwargs))
        kind = Controller if trains else RolloutController
        engine = kind(self, cls, name, ranks, group, strategy)
        heads = [r.make.remote(i, len(ranks), address, made) for i, r in enumerate(ranks)]
        self.began(Call(self, engine, "__init__", heads))
        self.num_shares = max(self.num_shares, strategy.data)
        return engine

    def _name(self, cls: type) -> str:
        """FSDPPPOActor: actor, FSDPPPOCritic: critic, FSDPRWEngine: rw; FSDPEngine itself is a reference; a second one is numbered."""
        name = re.sub("FSDP|PPO|Engine", "", cls.__name__).lower() or "ref"
        self._names.append(name)
        count = self._names.count(name)
        return name if count == 1 else f"{name}{count}"

    def _reserve(self, name: str, bundles: list[dict[str, float]]) -> Any:
        from ray.util.placement_group import placement_group, remove_placement_group

        group, limit_s = placement_group(bundles, strategy="PACK"), self.job.config.setup_timeout_s
        if not group.wait(limit_s):
            remove_placement_group(group)
            free = {k: v for k, v in self.ray.available_resources().items() if k in ("CPU", "GPU")}
            raise AllocationError(
                f"Ray did not grant {len(bundles)} × {bundles[0]} for {name} within {limit_s:.0f} s (rollout.setup_timeout_s); free: {free}. "
                "In controller mode every model has devices of its own: add machines, or lower the training side of allocation_mode"
            )
        return group

    def _start(self, name: str, group: Any, rank: int, on_gpu: bool) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        main = multiprocessing.spawn.get_preparation_data(name)
        main = {k: v for k, v in main.items() if k not in ("authkey", "name", "start_method")}
        env = {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
        paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        env |= {LOG_FILE_ENV: str(self.log(name, rank))}
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        options = {"num_cpus": 1, "num_gpus": int(on_gpu), "scheduling_strategy": where}
        actor = self.ray.remote(RankActor).options(runtime_env={"env_vars": env}, **options)
        return actor.remote(main)

    def log(self, name: str, rank: int) -> Path:
        return self.job.run_dir.logs / f"{name}.rank{rank}.log"

    # ------------------------------------------------------------------------------------------------ calls

    def began(self, call: Call) -> None:
        self._under_way |= {ref: (call, rank) for rank, ref in enumerate(call.heads)}

    def wait(self, heads: list[Any]) -> None:
        """Until these calls have ended. Whichever call failed meanwhile raises here.

        Has no deadline of its own: Ray tells of actors that died, and what runs in them has deadlines.
        """
        while any(ref in self._under_way for ref in heads):
            ended, _ = self.ray.wait(list(self._under_way), num_returns=1)
            for ref in ended:
                self._ended(ref, *self._under_way.pop(ref))

    def _ended(self, ref: Any, call: Call, rank: int) -> None:
        assert call.engine is not None
        name = call.engine.name
        try:
            head = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            self.forget(call.heads)  # told once, not by every rank
            self._explain(error, call, rank)
        if not isinstance(head, Head):
            return
        call.ended[rank] = head
        what, took_s = f"{name}.{call.method}", head.ended - head.began
        self._trace.span(what, head.began, took_s, f"{name} rank {rank}")
        if rank == 0 and call.on_batch:
            self._seconds[f"time/{what}"] = self._seconds.get(f"time/{what}", 0.0) + took_s

    def forget(self, heads: list[Any]) -> None:
        for ref in heads:
            self._under_way.pop(ref, None)

    def _explain(self, error: Any, call: Call, rank: int) -> NoReturn:
        cause = getattr(error, "cause", error)
        if not isinstance(cause, self.ray.exceptions.RayError):
            raise cause from error  # as if it had been raised here
        name = call.engine.name if call.engine else "the driver"
        reason = str(cause).split("Some common causes")[0].strip().splitlines()[-1].strip()
        raise TrainingError(
            f"rank {rank} of {name} died, or lost its data, during {call.method}: {reason}\nIts log is {self.log(name, rank)}. With "
            "recover.mode=auto and recover.retries the launcher starts again from the recover checkpoint"
        ) from error

    def take_stats(self) -> dict[str, float]:
        """Seconds that each engine worked on a batch since the last time, and bytes of tensors that passed through the driver so far."""
        stats, self._seconds = self._seconds, {}
        self._trace.flush()
        return {**stats, "driver/tensor_bytes": float(self.tensor_bytes)}

    def dumps(self, thing: Any) -> bytes:
        """By name what can be found again in the script, as `multiprocessing` does; a lambda or closure by value."""
        try:
            return pickle.dumps(thing)
        except (pickle.PicklingError, AttributeError, TypeError):
            from ray.cloudpickle import cloudpickle

            return cloudpickle.dumps(thing)
