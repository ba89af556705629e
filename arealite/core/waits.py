"""`NamedWait`: a wait with a name and a deadline. `Demand`: what the trainer waits for.

Code that blocks creates a `NamedWait` and waits no longer than `left_s`. When it expires, `error` says what waits for
what, since when, and the likely cause. Used by the executor, the clients of inference servers and the controller.
"""

from typing import NamedTuple

from arealite.api.errors import WaitTimeout
from arealite.utils import clock


class Demand(NamedTuple):
    """The trainer waits for `finished` episodes, or until fewer than `queued` are queued."""

    finished: int
    queued: int


class NamedWait:
    """`who` waits for `what` until the deadline, which the option named `option` sets."""

    def __init__(self, who: str, what: str, timeout_s: float | None, option: str = ""):
        self.who = who
        self.what = what
        self.timeout_s = timeout_s
        self.option = option
        self.began = clock.monotonic()

    @property
    def waited_s(self) -> float:
        return clock.monotonic() - self.began

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline, at least 0; None without one."""
        return None if self.timeout_s is None else max(0.0, self.timeout_s - self.waited_s)

    @property
    def expired(self) -> bool:
        return self.timeout_s is not None and self.waited_s >= self.timeout_s

    def error(self, state: str, cause: str) -> WaitTimeout:
        """Return the error for an expired wait."""
        limit = f" (the deadline set by {self.option})" if self.option else ""
        return WaitTimeout(
            f"{self.who} has waited {self.waited_s:.1f} s{limit} for {self.what}.\n  Now: {state}\n"
            f"  Likely cause: {cause}"
        )
