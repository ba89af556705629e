"""`StepContext`: tokens of the sequences that a server decodes at once. Its steps take longer with more of them.

The embedded engine counts it for each step (`inference/timing`), and predictions of other loads use it
(`core/foresee`).
"""

from typing import NamedTuple


class StepContext(NamedTuple):
    """Tokens of all sequences of a step, and how much their lengths differ.

    `spread` is the number of sequences times the standard deviation of their lengths.
    """

    tokens: float = 0
    spread: float = 0.0


NO_CONTEXT = StepContext()
