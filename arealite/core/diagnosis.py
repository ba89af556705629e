"""Error messages of the executor: why a wait expired or can never end, and why episodes fail."""

import logging
import os
import re
import sys
import traceback
from types import FrameType
from typing import Any

from arealite.api.errors import TrainingError
from arealite.core.episode import Episode, EpisodeId
from arealite.core.event_loop import keep_running
from arealite.core.staleness_manager import Counts, StalenessManager
from arealite.utils import clock
from arealite.utils.console import show_message
from arealite.utils.text import clean, format_error

logger = logging.getLogger("arealite.executor")
_MAX_TEXT = 10_000
_STDLIB = os.path.dirname(os.__file__)


def describe(error: BaseException) -> str:
    """Return type and message of an error as clean text; long messages are cut.

    An error that cannot be printed is named by its type.
    """
    try:
        text = clean(f"{type(error).__name__}: {error}")
        return text if len(text) < _MAX_TEXT else f"{text[:_MAX_TEXT]} …"
    except BaseException as second:
        return f"{type(error).__name__}, which raises {type(second).__name__} when it is printed"


class FailureStreak:
    """Counts failed episodes since the last good one, and keeps the first error."""

    def __init__(self, limit: int):
        self.limit = limit
        self.count = 0
        self.total = 0
        self.first: BaseException | None = None
        self._next_warning = 1

    def end(self) -> None:
        """An episode succeeded: start counting again."""
        self.count = 0

    def add(self, episode_id: EpisodeId, error: BaseException) -> TrainingError | None:
        """Log a failure; returns the error that stops the run if there were too many."""
        # Only the first tracebacks of a streak are new.
        logger.error("episode %s failed: %s", episode_id, format_error(error) if self.count < 3 else describe(error))
        if self.count == 0:
            self.first = error
        self.count += 1
        self.total += 1
        # The first failure, then each time the total has grown four times: many failures print few lines.
        if self.total >= self._next_warning and self.count < self.limit:
            self._next_warning = 4 * self.total
            streak = f", the last {self.count} in a row" if self.count > 1 else ""
            start = f"{self.total} episodes failed so far{streak}"
            if self.total == 1:
                start = "an episode failed, and its row is left out"
            show_message(f"warning: {start}: {describe(error)} (more in the log)")
        if self.count < self.limit:
            return None
        fatal = TrainingError(
            f"{self.count} episodes in a row failed (rollout.max_failed_episodes). The first cause was "
            f"{describe(self.first or error)}\nThe log has its traceback."
        )
        fatal.__cause__ = self.first
        return fatal


class RejectionStreak:
    """Warns, and in the end raises, if all episodes are rejected: there would never be a batch.

    All rows of the data are tried, `epoch_rows` (0: not known), but at least `least` and at most 16 times as many.
    """

    def __init__(self, before: Counts, least: int, epoch_rows: int, first_warning: int):
        self._before, self._epoch_rows = before, epoch_rows
        self._limit = max(least, min(epoch_rows, 16 * least))
        self._next_warning = first_warning

    def check(self, now: Counts) -> None:
        rejected, failed = now.rejected - self._before.rejected, now.failed - self._before.failed
        # Buffered episodes that become stale meanwhile were accepted before.
        num_accepted = now.accepted + now.stale - self._before.accepted - self._before.stale
        if num_accepted or rejected <= min(self._next_warning, self._limit):
            return
        every = ", including every row of the data" if rejected > self._epoch_rows > 0 else ""
        text = f"{rejected} episodes in a row were rejected by the workflow{every}" + (
            f", and {failed} have failed" if failed else ""
        )
        cause = (
            "the workflow's filter rejects everything, or with dynamic sampling no prompt has answers of different "
            "reward"
        )
        if rejected > self._limit:
            raise TrainingError(
                f"{text}: {cause}. Look at the answers (`arealite dashboard`), and use easier or harder data, more "
                "n_samples, or dynamic_sampling=false"
            )
        self._next_warning = 2 * rejected
        show_message(f"warning: {text}, and none was accepted: {cause}. The run stops after {self._limit}")


def describe_wait(episode: Episode) -> str:
    """Describe where a running episode waits: its innermost line outside asyncio."""
    place = "an unknown place"
    awaited: Any = episode.task.get_coro() if episode.task is not None else None
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        if "/asyncio/" not in frame.f_code.co_filename:
            place = _place(frame)
        awaited = awaited.cr_await
    return f"{_name(episode)} waits in {place}"


def describe_block(thread_id: int | None) -> str | None:
    """Describe the code that blocks the loop's thread, if any, by not awaiting."""
    top = sys._current_frames().get(thread_id or 0)
    if top is None:
        return None
    stack = [frame for frame, _ in traceback.walk_stack(top)]
    loop_depths = [i for i, frame in enumerate(stack) if frame.f_code is keep_running.__code__]
    inside = stack[: loop_depths[0]] if loop_depths else []
    busy = [frame for frame in inside if not re.search(r"/asyncio/|/selectors\.py", _file(frame))]
    if not busy:
        return None
    user_frames = (f for f in busy if not _file(f).startswith(_STDLIB))
    episodes = (frame.f_locals.get("episode") for frame in busy)
    name = next((_name(e) for e in episodes if isinstance(e, Episode)), "a task that a workflow started")
    return f"{name} blocks all other episodes in {_place(next(user_frames, busy[0]))}, which does not await"


def _name(episode: Episode) -> str:
    return f"episode {episode.id}, started {clock.monotonic() - episode.started_at:.0f} s ago,"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({_file(frame)}:{frame.f_lineno})"


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def diagnose(
    staleness: StalenessManager,
    num_finished: int,
    num_queued: int,
    oldest: Episode | None,
    is_paused: bool,
    thread_id: int | None,
) -> tuple[str, str]:
    """Return the executor's state and the likely cause of an expired wait."""
    counts = staleness.counts
    state = (
        f"{num_finished} finished, {counts.running} running, {num_queued} queued, {counts.rejected} rejected, "
        f"{counts.failed} failed, {counts.stale} stale; version {staleness.version}"
    )
    if is_paused:
        return state, "the executor is paused: call resume()"
    block = describe_block(thread_id)
    if block is not None:
        return state, block
    if oldest is not None:
        return state, f"{describe_wait(oldest)}. If that is a generation, see the server's log"
    if counts.rejected > counts.accepted:
        return state, "the workflow rejects most episodes"
    return state, f"admission allows {staleness.capacity()} more episodes at this version"


def explain_deadlock(staleness: StalenessManager, num_finished: int, num_queued: int, wanted: int, who: str) -> str:
    """Explain why a wait can never end: nothing runs and nothing may start."""
    counts = staleness.counts
    have = f"{num_finished} of {wanted} episodes are finished, none runs, {num_queued} are queued"
    if num_queued:
        return (
            f"{who} can never return: {have}, and the staleness limit admits no more at version {staleness.version} "
            f"({counts.accepted} accepted, batch size {staleness.batch_size}, max_head_offpolicyness "
            f"{staleness.max_staleness}). Was update_weights or set_version forgotten after the last step?"
        )
    return (
        f"{who} can never return: {have}, and nothing more was submitted ({counts.rejected} rejected, "
        f"{counts.failed} failed, {counts.stale} stale)"
    )
