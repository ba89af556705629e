"""`RunStates`: repeats the rollbacks of a run (`on_collapse=rollback`) in its replay.

A rollback restores weights and optimizers of an earlier checkpoint and scales the learning rate. A replay keeps the
states to which its steps will go back in a folder of its own; older ones are the recover checkpoints of the run.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from arealite.api.engine_api import TrainEngine
from arealite.api.io_struct import SaveLoadMeta
from arealite.core.record.step_file import read_info
from arealite.engine.replay.compare import Difference, compare_weights
from arealite.engine.replay.plan import ReplayPlan, find_rollbacks
from arealite.utils.console import show_message
from arealite.utils.distributed import broadcast_json, rank
from arealite.utils.rundir import RunDir


class RunStates:
    """Gives engines the state with which the run began each step. All ranks call the same methods."""

    def __init__(self, plan: ReplayPlan, engines: Mapping[str, TrainEngine]):
        self.plan, self.engines = plan, engines
        self.record = Path(plan.record)
        self.folder = Path(plan.result).parent / "states"
        self._lr_scale = 1.0
        found = list(find_rollbacks(self.record, plan.first + 1, plan.last).items()) if rank() == 0 else None
        # Steps before which the run went back, and to the beginning of which step.
        self._rollbacks: dict[int, int] = dict(broadcast_json(found))

    def begin_step(self, step: int) -> Difference | None:
        """Restore what the run restored before this step; returns how it differs from that (rank 0)."""
        info = read_info(self.record, step) if rank() == 0 else {}
        found: Difference | None = None
        if step in self._rollbacks:
            self._restore(step, self._rollbacks[step])
            now = {name: engine.weight_sums() for name, engine in self.engines.items()}
            if rank() == 0:
                what = "weights restored by the rollback before it: "
                found = compare_weights(step, what, info["rollback"]["weights"], now)
        lr_scale = broadcast_json(info.get("lr_scale", 1.0))
        if lr_scale != self._lr_scale:
            self._lr_scale = lr_scale
            for engine in self.engines.values():
                engine.set_lr_scale(lr_scale)
        if step in self._rollbacks.values():
            for name, engine in self.engines.items():
                engine.save(SaveLoadMeta(str(self.folder / _name(step) / name), "dcp", with_optim=True))
        return found

    def _restore(self, step: int, state: int) -> None:
        if state < step:
            run = RunDir(str(self.record.parent))
            folder = self.folder if state >= self.plan.first else run.recover
            for name, engine in self.engines.items():
                path = str(folder / _name(state) / name)
                engine.load(SaveLoadMeta(path, "dcp", with_optim=True, keeps_schedule=True))
                engine.set_version(step)
        if rank() == 0:
            show_message(f"rollback before step {step + 1}: went back to {_name(state)}")

    def close(self) -> None:
        """Remove the kept states."""
        if rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def _name(step: int) -> str:
    """Return the name of the checkpoint with which a step begins."""
    return f"step{step:06d}"
