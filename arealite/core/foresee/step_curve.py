"""`StepCurve`: seconds of a decode step by the number of sequences, as measured.

A straight line is not enough: kernels change with the batch, so that a step of eight sequences may take half of what a
line through the loads of a full server says. The last answers of a synchronous batch run at such loads.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from arealite.core.foresee.resources import ServerUse, StepTime, add_rows


class StepCurve(NamedTuple):
    """Points with lines between them: level before the first one, going on as before after the last."""

    loads: tuple[float, ...]
    seconds: tuple[float, ...]
    # For each computed prompt token.
    prompt_s: float = 0.0

    def at(self, sequences: float) -> float:
        """Return the seconds of a step that decodes so many sequences."""
        loads, seconds = self.loads, self.seconds
        if sequences <= loads[0] or len(loads) == 1:
            return seconds[0]
        i = min(bisect_right(loads, sequences), len(loads) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (loads[i] - loads[i - 1])
        return seconds[i - 1] + slope * (sequences - loads[i - 1])

    def scaled(self, factor: float) -> "StepCurve":
        return StepCurve(self.loads, tuple(factor * s for s in self.seconds), factor * self.prompt_s)


def fit_step_curve(use: ServerUse) -> StepCurve | None:
    """Return what steps cost with nothing else on the device; None if too few loads were measured.

    On CPU it counts CPU seconds, which are the same whatever else runs on the cores, of the run and of the trial at the
    start of the servers. On GPUs it counts the seconds of the trial, which has the GPU to itself, or else of the run.
    """
    rows = add_rows([*use.steps, *use.trial]) if use.cpu_s is not None else use.trial or use.steps
    points = _points(rows, use)
    if len(points) < 2:
        return None
    loads, seconds = zip(*points, strict=True)
    curve = StepCurve(loads, seconds)
    return curve._replace(prompt_s=_prompt_s(curve, use))


def seconds_of(row: StepTime, use: ServerUse) -> float:
    """Return the seconds of a row that count: on CPU those of the processor."""
    return row.seconds if use.cpu_s is None else row.cpu_s


def _points(rows: Sequence[StepTime], use: ServerUse) -> list[tuple[float, float]]:
    """Return the mean load and seconds of steps without prompts; seconds never fall as the load grows."""
    groups: list[list[float]] = []
    for row in rows:
        if row.sequences <= 0 or row.prompt_tokens > 0 or seconds_of(row, use) <= 0:
            continue
        groups.append([row.steps, row.sequences, seconds_of(row, use)])
        # Neighbours in the wrong order are noise: they get their common mean.
        while len(groups) > 1 and groups[-2][2] / groups[-2][0] >= groups[-1][2] / groups[-1][0]:
            last = groups.pop()
            groups[-1] = [old + new for old, new in zip(groups[-1], last, strict=True)]
    return [(sequences / steps, seconds / steps) for steps, sequences, seconds in groups]


def _prompt_s(curve: StepCurve, use: ServerUse) -> float:
    """Return the seconds of a prompt token: what steps with prompts took beyond their decoding."""
    rows = [row for row in use.steps if row.prompt_tokens > 0]
    extra_s = sum(seconds_of(row, use) - row.steps * curve.at(row.sequences / row.steps) for row in rows)
    return max(0.0, extra_s) / max(1.0, sum(row.prompt_tokens for row in rows))
