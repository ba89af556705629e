"""The clock of the asynchronous code: this machine's, or the virtual one of a simulation.

Code that `arealite.plan` simulates reads the time here instead of from `time`. `use` replaces the clock for the whole
process: nothing else that reads it may run meanwhile.
"""

import time as machine
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Seconds since the beginning of a simulation; None: the machine's clock.
_virtual: Callable[[], float] | None = None


def monotonic() -> float:
    """Return the seconds since some point in the past, as `time.monotonic`."""
    return machine.monotonic() if _virtual is None else _virtual()


def time() -> float:
    """Return the unix time, as `time.time`. A simulation begins at 0."""
    return machine.time() if _virtual is None else _virtual()


@contextmanager
def use(seconds: Callable[[], float]) -> Iterator[None]:
    """Let the code read this clock inside of the block."""
    global _virtual
    before, _virtual = _virtual, seconds
    try:
        yield
    finally:
        _virtual = before
