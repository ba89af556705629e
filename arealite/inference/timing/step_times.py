"""`StepTimes`: what the steps of an engine took, by the number and the lengths of their sequences.

`/server_info` has it as `step_times` (and `trial_times`, of `step_trial`), and the ledger keeps the last one of each
server: predictions of other loads (`arealite plan --from`, `arealite report --what-if`) are fitted to it. Counting
costs a few microseconds a step.
"""

import math

import numpy as np

from arealite.utils.step_context import NO_CONTEXT, StepContext


def context_of(lengths: np.ndarray) -> StepContext:
    """Return the context of sequences of these lengths."""
    total = int(lengths.sum())
    return StepContext(total, math.sqrt(max(0, len(lengths) * int(lengths @ lengths) - total * total)))


class StepTimes:
    """Sums of steps with 0, 1, 2–3, 4–7, … sequences of 0, 1, 2–3, … tokens.

    Steps with prompts, and those with sequences of different lengths, have rows of their own.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, bool, int, bool], list[float]] = {}

    def add(
        self,
        sequences: int,
        prompt_tokens: int,
        seconds: float,
        cpu_s: float,
        context: StepContext = NO_CONTEXT,
        steps: int = 1,
    ) -> None:
        """Count steps that decoded so many sequences each. CPU seconds are those of the engine's thread."""
        key = row_key(sequences, prompt_tokens, context)
        row = self._rows.setdefault(key, [0, 0, 0, 0.0, 0.0, 0, 0.0])
        sums = steps * sequences, prompt_tokens, seconds, cpu_s, steps * context.tokens, steps * context.spread
        for i, value in enumerate((steps, *sums)):
            row[i] += value

    def rows(self) -> list[list[float]]:
        """Return rows `[steps, sequences, prompt tokens, seconds, CPU seconds, context, spread]`."""
        return [[*row] for _, row in sorted(self._rows.copy().items())]


def row_key(sequences: float, prompt_tokens: float, context: StepContext) -> tuple[int, bool, int, bool]:
    """Return which steps are added up."""
    mean = context.tokens / max(1, sequences)
    return round(sequences).bit_length(), prompt_tokens > 0, int(mean).bit_length(), 4 * context.spread > context.tokens
