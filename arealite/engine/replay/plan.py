"""`ReplayPlan`: which steps of a recorded run are run again, and how.

`arealite replay` makes a plan, and the processes of the replay read it from the file that `AREALITE_REPLAY` names.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from arealite.api.errors import RecordError
from arealite.core.record.step_file import describe_steps, read_step, recorded_steps

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
    `first`, or from the model before step 0; all steps from there on must be recorded. `num_steps` replaces `last`.
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
        start = first
    else:
        before = [step for step in usable if step <= first]
        if not before:
            where = ", ".join(str(step + 1) for step in usable) or "none"
            raise RecordError(
                f"there is no checkpoint to start from at or before step {first + 1}: replay can start at steps "
                f"{where} of this record. Set recover.freq_steps in the next run, or raise `record`"
            )
        start = before[-1]
    missing = next((step for step in range(start, last + 1) if step not in known), None)
    if missing is not None:
        raise RecordError(f"step {missing + 1} is missing in the record {folder}: {describe_steps(folder)}")
    return start, last, starts.get(start) if needs_weights else None


def read_attempt(folder: Path, name: str) -> dict[str, Any]:
    """Return the environment of an attempt; raises `RecordError` if its file is damaged."""
    path = folder / f"{name}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read {path} of the record ({type(error).__name__}: {error})") from error


def environment_of(folder: Path, step: int) -> dict[str, Any]:
    """Return the environment in which a step was recorded."""
    return read_attempt(folder, read_step(folder, step).info["attempt"])


def weights_before(folder: Path, step: int) -> dict[str, Any] | None:
    """Return the recorded checksums of the weights before a step; None if they are not known."""
    attempt = read_step(folder, step).info["attempt"]
    if int(attempt.removeprefix("attempt").split("-")[0]) == step:
        return read_attempt(folder, attempt)["weights"]
    return read_step(folder, step - 1).info["weights"] if step - 1 in recorded_steps(folder) else None
