"""What a recorded run used: seconds of the servers' steps by load, and CPU seconds of its processes.

Read from the table `server_steps` of the ledger and from the statistics. Runs of older versions, and those with servers
other than the embedded one, have neither.
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from arealite.core.foresee.core_sharing import CoreUse


class StepTime(NamedTuple):
    """Sums over steps with about the same number of sequences; see `inference.timing.step_times`."""

    steps: float
    sequences: float
    prompt_tokens: float
    seconds: float
    # Of the engines' threads.
    cpu_s: float
    # Tokens of the decoded sequences, and their number times the deviation of their lengths; 0 in older recordings.
    context: float = 0
    spread: float = 0.0


class ServerUse(NamedTuple):
    """What all servers have done. `cpu_s` is that of their processes; None on a GPU."""

    steps: Sequence[StepTime]
    cpu_s: float | None
    # Of the trial at their start, without a trainer beside them; see `inference.timing.step_trial`.
    trial: Sequence[StepTime] = ()


class StepCost(NamedTuple):
    """Seconds of a step: fixed, for each decoded sequence, for each computed prompt token."""

    fixed_s: float
    sequence_s: float
    prompt_s: float


def read_server_use(db: sqlite3.Connection, began: float = 0.0) -> ServerUse:
    """Return the sums over all servers of a run that worked after a time."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'server_steps'").fetchone():
        return ServerUse((), None)
    run, trial = [], []
    found = db.execute("SELECT steps, cpu_s FROM server_steps WHERE time >= ?", (began,)).fetchall()
    for text, _ in found:
        rows = json.loads(text)
        # Older versions wrote the rows of the run only.
        named = rows if isinstance(rows, dict) else {"run": rows}
        run += [StepTime(*row) for row in named["run"]]
        trial += [StepTime(*row) for row in named.get("trial", ())]
    cpu_s = [cpu_s for _, cpu_s in found]
    total_s = sum(cpu_s) if cpu_s and None not in cpu_s else None
    return ServerUse(add_rows(run), total_s, add_rows(trial))


def add_rows(rows: Iterable[StepTime]) -> tuple[StepTime, ...]:
    """Add rows of about the same number of sequences and lengths, those with prompts apart.

    Returns the fewest sequences first.
    """
    sums: dict[tuple[int, bool, int, bool], StepTime] = {}
    for row in rows:
        load, length = row.sequences / row.steps, row.context / max(1, row.sequences)
        # The rows of a server are divided in the same way.
        key = round(load).bit_length(), row.prompt_tokens > 0, int(length).bit_length(), 4 * row.spread > row.context
        known = sums.get(key, StepTime(0, 0, 0, 0.0, 0.0, 0, 0.0))
        sums[key] = StepTime(*(old + new for old, new in zip(known, row, strict=True)))
    return tuple(row for _, row in sorted(sums.items()))


def fit_step_cost(use: ServerUse) -> StepCost | None:
    """Return the cost of a step, None if it is not known.

    On CPU it counts CPU seconds, which are the same whatever else runs on the cores.
    """
    rows = [row for row in add_rows([*use.steps, *use.trial]) if row.sequences > 0]
    seconds = np.array([row.seconds if use.cpu_s is None else row.cpu_s for row in rows])
    if len(rows) < 2 or not (seconds > 0).all():
        return None
    # The error of a sum of many steps grows as its root.
    scale = 1 / np.sqrt(seconds)
    features = np.array([[row.steps, row.sequences, row.prompt_tokens] for row in rows])
    used = [0, 1, 2]
    while used:
        found, *_ = np.linalg.lstsq(features[:, used] * scale[:, None], seconds * scale, rcond=None)
        if (found >= 0).all():
            values = dict(zip(used, found.tolist(), strict=True))
            return StepCost(*(values.get(i, 0.0) for i in range(3)))
        used.remove(used[int(np.argmin(found))])
    return None


def core_use(use: ServerUse, stats: Iterable[Mapping[str, Any]], num_ranks: int) -> CoreUse | None:
    """Return what the processes of a run on CPU need; None for runs on GPUs and of older versions."""
    lines = [line for line in stats if line.get("cpu/cores")]
    engine_s = sum(row.cpu_s for row in use.steps)
    if not lines or use.cpu_s is None or engine_s <= 0:
        return None
    work_s = sum(line["time/step"] - (line.get("wait_s") or 0.0) for line in lines)
    threads = sum(line["cpu/trainer"] for line in lines) / max(work_s, 1e-9)
    return CoreUse(
        lines[-1]["cpu/cores"],
        max(1.0, use.cpu_s / engine_s),
        max(1.0, threads),
        num_ranks,
        sum(line["cpu/rollout"] for line in lines) / max(1.0, sum(row.sequences for row in use.steps)),
    )
