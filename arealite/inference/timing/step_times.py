"""`StepTimes`: what the steps of an engine took, by the number of sequences that they decode.

`/server_info` has it as `step_times` (and `trial_times`, of `step_trial`), and the ledger keeps the last one of each
server: predictions of other loads (`arealite plan --from`, `arealite report --what-if`) are fitted to it. Counting
costs about a microsecond a step.
"""


class StepTimes:
    """Sums of steps with 0, 1, 2–3, 4–7, … sequences; those with prompts have rows of their own."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, bool], list[float]] = {}

    def add(self, sequences: int, prompt_tokens: int, seconds: float, cpu_s: float, steps: int = 1) -> None:
        """Count steps by the sequences that each decoded. CPU seconds are those of the engine's thread."""
        key = sequences.bit_length(), prompt_tokens > 0
        row = self._rows.setdefault(key, [0, 0, 0, 0.0, 0.0])
        for i, value in enumerate((steps, sequences * steps, prompt_tokens, seconds, cpu_s)):
            row[i] += value

    def rows(self) -> list[list[float]]:
        """Return rows `[steps, sequences, prompt tokens, seconds, CPU seconds]`, fewest sequences first."""
        return [[*row] for _, row in sorted(self._rows.copy().items())]
