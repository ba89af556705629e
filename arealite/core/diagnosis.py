"""What the executor says when it cannot go on: what waits for what, since when, the likely cause; why all episodes fail."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from typing import Any

from arealite.api.errors import TrainingError
from arealite.core.episode import Episode
from arealite.core.staleness_manager import Counts, StalenessManager
from arealite.utils.console import tell

logger = logging.getLogger("arealite.executor")


class FailureStreak:
    """Failed episodes without a good one between them. The first cause is what a person wants to hear: the rest often follow from it."""

    def __init__(self, limit: int):
        self.limit = limit
        self.count = 0
        self.first: BaseException | None = None

    def end(self) -> None:
        self.count = 0

    def add(self, episode_id: int, error: BaseException) -> TrainingError | None:
        """Log a failure; the error to stop the run with when there were too many."""
        trace = error if self.count < 3 else None  # the rest tells nothing new
        logger.error("episode %d failed: %r", episode_id, error, exc_info=trace)
        if self.count == 0:
            self.first = error
        self.count += 1
        if self.count == 3:
            tell(f"warning: 3 episodes in a row failed: {error!r} (more in the log)")
        if self.count < self.limit:
            return None
        fatal = TrainingError(
            f"{self.count} episodes in a row failed (rollout.max_failed_episodes). The first cause was "
            f"{type(self.first).__name__}: {self.first}\nThe log has its traceback."
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
    waited_s = time.monotonic() - episode.started_at
    for top in sys._current_frames().values():
        inside = [frame for frame, _ in traceback.walk_stack(top)]
        if getattr(awaited, "cr_frame", None) in inside:
            place = f"{top.f_code.co_qualname} ({top.f_code.co_filename}:{top.f_lineno})"
            return f"episode {episode.id}, started {waited_s:.0f} s ago, holds up all others in {place}, which does not await"
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        if "/asyncio/" not in frame.f_code.co_filename:
            place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        awaited = awaited.cr_await
    return f"episode {episode.id}, started {waited_s:.0f} s ago, waits in {place}"


def diagnose(
    staleness: StalenessManager,
    num_finished: int,
    num_queued: int,
    oldest: Episode | None,
    paused: bool,
) -> tuple[str, str]:
    """The state of things and why a wait may have expired."""
    counts = staleness.counts
    state = (
        f"{num_finished} finished, {counts.running} running, {num_queued} queued, {counts.rejected} rejected, "
        f"{counts.failed} failed, {counts.stale} stale; version {staleness.version}"
    )
    if paused:
        return state, "the executor is paused: call resume()"
    if oldest is not None:
        return state, f"{describe_wait(oldest)}. If that is a generation, see the server's log"
    if counts.rejected > counts.accepted:
        return state, "the workflow rejects most episodes"
    return state, f"admission allows {staleness.capacity()} more episodes at this version"


def stuck(
    staleness: StalenessManager, num_finished: int, num_queued: int, wanted: int, who: str
) -> str:
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
