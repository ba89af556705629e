"""`Guard`: shows the alarms of a run, and goes back to a good checkpoint after a collapse.

`Run` gives it the statistics of each step. With `on_collapse=rollback` one recover checkpoint is always kept to go back
to: the newest one at which no alarm was active and the reward (up to noise) or the validation was at its best; at first
the model before the first step. A rollback restores weights and optimizers of that checkpoint and halves the learning
rate. Steps, data, versions and the schedule of the rate go on: servers get the restored weights with the next update,
and answers of the collapsed policy are off-policy data until they are too old.

Rollbacks are stored in recover checkpoints, the checkpoint to go back to in `recover/guard.json`. A run that was killed
before the checkpoint of a rollback was complete repeats the rollback when it resumes.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from arealite.api.errors import CheckpointError, CollapseError
from arealite.api.io_struct import Stats, StepInfo
from arealite.core.ledger.store import Level
from arealite.trainer.alarms import Alarm, Alarms, StepStats
from arealite.trainer.recover import Recover
from arealite.trainer.saver import on_all_ranks
from arealite.utils.console import show_message
from arealite.utils.distributed import broadcast_json, rank
from arealite.utils.rundir import list_complete, write_file

MAX_ROLLBACKS = 3


@dataclass
class _State:
    """What a run that resumes must know. Of rollbacks, the copy in its checkpoint counts."""

    # Folder of the checkpoint to go back to.
    good: str = ""
    num_rollbacks: int = 0
    # The first step after the last rollback, and the checkpoint that was restored.
    restarted_at: int = 0
    restored: str = ""

    @property
    def lr_scale(self) -> float:
        return 0.5**self.num_rollbacks


class Guard:
    """Checks each step on rank 0; all ranks call the same methods."""

    def __init__(self, action: str, recover: Recover, max_staleness: int):
        self.action, self.recover = action, recover
        self.alarms = Alarms()
        self.collapse: Alarm | None = None
        # Called with kind, text, step and level of what happens.
        self.on_event: Callable[[str, str, int | None, Level], None] = lambda kind, text, step, level: None
        self._state = _State()
        self._file = recover.folder / "guard.json"
        # Of the checkpoint that was loaded.
        self._rollbacks: dict[str, Any] = {}
        recover.optional_parts["guard"] = self
        # Steps after a rollback whose answers may be of the collapsed policy.
        self._num_old_steps = max_staleness + 1

    @property
    def rolls_back(self) -> bool:
        return self.action == "rollback"

    @property
    def lr_scale(self) -> float:
        return self._state.lr_scale

    def restored_before(self, step: int) -> int | None:
        """Return to which step a rollback went back before `step`; None if there was none."""
        state = self._state
        is_first = state.num_rollbacks > 0 and state.restarted_at == step and bool(state.restored)
        return int(state.restored.removeprefix("step")) if is_first else None

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self._state).items() if key != "good"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rollbacks = state

    def resume(self, history: Iterable[StepStats], start: StepInfo) -> None:
        """Continue after the step `start`. A run without a checkpoint of its own saves one to go back to.

        If the last step had collapsed and was not rolled back, `take_collapse` returns that.
        """
        first = start.global_step + 1
        if self.rolls_back and broadcast_json(not list_complete(self.recover.folder)):
            # A new run, or one that continues a checkpoint of another run.
            self._state = replace(self._state, **self._rollbacks)
            self._scale_rates()
            self.recover.save(start)
            self._keep(start)
        elif self.rolls_back:
            stored = _State(**broadcast_json(asdict(self._read()) if rank() == 0 else None))
            self._state = replace(stored, **self._rollbacks)
            self.recover.keep(self._state.good)
            self._scale_rates()
        for stats in history:
            if self._state.num_rollbacks and stats.get("step") == self._state.restarted_at:
                self.alarms.restart(self._num_old_steps)
            self.alarms.check_validation(stats)
            collapses = [alarm for alarm in self.alarms.check(stats) if alarm.is_collapse]
            is_open = self.rolls_back and stats.get("step") == first - 1 and self._state.restarted_at != first
            if collapses and is_open:
                self.collapse = collapses[0]

    def check(self, stats: Stats, step: int | None = None) -> Stats:
        """Show new alarms; return how many there are, and `alarm/NAME` for each."""
        if rank() != 0:
            return {}
        found = self.alarms.check(stats)
        self.collapse = next((alarm for alarm in found if alarm.is_collapse), None)
        counts = {"alarms": float(len(found)), **self._show(found, step)}
        return counts | ({"rollbacks": float(self._state.num_rollbacks)} if self.rolls_back else {})

    def check_validation(self, stats: Stats, step: int) -> Stats:
        """Show a new alarm for each validation set that has become worse; return `alarm/NAME` for each."""
        return self._show(self.alarms.check_validation(stats), step) if rank() == 0 else {}

    def _show(self, alarms: list[Alarm], step: int | None) -> Stats:
        for alarm in alarms:
            show_message(f"alarm: {alarm.text}")
            self.on_event("collapse" if alarm.is_collapse else "alarm", f"{alarm.name}: {alarm.text}", step, "alarm")
        return {f"alarm/{alarm.name}": 1.0 for alarm in alarms}

    def after_save(self, info: StepInfo, is_saved: bool, is_best: bool) -> None:
        """Keep the recover checkpoint of this step if it is one to go back to.

        `is_saved`: the step has one. `is_best`: its validation is the best so far; one is written if no alarm is on.
        """
        if not self.rolls_back:
            return
        is_best = broadcast_json(is_best and not self.alarms.active)  # the validation began before the last updates
        if is_best and not is_saved:
            self.recover.save(info)
        is_good = is_best or (is_saved and self.alarms.is_healthy)
        if broadcast_json(is_good):
            self._keep(info)

    def take_collapse(self) -> str:
        """Return what has collapsed since the last call, the same on all ranks; empty if nothing has."""
        if self.action == "warn":
            return ""
        reason, self.collapse = self.collapse.text if self.collapse else "", None
        return broadcast_json(reason)

    def roll_back(self, info: StepInfo, reason: str) -> None:
        """Restore the kept checkpoint and halve the learning rate; raise if that was done too often."""
        state = self._state
        if state.num_rollbacks == MAX_ROLLBACKS:
            raise CollapseError(
                f"the policy has collapsed again after {MAX_ROLLBACKS} rollbacks: {reason}. The last good checkpoint "
                f"is {self.recover.folder / state.good}; start a new run with other settings"
            )
        self.recover.restore_engines(state.good)
        state.num_rollbacks += 1
        state.restarted_at, state.restored = info.global_step + 1, state.good
        self._scale_rates()
        for engine in self.recover.engines.values():
            engine.set_version(info.global_step + 1)
        self.alarms.restart(self._num_old_steps)
        # A run that resumes goes on from here, not from the collapsed policy. It has the new state with the weights.
        self.recover.save(info)
        self.recover.wait()
        self._write()
        if rank() == 0:
            text = (
                f"rollback {state.num_rollbacks} of at most {MAX_ROLLBACKS}: went back to {state.good} after step "
                f"{info.global_step + 1}; the learning rate is {state.lr_scale:g} of the configured one from now on"
            )
            show_message(text)
            self.on_event("rollback", text, info.global_step, "warning")

    def _scale_rates(self) -> None:
        for engine in self.recover.engines.values():
            engine.set_lr_scale(self._state.lr_scale)

    def _keep(self, info: StepInfo) -> None:
        # Only what is complete can be gone back to.
        self.recover.wait()
        self._state.good = self.recover.path(info).name
        self.recover.keep(self._state.good)
        self._write()

    def _write(self) -> None:
        with on_all_ranks(str(self._file)):
            if rank() == 0:
                write_file(self._file, json.dumps(asdict(self._state)), private=False)

    def _read(self) -> _State:
        """Return the stored state; if it names no checkpoint, the newest one is the good one."""
        try:
            state = _State(**json.loads(self._file.read_text())) if self._file.exists() else _State()
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self._file} is damaged: delete it to go on with the configured rate") from error
        if not state.good or not (self.recover.folder / state.good).is_dir():
            state.good = list_complete(self.recover.folder)[0].name
        return state
