"""Collects the spans of this process for the trace of a run: who did what, who waited for whom.

Any thread of any room may record; nothing is collected before `start`. `trainer.trace.Trace` takes the spans and writes
them. Rollout workers send theirs with their results. All times are `time.time()`, the clock that processes share.

Of the episodes only some are traced: at most `MAX_EPISODES` at once, and so many a second. Code that runs in a traced
episode records its parts with `part_of_episode`.
"""

import contextlib
import heapq
import time
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from arealite.utils.status.waits import waiting
from arealite.utils.trace.episode_clock import current_clock

Group = Literal["trainer", "weights", "server", "rollout"]
MAX_EPISODES = 32
_EPISODES_PER_S = 8.0
# Spans that nobody has taken; the oldest are dropped.
_MAX_SPANS = 20_000
# Waits below it are not worth a span.
SHORT_S = 0.001


class Span(NamedTuple):
    """Something that took `seconds`. Without `seconds` it is a sample of the numbers in `args`."""

    group: Group
    lane: str
    name: str
    began: float
    seconds: float | None
    args: dict[str, Any]
    # Inside of another span of the lane; several may overlap.
    is_part: bool = False


_spans: deque[Span] = deque(maxlen=_MAX_SPANS)
_is_on = False
# A heap: episodes fill the first lanes, so that a page shows them one below the other.
_free_lanes: list[int] = []
_allowance = (0.0, 0.0)
# The lane of the traced episode that this task belongs to.
_episode_lane: ContextVar[str | None] = ContextVar("episode_lane", default=None)


def start() -> None:
    """Collect spans from now on; nothing changes if they are collected."""
    global _is_on
    if _is_on:
        return
    _is_on = True
    _free_lanes[:] = range(MAX_EPISODES)


def stop() -> None:
    """Collect nothing any more, and forget what was collected."""
    global _is_on, _allowance
    _is_on, _allowance = False, (0.0, 0.0)
    _spans.clear()


def take() -> list[Span]:
    """Return what was collected since the last call."""
    taken = []
    # Other threads append meanwhile.
    with contextlib.suppress(IndexError):
        while True:
            taken.append(_spans.popleft())
    return taken


def add(spans: list[Span]) -> None:
    """Add spans of another process."""
    if _is_on:
        _spans.extend(spans)


def record(group: Group, lane: str, name: str, began: float, seconds: float, **args: Any) -> None:
    """Record a span that has ended. `began` is `time.time()`."""
    if _is_on:
        _spans.append(Span(group, lane, name, began, seconds, args))


def record_wait(group: Group, lane: str, name: str, seconds: float, **args: Any) -> None:
    """Record a wait that ends now, unless it was short."""
    if seconds >= SHORT_S:
        record(group, lane, name, time.time() - seconds, seconds, **args)


def count(group: Group, lane: str, **values: float | None) -> None:
    """Record the present values of some numbers."""
    if _is_on:
        known = {name: value for name, value in values.items() if value is not None}
        _spans.append(Span(group, lane, lane, time.time(), None, known))


@contextlib.contextmanager
def span(group: Group, lane: str, name: str, **args: Any) -> Iterator[None]:
    """Record the time that the block takes."""
    began, start_s = time.time(), time.perf_counter()
    try:
        yield
    finally:
        record(group, lane, name, began, time.perf_counter() - start_s, **args)


# ----------------------------------------------------------------------------------------------------- episodes


def begin_episode() -> str | None:
    """Return the lane of an episode that starts now; None if it is not traced. Called on the event loop."""
    global _allowance
    if not _is_on or not _free_lanes:
        return None
    now, (allowed, since) = time.monotonic(), _allowance
    allowed = min(float(MAX_EPISODES), allowed + _EPISODES_PER_S * (now - since)) if since else float(MAX_EPISODES)
    if allowed < 1:
        _allowance = allowed, now
        return None
    _allowance = allowed - 1, now
    return f"episodes {heapq.heappop(_free_lanes):02d}"


def end_episode(lane: str, name: str, began: float, seconds: float, **args: Any) -> None:
    """Record an episode that `begin_episode` gave a lane."""
    number = int(lane.rsplit(" ", 1)[1])
    if number not in _free_lanes:
        heapq.heappush(_free_lanes, number)
    record("rollout", lane, name, began, seconds, **args)


def enter_episode(lane: str | None) -> None:
    """Let this task and those that it starts belong to the episode in `lane`."""
    _episode_lane.set(lane)


@contextlib.contextmanager
def part_of_episode(name: str, **args: Any) -> Iterator[None]:
    """Count the block as a part of this task's episode, and record a span if it is traced."""
    lane, clock = _episode_lane.get(), current_clock()
    began, start_s = time.time(), time.perf_counter()
    if clock is not None:
        clock.enter(name)
    try:
        with _waiting(name, args):
            yield
    finally:
        if clock is not None:
            clock.leave(name)
        if lane is not None and _is_on:
            _spans.append(Span("rollout", lane, name, began, time.perf_counter() - start_s, args, is_part=True))


def _waiting(name: str, args: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Name the part of an episode for the status of this process."""
    whom = (str(args["server"]),) if "server" in args else ()
    return waiting(name, str(args.get("tool") or args.get("reward") or ""), whom)  # type: ignore[arg-type]
