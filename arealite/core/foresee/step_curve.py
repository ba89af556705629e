"""`StepCurve`: seconds of a decode step by the number of sequences and their lengths, as measured.

A straight line is not enough: kernels change with the batch, so that a step of eight sequences may take half of what a
line through the loads of a full server says. The last answers of a synchronous batch run at such loads. Lengths count,
too: the full server of an asynchronous run has answers of all lengths, that of a synchronous one short ones of about
the same length. Attention to sequences of different lengths takes longer, above all on CPU, where they are padded.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from arealite.core.foresee.resources import ServerUse, StepTime

# Neighbours whose loads differ by less than this factor are one point.
_SAME_LOAD = 1.5
# A point of the curve has so many steps or more, as in the trial on CPU: a single step is no measurement.
_MIN_STEPS = 3
# What lengths cost is known if they make a step of the trial slower by this share.
_NOTICEABLE = 0.05


class StepCurve(NamedTuple):
    """Points with lines between them: level before the first one, going on as before after the last."""

    loads: tuple[float, ...]
    seconds: tuple[float, ...]
    # For each computed prompt token, and for each step that computes prompts.
    prompt_s: float = 0.0
    pass_s: float = 0.0
    # For each token of the decoded sequences, and for each token by which the length of a sequence deviates.
    context_s: float = 0.0
    spread_s: float = 0.0

    def at(self, sequences: float, context: float = 0.0, spread: float = 0.0) -> float:
        """Return the seconds of a step with so many sequences.

        `context` are their tokens, `spread` is their number times the standard deviation of their lengths.
        """
        return self._of_load(sequences) + self.context_s * context + self.spread_s * spread

    def of(self, row: StepTime) -> float:
        """Return the seconds of all steps of a row, without their prompts."""
        return row.steps * self.at(row.sequences / row.steps, row.context / row.steps, row.spread / row.steps)

    def _of_load(self, sequences: float) -> float:
        loads, seconds = self.loads, self.seconds
        if sequences <= loads[0] or len(loads) == 1:
            return seconds[0]
        i = min(bisect_right(loads, sequences), len(loads) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (loads[i] - loads[i - 1])
        return seconds[i - 1] + slope * (sequences - loads[i - 1])

    def scaled(self, factor: float) -> "StepCurve":
        costs = (factor * cost for cost in self[2:])
        return StepCurve(self.loads, tuple(factor * s for s in self.seconds), *costs)


def fit_step_curve(use: ServerUse) -> StepCurve | None:
    """Return what steps cost with nothing else on the device; None if too few loads were measured.

    On CPU it counts CPU seconds, which are the same whatever else runs on the cores, of the run and of the trial at the
    start of the servers. On GPUs it counts the seconds of the trial, which has the GPU to itself, or else of the run.
    """
    context_s, spread_s = _length_costs(use)
    rows = [*use.steps, *use.trial] if use.cpu_s is not None else use.trial or use.steps
    points = _points(rows, use, context_s, spread_s)
    if len(points) < 2:
        return None
    loads, seconds = zip(*points, strict=True)
    curve = StepCurve(loads, seconds, context_s=context_s, spread_s=spread_s)
    prompt_s, pass_s = _prompt_costs(curve, use)
    return curve._replace(prompt_s=prompt_s, pass_s=pass_s)


def slower_than(curve: StepCurve, use: ServerUse) -> float:
    """Return by which factor steps without prompts were slower than the curve; at least 1."""
    rows = [row for row in use.steps if row.sequences > 0 and row.prompt_tokens == 0]
    alone_s = sum(curve.of(row) for row in rows)
    return max(1.0, sum(seconds_of(row, use) for row in rows) / alone_s) if alone_s > 0 else 1.0


def seconds_of(row: StepTime, use: ServerUse) -> float:
    """Return the seconds of a row that count: on CPU those of the processor."""
    return row.seconds if use.cpu_s is None else row.cpu_s


class _Step(NamedTuple):
    """Means of the steps of a trial."""

    load: float
    context: float
    spread: float
    seconds: float


def _length_costs(use: ServerUse) -> tuple[float, float]:
    """Return the costs of a token of context and of spread, from trials of one load.

    Runs do not tell: their load and lengths change together.
    """
    rows = [row for row in use.trial if row.sequences > 0 and row.context > 0]
    sums = [(row.steps, (row.sequences, row.context, row.spread, seconds_of(row, use))) for row in rows]
    steps = [_Step(*(value / number for value in values)) for number, values in sums]
    equal = sorted(step for step in steps if 4 * step.spread <= step.context)
    short: dict[float, _Step] = {}
    context_s = 0.0
    for step in equal:
        base = short.setdefault(step.load, step)
        if step.seconds - base.seconds > _NOTICEABLE * base.seconds:
            context_s = (step.seconds - base.seconds) / (step.context - base.context)
    mixed = sorted(step for step in steps if 4 * step.spread > step.context and step.load in short)
    context_s = context_s or _context_s_of_mixed(mixed, short)
    # What steps of different lengths take beyond that.
    spread_s = 0.0
    for step in mixed:
        base = short[step.load]
        extra_s = step.seconds - base.seconds - context_s * (step.context - base.context)
        spread_s = extra_s / step.spread if extra_s > _NOTICEABLE * base.seconds else 0.0
    # On CPU sequences are padded, by about as many tokens as their lengths deviate, and padding costs what tokens cost.
    # What few sequences take beyond that are calls of attention, whose number does not grow with the load.
    return context_s, spread_s if use.cpu_s is None else min(spread_s, context_s)


def _context_s_of_mixed(mixed: Sequence[_Step], short: Mapping[float, _Step]) -> float:
    """Return the cost of a token of context if long sequences seemed to cost nothing.

    Sequences of different lengths have fewer tokens than the long ones: if they are slower than short ones, the trial
    of the long ones has failed, and theirs is the only one that shows what tokens cost.
    """
    for step in mixed:
        base = short[step.load]
        if step.seconds - base.seconds > _NOTICEABLE * base.seconds:
            return (step.seconds - base.seconds) / (step.context - base.context)
    return 0.0


def _points(rows: Iterable[StepTime], use: ServerUse, context_s: float, spread_s: float) -> list[tuple[float, float]]:
    """Return the mean load and seconds of steps without prompts; seconds never fall as the load grows."""
    used = [row for row in rows if row.sequences > 0 and row.prompt_tokens == 0 and seconds_of(row, use) > 0]
    groups: list[list[float]] = []
    first = 0.0
    for row in sorted(used, key=lambda row: row.sequences / row.steps):
        seconds = seconds_of(row, use)
        # What the lengths do not explain.
        rest_s = max(seconds / 4, seconds - context_s * row.context - spread_s * row.spread)
        sums = [row.steps, row.sequences, rest_s]
        if groups and row.sequences / row.steps < _SAME_LOAD * first:
            groups[-1] = _add(groups[-1], sums)
        else:
            first = row.sequences / row.steps
            groups.append(sums)
    points: list[list[float]] = []
    for group in _with_enough_steps(groups):
        points.append(group)
        # Neighbours in the wrong order are noise: they get their common mean.
        while len(points) > 1 and points[-2][2] / points[-2][0] >= points[-1][2] / points[-1][0]:
            points[-2:] = [_add(points[-2], points[-1])]
    # The curve goes on after the last point: two that are near to each other would give it any slope.
    if len(points) > 2 and points[-1][1] / points[-1][0] < _SAME_LOAD * points[-2][1] / points[-2][0]:
        points[-2:] = [_add(points[-2], points[-1])]
    return [(sequences / steps, seconds / steps) for steps, sequences, seconds in points]


def _with_enough_steps(groups: Sequence[list[float]]) -> list[list[float]]:
    """Join groups of few steps to the one before, or the first ones to the next."""
    found: list[list[float]] = []
    for group in groups:
        if found and min(group[0], found[-1][0]) < _MIN_STEPS:
            found[-1] = _add(found[-1], group)
        else:
            found.append(group)
    return found


def _add(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]


def _prompt_costs(curve: StepCurve, use: ServerUse) -> tuple[float, float]:
    """Return the seconds of a prompt token and of a pass.

    They are what steps with prompts took beyond their decoding.
    """
    rows = [row for row in use.steps if row.prompt_tokens > 0]
    # Prompts do not pay for what slowed down all steps of a run: a trainer on the same GPU.
    slower = slower_than(curve, use) if use.cpu_s is None else 1.0
    extra_s = [seconds_of(row, use) / slower - curve.of(row) for row in rows]
    token_s = max(0.0, sum(extra_s)) / max(1.0, sum(row.prompt_tokens for row in rows))
    sizes = [row.prompt_tokens / row.steps for row in rows]
    if not rows or max(sizes) < _SAME_LOAD * min(sizes):
        # The two cannot be told apart.
        return token_s, 0.0
    # The error of a sum of many steps grows as its root.
    scale = 1 / np.sqrt([max(1e-9, seconds_of(row, use)) for row in rows])
    features = np.array([[row.prompt_tokens, row.steps] for row in rows]) * scale[:, None]
    (prompt_s, pass_s), *_ = np.linalg.lstsq(features, np.array(extra_s) * scale, rcond=None)
    if prompt_s < 0:
        return 0.0, max(0.0, sum(extra_s)) / sum(row.steps for row in rows)
    return (float(prompt_s), float(pass_s)) if pass_s > 0 else (token_s, 0.0)
