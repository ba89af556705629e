"""`Replay`: runs a recorded run again in this process, and compares after every step.

`make_engine` asks it for engines, and `Run` for the steps. It stops at the first difference, and writes the result to
the file that the plan names.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from arealite.api.engine_api import InferenceEngine, TrainEngine
from arealite.api.errors import ConfigError
from arealite.core.record.environment import describe_environment, differences
from arealite.core.record.recorder import column_sums
from arealite.core.record.step_file import read_step
from arealite.engine.replay.compare import Difference, compare_stats, compare_sums, compare_weights
from arealite.engine.replay.engine import ReplayEngine
from arealite.engine.replay.plan import ReplayPlan, environment_of, read_attempt, weights_before
from arealite.engine.replay.states import RunStates
from arealite.utils.console import show_message
from arealite.utils.distributed import broadcast_json, rank

# Its second half is known only after the update, of which the statistics tell more.
_AFTER_STATS = ("train_logp",)
_MAX_FAILURES = 100


class ReplayEnd(Exception):
    """Ends the loop of a script whose replay is complete; `Run` catches it."""


class AbsentEngine:
    """Stands for a model where only rollouts are replayed: it accepts everything and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class ReplayedLoader:
    """Restores the position in the data of a supervised run, also if the replay has another order.

    Another seed is then named with the first statistics that differ, as every other change is.
    """

    def __init__(self, loader: Any):
        self.loader = loader

    def load_state_dict(self, state: dict[str, Any]) -> None:
        changed = self.loader.differences(state)
        if not changed:
            return self.loader.load_state_dict(state)
        if rank() == 0:
            show_message(f"note: the replay reads other data than the run: {', '.join(changed)}")
        self.loader.load_position(state)


class Replay:
    """The replay of this process. All ranks call the same methods."""

    def __init__(self, plan: ReplayPlan):
        self.plan = plan
        self.folder = Path(plan.record)
        self.rollout: ReplayEngine | None = None
        self.difference: Difference | None = None
        self.num_steps = 0
        self._config: Any = None

    def make_engine(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the engine that a script gets for `cls(*args, **kwargs)`."""
        if not (isinstance(cls, type) and issubclass(cls, InferenceEngine)):
            return AbsentEngine() if self.plan.mode == "rollout-only" else cls(*args, **kwargs)
        servers: Any = cls(*args, **kwargs) if self.plan.uses_servers else None
        self.rollout = ReplayEngine(self.plan, args[0] if args else kwargs["config"], servers)
        return self.rollout

    def steps(self, config: Any, engines: Mapping[str, TrainEngine], rollout: Any) -> Iterator[int]:
        """Yield the steps of the plan, up to the first difference."""
        self._config = config
        if rollout is not None and rollout is not self.rollout:
            raise ConfigError(
                "this script makes its engine without make_engine, so its rollouts cannot be replayed: write "
                "`make_engine(client, …)` (arealite.controller.factory)"
            )
        if self.plan.mode == "rollout-only":
            assert self.rollout is not None
            self.rollout.on_workflow = self._run_rollouts
            yield self.plan.first
        self._check_start(engines)
        states = RunStates(self.plan, engines)
        for step in range(self.plan.first, self.plan.last + 1):
            if self.difference is None:
                self._agree(states.begin_step(step))
            if self.difference is not None:
                break
            if self.rollout is not None:
                self.rollout.begin_step(step)
            yield step
        states.close()
        self._write()

    def _check_start(self, engines: Mapping[str, TrainEngine]) -> None:
        now = {name: engine.weight_sums() for name, engine in engines.items()}
        found: Difference | None = None
        if rank() == 0 and (recorded := weights_before(self.folder, self.plan.first)) is not None:
            found = compare_weights(self.plan.first, "weights before the first step: ", recorded, now)
        self._agree(found)

    def check(self, step: int, stats: list[dict[str, Any]], engines: Mapping[str, TrainEngine]) -> None:
        """Compare a step with its record; the first difference ends the replay."""
        weights = {name: engine.weight_sums() for name, engine in engines.items()}
        found = self._compare(step, stats, weights) if rank() == 0 else None
        self._agree(found)
        if found is None:
            self.num_steps += 1
            if rank() == 0:
                tensors = sum(len(sums) for sums in weights.values())
                show_message(f"step {step + 1}: equal ({len(stats)} minibatches, {tensors} tensors)")

    def _compare(self, step: int, stats: list[dict[str, Any]], weights: dict[str, Any]) -> Difference | None:
        info, rollout = read_step(self.folder, step).info, self.rollout
        if rollout is not None and rollout.difference is not None:
            return rollout.difference
        shares = [column_sums(share) for share in rollout.shares] if rollout else []
        if len(shares) != len(info["columns"]):
            return Difference(step, "number of batches", str(len(info["columns"])), str(len(shares)))
        # In controller mode the columns of other processes are not known.
        columns = [] if self._recorded_by_controller(info) else list(zip(info["columns"], shares, strict=True))
        for recorded, now in columns:
            early = {name: sums for name, sums in recorded.items() if name not in _AFTER_STATS}
            if (found := compare_sums(step, "", early, now)) is not None:
                return found
        found = compare_stats(step, info["stats"], stats)
        for recorded, now in columns:
            found = found or compare_sums(step, "", recorded, now)
        return found or compare_weights(step, "weights after the step: ", info["weights"], weights)

    def _recorded_by_controller(self, info: dict[str, Any]) -> bool:
        return bool(read_attempt(self.folder, info["attempt"])["config"].get("controller"))

    def _agree(self, found: Difference | None) -> None:
        """Let all ranks know what rank 0 has found."""
        agreed = broadcast_json(None if found is None else found.to_json())
        self.difference = None if agreed is None else Difference(**agreed)

    def _run_rollouts(self, workflow: Any) -> None:
        """Run the episodes of all steps again, without training, and end the loop."""
        rollout = self.rollout
        assert rollout is not None
        for step in range(self.plan.first, self.plan.last + 1):
            record = read_step(self.folder, step)
            for number in range(len(record.batches)):
                rollout.run_again(step, record, number, workflow)
            rollout.run_others(step, record, workflow)
            if rollout.difference is not None:
                self.difference = rollout.difference
                break
            self.num_steps += 1
            show_message(f"step {step + 1}: rollouts equal ({rollout.num_checked} episodes so far)")
        self._write()
        raise ReplayEnd

    def _write(self) -> None:
        if rank() != 0:
            return
        rollout, where = self.rollout, self.difference
        recorded = environment_of(self.folder, where.step if where else self.plan.last)
        result = {
            "num_steps": self.num_steps,
            "num_episodes": rollout.num_checked if rollout else 0,
            "num_not_run": rollout.num_taken if rollout else 0,
            "failures": rollout.failures[:_MAX_FAILURES] if rollout else [],
            "difference": where.to_json() if where else None,
            "changes": differences(recorded, describe_environment(self._config), self.plan.mode != "rollout-only"),
        }
        Path(self.plan.result).write_text(json.dumps(result))


@functools.cache
def current_replay() -> Replay | None:
    """Return the replay of this process; None if it trains."""
    plan = ReplayPlan.load()
    return None if plan is None else Replay(plan)


def checkpoint_parts(dataloader: Any, rollout: Any) -> dict[str, Any]:
    """Return the parts of a run whose state recover checkpoints hold, by name.

    In a replay with rollouts the data loader is none of them: the record has the rows, in the order of the run.
    """
    if current_replay() is not None:
        dataloader = None if rollout is not None else dataloader
        # Loaders of others restore their state themselves.
        dataloader = ReplayedLoader(dataloader) if hasattr(dataloader, "load_position") else dataloader
    named = {"dataloader": dataloader, "rollout": rollout}
    return {name: part for name, part in named.items() if hasattr(part, "load_state_dict")}
