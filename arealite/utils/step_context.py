"""`StepContext`: tokens of the sequences that a server decodes at once.

The more tokens, the longer a decode step. The embedded engine counts them for each step (`inference/timing`), and
predictions of other loads use them (`core/foresee`).
"""

from typing import NamedTuple


class StepContext(NamedTuple):
    """Tokens of all sequences of a step, and how much their lengths differ.

    `spread` is the number of sequences times the standard deviation of their lengths.
    """

    tokens: float = 0
    spread: float = 0.0


NO_CONTEXT = StepContext()
