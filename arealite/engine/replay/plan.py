"""`ReplayPlan`: which steps of a recorded run are run again, and how.

`arealite replay` makes a plan, and the processes of the replay read it from the file that `AREALITE_REPLAY` names.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from arealite.api.errors import RecordError
from arealite.core.record.step_file import describe_steps, read_info, recorded_steps

REPLAY_ENV = "AREALITE_REPLAY"
Mode = Literal["whole", "trainer-only", "rollout-only"]


@dataclass(frozen=True)
class ReplayPlan:
    """Steps `first` to `last`, counted from 0.

    `checkpoint`: the recover checkpoint before `first`; None: the model before the first step. `uses_servers`: answers
    are generated again, by servers whose sampling is reproducible.
    """

    record: str
    mode: Mode
    first: int
    last: int
    checkpoint: str | None
    uses_servers: bool
    # File that gets the result.
    result: str

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls) -> "ReplayPlan | None":
        """Return the plan of this process; None if it replays nothing."""
        path = os.environ.get(REPLAY_ENV)
        return cls(**json.loads(Path(path).read_text())) if path else None


def choose_steps(
    folder: Path,
    checkpoints: Iterable[tuple[int, Path]],
    first: int | None,
    last: int | None,
    needs_weights: bool,
    num_steps: int | None = None,
) -> tuple[int, int, Path | None]:
    """Return the first and last step to replay, and the recover checkpoint to start from.

    `checkpoints` are the good ones, each with the step after it. Training starts from the newest one at or before
    `first`, or from the model before step 0; all steps from there on must be recorded, and so must be what rollbacks
    go back to. `num_steps` replaces `last`.
    """
    steps = recorded_steps(folder)
    if not steps:
        raise RecordError(f"there is no record in {folder}: only runs with `record` above 0 can be replayed")
    known = set(steps)
    starts: dict[int, Path | None] = {0: None} | {step: path for step, path in checkpoints}
    usable = sorted(step for step in starts if step in known)
    if first is None:
        first = (usable[0] if usable else steps[0]) if needs_weights else steps[0]
    if num_steps is not None:
        last = first + num_steps - 1
    last = steps[-1] if last is None else last
    for step in (first, last):
        if step not in known:
            raise RecordError(f"step {step + 1} is not in the record {folder}: {describe_steps(folder)}")
    if last < first:
        raise RecordError(f"--to {last + 1} is before --from {first + 1}")
    if not needs_weights:
        _check_all_recorded(folder, first, last)
        return first, last, None
    before = [step for step in usable if step <= first]
    if not before:
        where = ", ".join(str(step + 1) for step in usable) or "none"
        raise RecordError(
            f"there is no checkpoint to start from at or before step {first + 1}: replay can start at steps "
            f"{where} of this record. Set recover.freq_steps in the next run, or raise `record`"
        )
    lost: RecordError | None = None
    for start in reversed(before):
        _check_all_recorded(folder, start, last)
        lost = _find_lost_state(folder, start, last, starts)
        if lost is None:
            return start, last, starts[start]
    assert lost is not None
    raise lost


def _check_all_recorded(folder: Path, first: int, last: int) -> None:
    known = set(recorded_steps(folder))
    missing = next((step for step in range(first, last + 1) if step not in known), None)
    if missing is not None:
        raise RecordError(f"step {missing + 1} is missing in the record {folder}: {describe_steps(folder)}")


def _find_lost_state(folder: Path, start: int, last: int, starts: Mapping[int, Path | None]) -> RecordError | None:
    """Return the first rollback that cannot be repeated: its checkpoint is older than `start`, and gone."""
    for step, state in find_rollbacks(folder, start + 1, last).items():
        if state < start and starts.get(state) is None:
            return RecordError(
                f"before step {step + 1} the run went back to its checkpoint step{state:06d}, which is not there any "
                f"more, nor an older one to start from: replay ends before (--to {step}), or starts from a checkpoint "
                "after it"
            )
    return None


def find_rollbacks(folder: Path, first: int, last: int) -> dict[int, int]:
    """Return before which of these steps the run went back, and to the beginning of which step."""
    infos = ((step, read_info(folder, step)) for step in range(first, last + 1))
    return {step: info["rollback"]["step"] for step, info in infos if "rollback" in info}


def unknown_versions(folder: Path, first: int, last: int) -> set[int]:
    """Return versions from `first` on whose weights the servers of a replay do not have.

    A rollback comes after the weights of a step were sent to servers. So they still generate with the weights before
    it, which a replay that starts there does not have; and a run that was resumed there sent the restored weights.
    """
    steps = find_rollbacks(folder, first, last)
    return {step for step in steps if step == first or _begins_attempt(read_info(folder, step)["attempt"], step)}


def _begins_attempt(attempt: str, step: int) -> bool:
    return int(attempt.removeprefix("attempt").split("-")[0]) == step


def read_attempt(folder: Path, name: str) -> dict[str, Any]:
    """Return the environment of an attempt; raises `RecordError` if its file is damaged."""
    path = folder / f"{name}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordError(
            f"cannot read {path} ({reason}): it has the environment of a start of the run. Restore it from a copy, or "
            "replay steps of another start"
        ) from error


def environment_of(folder: Path, step: int) -> dict[str, Any]:
    """Return the environment in which a step was recorded."""
    return read_attempt(folder, read_info(folder, step)["attempt"])


def weights_before(folder: Path, step: int) -> dict[str, Any] | None:
    """Return the recorded checksums of the weights before a step; None if they are not known."""
    info = read_info(folder, step)
    if "rollback" in info:
        return info["rollback"]["weights"]
    if _begins_attempt(info["attempt"], step):
        return read_attempt(folder, info["attempt"])["weights"]
    return read_info(folder, step - 1)["weights"] if step - 1 in recorded_steps(folder) else None
