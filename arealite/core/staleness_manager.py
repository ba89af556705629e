"""How many episodes may start, and what became of those that did.

Owned by `WorkflowExecutor`, which guards it with its lock. Admission follows the AReaL paper (arXiv 2505.24298): with B
episodes per batch, at weight version v no more than (η + v + 1)·B episodes may ever have been started that are still of use,
so that data consumed in order is never more than η versions old. `Lead` may hold generation back further. Rejected, failed and stale episodes free their place at once.
The counts are conserved: admitted = running + accepted + rejected + failed + stale, accepted = buffered + trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

UNLIMITED = 1 << 30
_FILLING_BATCHES = 2  # the first ones are always waited for
_WINDOW_BATCHES = 16
_NOTICEABLE_SHARE = 0.05
_WORTHWHILE = 0.7
_REST_BATCHES = 1024


@dataclass
class Counts:
    """Episodes by what became of them. `accepted` are the buffered and the trained ones."""

    admitted: int = 0
    running: int = 0
    accepted: int = 0
    trained: int = 0
    rejected: int = 0
    failed: int = 0
    stale: int = 0

    @property
    def buffered(self) -> int:
        return self.accepted - self.trained

    def check(self) -> None:
        """Nothing lost, nothing counted twice."""
        ended = self.accepted + self.rejected + self.failed + self.stale
        assert self.admitted == self.running + ended, f"episode counts do not add up: {self}"
        assert 0 <= self.trained <= self.accepted and self.running >= 0, (
            f"impossible counts: {self}"
        )


class Lead:
    """How many batches generation runs ahead: no more than keep the trainer busy, so that data is no older than it must be.

    With η alone a fast generator fills η batches and every sample waits until it is η versions old, for nothing. Twice as many when the trainer
    had to wait, on trial: where generation is what takes the time the trainer waits all the same, and the lead goes back, for a long time.
    One fewer when a whole batch was always left over.
    """

    def __init__(self, max_staleness: int):
        self.min_batches, self.max_batches = min(1, max_staleness), max_staleness
        self.batches = self.min_batches
        self._num_batches = -_FILLING_BATCHES
        self._window: list[tuple[float, float, bool]] = []
        self._before = (
            self.batches,
            0.0,
        )  # the lead, and the wait in its window, when a longer one went on trial
        self._may_grow = True

    def adapt(self, wait_s: float, step_s: float, has_spare_batch: bool) -> None:
        """After each batch: how long it was waited for, the time since the one before, and what is left."""
        self._num_batches += 1
        if self._num_batches > 0:
            self._window.append((wait_s, step_s, has_spare_batch))
        if len(self._window) == _WINDOW_BATCHES:
            self._review(*zip(*self._window, strict=True))
            self._window = []

    def _review(self, waits_s: Sequence[float], steps_s: Sequence[float], spare: Sequence[bool]):
        wait_s, (shorter, before_s) = sum(waits_s), self._before
        self._before = (self.batches, 0.0)
        if before_s and wait_s > _WORTHWHILE * before_s:
            self.batches, self._may_grow = shorter, False
        elif wait_s > _NOTICEABLE_SHARE * sum(steps_s):
            if self._may_grow and self.batches < self.max_batches:
                self._before = (self.batches, wait_s)
                self.batches = min(2 * self.batches, self.max_batches)
        elif all(spare):
            self.batches = max(self.min_batches, self.batches - 1)
        if self._num_batches % _REST_BATCHES == 0:
            self._may_grow = True  # things may have changed


class StalenessManager:
    """Admission control and accounting. Not thread-safe: its owner holds a lock."""

    def __init__(
        self,
        batch_size: int | None,
        max_staleness: int = 0,
        max_concurrent: int | None = None,
        lead: Lead | None = None,
    ):
        self.batch_size = batch_size  # None until the first batch tells
        self.max_staleness = max_staleness
        self.max_concurrent = max_concurrent
        self.lead = lead
        self.version = 0
        self.counts = Counts()

    @property
    def ahead(self) -> int:
        """Batches that generation may be ahead of training now."""
        return self.max_staleness if self.lead is None else self.lead.batches

    def capacity(self) -> int:
        """Episodes that may start now; negative when fewer are allowed than already run."""
        counts = self.counts
        if self.batch_size is None:
            by_version = concurrent = UNLIMITED
        else:
            allowed = (self.ahead + self.version + 1) * self.batch_size
            by_version = allowed - (counts.accepted + counts.running)
            concurrent = (self.max_staleness + 1) * self.batch_size
        if self.max_concurrent is not None:
            concurrent = self.max_concurrent
        return min(concurrent - counts.running, by_version)

    @property
    def oldest_allowed(self) -> int:
        """Samples with a token of a version before this one are stale."""
        return self.version - self.max_staleness

    def admit(self, count: int = 1) -> None:
        self.counts.admitted += count
        self.counts.running += count

    def accept(self) -> None:
        self.counts.running -= 1
        self.counts.accepted += 1

    def reject(self) -> None:
        self.counts.running -= 1
        self.counts.rejected += 1

    def fail(self) -> None:
        self.counts.running -= 1
        self.counts.failed += 1

    def drop_stale(self) -> None:
        """A buffered episode became too old."""
        self.counts.accepted -= 1
        self.counts.stale += 1

    def train(self, count: int) -> None:
        self.counts.trained += count

    def load_state_dict(self, state: dict[str, Any], num_buffered: int) -> None:
        """Take over the counts of a checkpoint. What ran when it was written runs again; what was buffered still is."""
        ended = state["counts"]
        trained, gone = ended["trained"], ended["rejected"] + ended["failed"] + ended["stale"]
        accepted = trained + num_buffered
        self.counts = Counts(
            **{**ended, "running": 0, "accepted": accepted, "admitted": accepted + gone}
        )
        self.version = state["version"]
