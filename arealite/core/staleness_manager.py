"""How many episodes may start, and what became of those that did.

Owned by `WorkflowExecutor`, which guards it with its lock. Admission follows the AReaL paper (arXiv 2505.24298): with B
episodes per batch, at weight version v no more than (η + v + 1)·B episodes may ever have been started that are still of use,
so that data consumed in order is never more than η versions old. `Lead` may hold generation back further. Rejected, failed and stale episodes free their place at once.
The counts are conserved: admitted = running + accepted + rejected + failed + stale, accepted = buffered + trained.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

UNLIMITED = 1 << 30
_FILLING_BATCHES = 2  # the first ones are always waited for
_NOTICEABLE_SHARE = 0.05
_CALM_BATCHES = 32
_TRIAL_BATCHES = 16
_LONGER = 1.1
_FORGET_BATCHES = 256


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

    With η alone a fast generator fills η batches and every sample waits until it is η versions old, for nothing. One more
    batch when the trainer had to wait; one fewer after a long time in which a whole batch was always left over. Where generation is what takes
    the time the trainer waits however far ahead it is: then one batch after the other is left out on trial, until steps take longer by it.
    """

    def __init__(self, max_staleness: int):
        self.max_staleness = max_staleness
        self.batches = min(1, max_staleness)
        self._num_batches = 0
        self._calm = 0
        self._forget()

    def _forget(self) -> None:
        self._limit = self.max_staleness
        self._window: list[tuple[float, float]] = []
        self._best_step_s = math.inf  # with more lead, while less is tried
        self._is_settled = self._limit <= 1

    def adapt(self, wait_s: float, step_s: float, has_spare_batch: bool) -> None:
        """After each batch: how long it was waited for, the time since the one before, and what is left."""
        self._num_batches += 1
        if self._num_batches <= _FILLING_BATCHES:
            return
        if self._num_batches % _FORGET_BATCHES == 0:
            self._forget()
        has_waited = wait_s > _NOTICEABLE_SHARE * step_s
        self._calm = self._calm + 1 if has_spare_batch and not has_waited else 0
        if self.batches == self._limit and not self._is_settled:
            self._window.append((wait_s, step_s))
            if len(self._window) == _TRIAL_BATCHES:
                self._review()
        elif has_waited:
            self.batches = min(self._limit, self.batches + 1)
        if self._calm == _CALM_BATCHES:
            self.batches, self._calm = max(min(1, self._limit), self.batches - 1), 0

    def _review(self) -> None:
        """At the limit for a while: leave one batch out if the trainer waits all the same, take it back if it was of use."""
        wait_s, step_s = map(statistics.median, zip(*self._window, strict=True))
        self._window = []
        if step_s > _LONGER * self._best_step_s:
            self._limit, self._is_settled = self._limit + 1, True
        elif wait_s > _NOTICEABLE_SHARE * step_s and self._limit > 1:
            self._limit -= 1
            self._best_step_s = min(self._best_step_s, step_s)
        else:
            self._is_settled = True
        self.batches = self._limit


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
