"""How many episodes may start, and what became of those that did.

Owned by `WorkflowExecutor`, which guards it with its lock. Admission follows the AReaL paper (arXiv 2505.24298): with B
episodes per batch, at weight version v no more than (η + v + 1)·B episodes may ever have been started that are still of use,
so that data consumed in order is never more than η versions old. `Lead` may hold generation back further. Rejected, failed and stale episodes free their place at once.
The counts are conserved: admitted = running + accepted + rejected + failed + stale, accepted = buffered + trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, NamedTuple

UNLIMITED = 1 << 30
_FILLING_BATCHES = 2  # the first ones are always waited for
_NOTICEABLE = 0.05  # of the time


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
        assert 0 <= self.trained <= self.accepted and self.running >= 0, f"impossible counts: {self}"


class _Rules(NamedTuple):
    """How a longer lead is tried: over how many batches, what part of the waiting it must end, and how long not again if it did not."""

    window: int
    gain: float
    rest: int


_FIRST, _LATER = _Rules(4, 0.5, 128), _Rules(16, 0.3, 1024)


class _Trial(NamedTuple):
    """The shorter lead: how long a batch was waited for with it, and how long the trainer then worked."""

    batches: int
    wait_s: float
    work_s: float

    def paid(self, wait_s: float, work_s: float, gain: float) -> bool:
        """Was the waiting ended, and not paid for by a trainer that more generation beside it slows down?"""
        saved_s = self.wait_s - wait_s
        return saved_s >= gain * self.wait_s and work_s - self.work_s <= saved_s / 2


class Lead:
    """How many batches generation runs ahead: no more than keep the trainer busy, so that data is no older than it must be.

    With η alone a fast generator fills η batches and every sample waits until it is η versions old, for nothing. When the trainer had to wait, a longer
    lead goes on trial: at first, after few batches, as long as would end the waiting if it were for something that more episodes do not slow down (a
    judge, a tool); it stays if that halves the waiting, does not slow the trainer's work down, and still helps after many batches. Later ones are twice as long and must end three tenths of it. Where
    generation is what takes the time the trainer waits all the same, or works more slowly beside it, and the lead goes back, for a long time. One fewer when
    a whole batch was always left over.
    """

    def __init__(self, max_staleness: int):
        self.min_batches, self.max_batches = min(1, max_staleness), max_staleness
        self.batches = self.min_batches
        self._to_skip = _FILLING_BATCHES
        self._to_rest = 0  # batches until a longer lead may be tried again
        self._window: list[tuple[float, float, bool]] = []  # waited, worked, whole batch left over
        self._trial: _Trial | None = None
        self._rules = _FIRST

    def adapt(self, wait_s: float, step_s: float, has_spare_batch: bool) -> None:
        """After each batch: how long it was waited for, the time since the one before, and what is left."""
        self._to_rest = max(0, self._to_rest - 1)
        if self._to_skip:
            self._to_skip -= 1
            return
        self._window.append((wait_s, step_s - wait_s, has_spare_batch))
        if len(self._window) == self._rules.window:
            waits_s, works_s, spare = zip(*self._window, strict=True)
            self._window = []
            # a step with an evaluation or a checkpoint in it says nothing of the others
            self._review(mean(waits_s), median(works_s), all(spare))

    def _review(self, wait_s: float, work_s: float, had_spare_batch: bool) -> None:
        trial, rules, self._trial = self._trial, self._rules, None
        if trial is not None:
            self._rules = _LATER
        if trial is not None and not trial.paid(wait_s, work_s, rules.gain):
            self._to_rest = rules.rest
            self._change(trial.batches)
        elif trial is not None and rules is _FIRST:
            self._trial = trial  # the few batches may have been lucky: once more, over many
        elif wait_s > _NOTICEABLE * (wait_s + work_s):
            if self.batches < self.max_batches and not self._to_rest:
                self._trial = _Trial(self.batches, wait_s, work_s)
                enough = math.ceil((self.batches + 1) * (1 + wait_s / max(work_s, 1e-6))) - 1
                longer = enough if self._rules is _FIRST else 2 * self.batches
                self._change(min(longer, self.max_batches))
        elif had_spare_batch:
            self._change(max(self.min_batches, self.batches - 1))

    def _change(self, batches: int) -> None:
        """What was under way with the other lead says nothing about this one."""
        if batches != self.batches:
            self._to_skip = max(batches, self.batches)
            self.batches = batches


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
        self.counts = Counts(**{**ended, "running": 0, "accepted": accepted, "admitted": accepted + gone})
        self.version = state["version"]
