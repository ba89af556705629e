"""What the executor says when it cannot go on: what waits for what, since when, the likely cause."""

from __future__ import annotations

import time
from typing import Any

from arealite.core.episode import Episode
from arealite.core.staleness_manager import StalenessManager


def describe_wait(episode: Episode) -> str:
    """Where a running episode hangs (its innermost line outside asyncio), for the message of an expired wait."""
    place = "a place unknown"
    awaited: Any = episode.task.get_coro() if episode.task is not None else None
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        if "/asyncio/" not in frame.f_code.co_filename:
            place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        awaited = awaited.cr_await
    waited_s = time.monotonic() - episode.started_at
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
