"""What the threads and episodes of this process wait for now, and how long their last waits took.

Code that may wait long says so with `waiting`. That costs a dict entry while the wait is open. `describe` groups equal
waits, because tens of thousands of episodes may wait for the same server. `describe_completed` tells waits that are
slow from those that never end.
"""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

Kind = Literal[
    "batch", "data", "share", "collective", "publish", "load", "call", "generate", "server", "reward", "tool",
    "environment",
]  # fmt: skip
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


class Completed(NamedTuple):
    """Waits of one kind that have ended: number, mean of the last durations, end of the last one."""

    count: int
    mean_s: float
    last: float


# Weight of the newest duration in the mean.
_NEWEST = 0.2
_open: dict[int, Wait] = {}
_completed: dict[str, Completed] = {}
_numbers = itertools.count()
# Collectives of this process so far: ranks that wait in different ones wait for each other.
_num_collectives = 0


@contextmanager
def waiting(
    kind: Kind, what: str, whom: Sequence[str] = (), deadline_s: float | None = None, began: float | None = None
) -> Iterator[None]:
    """Name what is waited for in this block, since `began` (`time.monotonic()`) or now."""
    number, thread = next(_numbers), threading.current_thread().name
    began = began or time.monotonic()
    _open[number] = Wait(kind, what, tuple(whom), began, deadline_s, thread)
    try:
        yield
    finally:
        _open.pop(number, None)
        _count(kind, began)


def _count(kind: str, began: float) -> None:
    now, before = time.monotonic(), _completed.get(kind)
    mean_s = now - began if before is None else before.mean_s + _NEWEST * (now - began - before.mean_s)
    _completed[kind] = Completed(1 if before is None else before.count + 1, mean_s, now)


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


def describe_completed() -> dict[str, dict[str, Any]]:
    """Return, by kind, how many waits have ended, how long they took, and when the last one ended."""
    now = time.monotonic()
    return {
        kind: {"count": done.count, "mean_s": round(done.mean_s, 3), "age_s": round(now - done.last, 3)}
        for kind, done in list(_completed.items())
    }
