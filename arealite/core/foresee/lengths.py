"""`Lengths`: tokens of generations that grow by one with every step, without a loop over them."""

import math

from arealite.utils.step_context import StepContext


class Lengths:
    """Generations by the steps of their server at their start."""

    def __init__(self) -> None:
        self.number = 0
        self._sum = self._squares = 0.0

    def add(self, start: float) -> None:
        self.number, self._sum, self._squares = self.number + 1, self._sum + start, self._squares + start * start

    def remove(self, start: float) -> None:
        self.number, self._sum, self._squares = self.number - 1, self._sum - start, self._squares - start * start
        if self.number == 0:
            self._sum = self._squares = 0.0

    def context(self, steps: float) -> StepContext:
        """Return the generated tokens, without prompts, when the server has made so many steps."""
        tokens = max(0.0, self.number * steps - self._sum)
        return StepContext(tokens, math.sqrt(max(0.0, self.number * self._squares - self._sum * self._sum)))
