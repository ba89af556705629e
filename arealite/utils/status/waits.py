"""What the threads and episodes of this process wait for now.

Code that may wait long says so with `waiting`. That costs a dict entry while the wait is open. `describe` groups equal
waits, because tens of thousands of episodes may wait for the same server.
"""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

Kind = Literal[
    "batch", "share", "collective", "publish", "load", "call", "generate", "server", "reward", "tool", "environment"
]
# Groups of equal waits that a status holds, the oldest first.
MAX_GROUPS = 30


class Wait(NamedTuple):
    """An open wait: what for, and for which processes (names, server addresses, or `ranks`)."""

    kind: str
    what: str
    whom: tuple[str, ...]
    began: float
    deadline_s: float | None
    thread: str


_open: dict[int, Wait] = {}
_numbers = itertools.count()
# Collectives of this process so far: ranks that wait in different ones wait for each other.
_num_collectives = 0


@contextmanager
def waiting(
    kind: Kind, what: str, whom: Sequence[str] = (), deadline_s: float | None = None, began: float | None = None
) -> Iterator[None]:
    """Name what is waited for in this block, since `began` (`time.monotonic()`) or now."""
    number, thread = next(_numbers), threading.current_thread().name
    _open[number] = Wait(kind, what, tuple(whom), began or time.monotonic(), deadline_s, thread)
    try:
        yield
    finally:
        _open.pop(number, None)


@contextmanager
def collective(name: str) -> Iterator[None]:
    """Name a collective operation, with its number among those of this rank."""
    global _num_collectives
    _num_collectives += 1
    with waiting("collective", f"{name} #{_num_collectives}", ("ranks",)):
        yield


def describe() -> list[dict[str, Any]]:
    """Return the open waits: equal ones as one entry with their number and the age of the oldest."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    # Copied at once: other threads change it.
    for wait in list(_open.values()):
        groups.setdefault((wait.kind, wait.what, wait.whom, wait.deadline_s, wait.thread), []).append(wait.began)
    now = time.monotonic()
    entries = [
        {
            "kind": kind,
            "what": what,
            "whom": list(whom),
            "deadline_s": deadline_s,
            "thread": thread,
            "count": len(began),
            "age_s": round(now - min(began), 3),
        }
        for (kind, what, whom, deadline_s, thread), began in groups.items()
    ]
    return sorted(entries, key=lambda entry: -entry["age_s"])[:MAX_GROUPS]
