"""What the executor says when it cannot go on: what waits for what, since when, the likely cause; why all episodes fail."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from types import FrameType
from typing import Any

from arealite.api.errors import TrainingError
from arealite.core.episode import Episode
from arealite.core.event_loop import keep_running
from arealite.core.staleness_manager import Counts, StalenessManager
from arealite.utils.console import tell

logger = logging.getLogger("arealite.executor")
_MAX_TEXT = 10_000
_STDLIB = os.path.dirname(os.__file__)


def describe(error: BaseException) -> str:
    """Its type and words. One of a user's own may fail to print itself, or hold a whole web page: whoever books it must not suffer from it."""
    try:
        text = f"{type(error).__name__}: {error}"
        return text if len(text) < _MAX_TEXT else f"{text[:_MAX_TEXT]} …"
    except BaseException as second:
        return f"{type(error).__name__}, which raises {type(second).__name__} when it is printed"


class FailureStreak:
    """Failed episodes without a good one between them. The first cause is what a person wants to hear: the rest often follow from it."""

    def __init__(self, limit: int):
        self.limit = limit
        self.count = 0
        self.total = 0
        self.first: BaseException | None = None
        self._total_told = 0

    def end(self) -> None:
        self.count = 0

    def add(self, episode_id: int, error: BaseException) -> TrainingError | None:
        """Log a failure; the error to stop the run with when there were too many."""
        trace = error if self.count < 3 else None  # the rest tells nothing new
        logger.error("episode %d failed: %s", episode_id, describe(error), exc_info=trace)
        if self.count == 0:
            self.first = error
        self.count += 1
        self.total += 1
        if self.count == 3 and self.total >= 2 * self._total_told:  # a few lines, however many fail
            self._total_told = self.total
            told = f"3 episodes in a row failed, {self.total} so far"
            tell(f"warning: {told}: {describe(error)} (more in the log)")
        if self.count < self.limit:
            return None
        fatal = TrainingError(
            f"{self.count} episodes in a row failed (rollout.max_failed_episodes). The first cause was {describe(self.first or error)}\n"
            "The log has its traceback."
        )
        fatal.__cause__ = self.first
        return fatal


def refuse_if_all_rejected(before: Counts, now: Counts, limit: int) -> None:
    """A workflow that only ever returns None would be asked for ever."""
    rejected = now.rejected - before.rejected
    if rejected > limit and now.accepted == before.accepted:
        raise TrainingError(
            f"{rejected} episodes in a row were rejected (arun_episode returned None), every row of the data among them: the filter "
            "of the workflow lets nothing pass, or with dynamic sampling no prompt has answers of different reward"
        )


def describe_wait(episode: Episode) -> str:
    """Where a running episode hangs (its innermost line outside asyncio), for the message of an expired wait."""
    place = "a place unknown"
    awaited: Any = episode.task.get_coro() if episode.task is not None else None
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        if "/asyncio/" not in frame.f_code.co_filename:
            place = _place(frame)
        awaited = awaited.cr_await
    return f"{_name(episode)} waits in {place}"


def describe_block(thread_id: int | None) -> str | None:
    """What the loop's thread does instead of waiting for events, if it does: code that does not await holds up all episodes, whoever's it is."""
    top = sys._current_frames().get(thread_id or 0)
    if top is None:
        return None
    stack = [frame for frame, _ in traceback.walk_stack(top)]
    turning = [i for i, frame in enumerate(stack) if frame.f_code is keep_running.__code__]
    inside = stack[: turning[0]] if turning else []
    busy = [frame for frame in inside if not re.search(r"/asyncio/|/selectors\.py", _file(frame))]
    if not busy:
        return None
    written_by_user = (f for f in busy if not _file(f).startswith(_STDLIB))
    episodes = (frame.f_locals.get("episode") for frame in busy)
    who = next((_name(e) for e in episodes if isinstance(e, Episode)), "a task that a workflow started")  # fmt: skip
    return f"{who} holds up all others in {_place(next(written_by_user, busy[0]))}, which does not await"


def _name(episode: Episode) -> str:
    return f"episode {episode.id}, started {time.monotonic() - episode.started_at:.0f} s ago,"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({_file(frame)}:{frame.f_lineno})"


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def diagnose(
    staleness: StalenessManager,
    num_finished: int,
    num_queued: int,
    oldest: Episode | None,
    paused: bool,
    thread_id: int | None,
) -> tuple[str, str]:
    """The state of things and why a wait may have expired."""
    counts = staleness.counts
    state = (
        f"{num_finished} finished, {counts.running} running, {num_queued} queued, {counts.rejected} rejected, "
        f"{counts.failed} failed, {counts.stale} stale; version {staleness.version}"
    )
    if paused:
        return state, "the executor is paused: call resume()"
    block = describe_block(thread_id)
    if block is not None:
        return state, block
    if oldest is not None:
        return state, f"{describe_wait(oldest)}. If that is a generation, see the server's log"
    if counts.rejected > counts.accepted:
        return state, "the workflow rejects most episodes"
    return state, f"admission allows {staleness.capacity()} more episodes at this version"


def stuck(staleness: StalenessManager, num_finished: int, num_queued: int, wanted: int, who: str) -> str:
    """Why a wait can never end: nothing runs and nothing may start."""
    counts = staleness.counts
    have = f"{num_finished} of {wanted} episodes are finished, none runs, {num_queued} are queued"
    if num_queued:
        return (
            f"{who} can never return: {have}, and the staleness rule admits no more at version {staleness.version} "
            f"({counts.accepted} accepted, batch size {staleness.batch_size}, max_head_offpolicyness "
            f"{staleness.max_staleness}). Was update_weights or set_version forgotten after the last step?"
        )
    return (
        f"{who} can never return: {have}, and nothing more was submitted ({counts.rejected} rejected, "
        f"{counts.failed} failed, {counts.stale} stale)"
    )
