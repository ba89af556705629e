"""`StepTimes`: what the steps of an engine took, by the number of sequences that they decode.

`/server_info` has it as `step_times`, and the ledger keeps the last one of each server: predictions of other loads
(`arealite plan --from`, `arealite report --what-if`) are fitted to it. Counting costs about a microsecond a step.
"""


class StepTimes:
    """Sums of steps with 0, 1, 2–3, 4–7, … sequences."""

    def __init__(self) -> None:
        self._rows: dict[int, list[float]] = {}

    def add(self, sequences: int, prompt_tokens: int, seconds: float, cpu_s: float) -> None:
        """Count one step by the sequences it decoded. CPU seconds are those of the engine's thread."""
        row = self._rows.setdefault(sequences.bit_length(), [0, 0, 0, 0.0, 0.0])
        for i, value in enumerate((1, sequences, prompt_tokens, seconds, cpu_s)):
            row[i] += value

    def rows(self) -> list[list[float]]:
        """Return rows `[steps, sequences, prompt tokens, seconds, CPU seconds]`, fewest sequences first."""
        return [[*row] for _, row in sorted(self._rows.copy().items())]
