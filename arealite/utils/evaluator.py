"""Runs the validation set as often as the configuration says."""

from __future__ import annotations

from collections.abc import Callable

from arealite.api.cli_args import FreqConfig
from arealite.api.io_struct import StepInfo
from arealite.utils.saver import Frequency


class Evaluator:
    """Calls `evaluate() -> statistics` when it is time. Called by all ranks after each step."""

    def __init__(self, config: FreqConfig, evaluate: Callable[[], dict[str, float]]):
        self.frequency = Frequency(config)
        self.evaluate = evaluate

    def maybe_evaluate(self, info: StepInfo) -> dict[str, float]:
        """Its statistics if it was time, else none."""
        return self.evaluate() if self.frequency.is_due(info) else {}
