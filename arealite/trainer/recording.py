"""What a training loop adds to the record of its run: statistics and checksums of the weights.

`Run` calls it. With rollouts the engine that collects batches owns the `Recorder`, because it knows the episodes;
supervised runs have one of their own. `arealite.engine.replay` reads the record.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.engine_api import TrainEngine
from arealite.api.io_struct import FinetuneSpec
from arealite.core.record.environment import describe_environment
from arealite.core.record.recorder import Recorder, Sums
from arealite.engine.remote.collecting import CollectingEngine
from arealite.utils.distributed import rank
from arealite.utils.memory.estimate import MemoryPlan
from arealite.utils.rundir import RunDir

_MIB = 1 << 20


class RunRecord:
    """Records the steps of one run in `record/`; does nothing with `record=0`. All ranks call it."""

    def __init__(
        self,
        config: BaseExperimentConfig,
        run_dir: RunDir,
        engines: Mapping[str, TrainEngine],
        rollout: CollectingEngine | None,
    ):
        self.config, self.engines, self.rollout = config, engines, rollout
        self.folder, self.max_bytes = run_dir.record, config.record * _MIB
        self._recorder: Recorder | None = None
        self._sizes: dict[str, dict[str, Any]] = {}
        # The rollback after the last step.
        self._rollback: dict[str, Any] | None = None
        # A loop may collect its batches with something of its own.
        if rollout is not None and not hasattr(rollout, "begin_record"):
            self.max_bytes = 0

    def begin(self, first_step: int, spec: FinetuneSpec) -> None:
        """Begin before a step, with the weights as they are now."""
        if not self.max_bytes:
            return
        weights = weight_sums(self.engines)
        if rank() != 0:
            return
        environment = describe_environment(self.config) | {"weights": weights, "spec": asdict(spec)}
        if self.rollout is not None:
            self.rollout.begin_record(str(self.folder), self.max_bytes, first_step, environment)
        else:
            self._recorder = Recorder(self.folder, self.max_bytes)
            self._recorder.begin(first_step, environment)

    def roll_back(self, step: int | None) -> None:
        """Record with the next step that the state before `step` was restored; None: it was not."""
        if self.max_bytes and step is not None:
            self._rollback = {"step": step, "weights": weight_sums(self.engines)}

    def commit(self, step: int, stats: list[dict[str, float]], lr_scale: float = 1.0) -> None:
        """Record the results of a step, of each minibatch, and by how much learning rates were scaled."""
        if not self.max_bytes:
            return
        if not self._sizes:
            # They are chosen by the free memory of the device, when the first batch arrives.
            self._sizes = {name: _sizes(engine) for name, engine in self.engines.items()}
        results = {"stats": stats, "weights": weight_sums(self.engines), "sizes": self._sizes, "lr_scale": lr_scale}
        if self._rollback is not None:
            results["rollback"], self._rollback = self._rollback, None
        if self.rollout is not None:
            self.rollout.record_step(step, results)
        elif self._recorder is not None:
            self._recorder.commit(step, results)

    def close(self) -> None:
        """Write what is not yet on disk. That of a run with rollouts is closed by its engine."""
        if self._recorder is not None:
            self._recorder.close()


def weight_sums(engines: Mapping[str, TrainEngine]) -> dict[str, Sums]:
    """Return the checksums of the weights of each engine."""
    return {name: engine.weight_sums() for name, engine in engines.items()}


def _sizes(engine: TrainEngine) -> dict[str, Any]:
    """Return the sizes of an engine's passes: they decide how numbers are rounded."""
    plan = getattr(engine, "memory", None)
    return asdict(plan) if isinstance(plan, MemoryPlan) else {}


def as_rows(stats: Mapping[str, float] | list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return statistics as a list of those of each minibatch."""
    return [dict(stats)] if isinstance(stats, Mapping) else [dict(row) for row in stats]
