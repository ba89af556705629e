"""Admission of episodes by staleness, and counts of what became of them.

`WorkflowExecutor` owns a `StalenessManager` and guards it with its lock. Admission follows the AReaL paper (arXiv
2505.24298): with B episodes per batch, at weight version v at most (η + v + 1)·B episodes may have been started that
are still usable, so that data consumed in order is at most η versions old. `Lead` may limit generation further.
Rejected, failed and stale episodes make room at once. The counts always add up: admitted = running + accepted +
rejected + failed + stale, and accepted = buffered + trained.
"""

import math
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, NamedTuple

from arealite.utils import clock
from arealite.utils.trace import tracing

UNLIMITED = 1 << 30
# The trainer always waits for the first batches.
_FILLING_BATCHES = 2
# A share of time in which the trainer waits that is worth shortening.
_NOTICEABLE = 0.05
# A trial whose margin is below this share of a step may end otherwise in another run: predictions err as much.
_CLOSE = 0.1


@dataclass
class Counts:
    """Episodes by state. `accepted` episodes are buffered or trained."""

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
        """Assert that no episode is lost or counted twice."""
        ended = self.accepted + self.rejected + self.failed + self.stale
        assert self.admitted == self.running + ended, f"episode counts do not add up: {self}"
        assert 0 <= self.trained <= self.accepted and self.running >= 0, f"impossible counts: {self}"


class _Rules(NamedTuple):
    """How a longer lead is tried.

    The trial lasts `window` batches and must save a share `gain` of the waiting time. If it does not, no other trial
    follows for `rest` batches.
    """

    window: int
    gain: float
    rest: int


_FIRST, _LATER = _Rules(4, 0.5, 128), _Rules(16, 0.3, 1024)


class _Trial(NamedTuple):
    """The shorter lead that a trial is compared with: waiting and working time per batch."""

    batches: int
    wait_s: float
    work_s: float

    def margin_s(self, wait_s: float, work_s: float, gain: float) -> float:
        """Return by how much the longer lead is better than it must be; negative if it is not good enough.

        It must save a share `gain` of the waiting time, and lose less than half of what it saves by slower work.
        """
        saved_s = self.wait_s - wait_s
        return min(saved_s - gain * self.wait_s, saved_s / 2 - (work_s - self.work_s))


class Lead:
    """Decides how many batches generation runs ahead: just enough to keep the trainer busy.

    With the limit η alone a fast generator fills η batches, and every sample waits until it is η versions old. If the
    trainer had to wait, a longer lead goes on trial. The first trial, after a few batches, is as long as would end the
    waiting if more episodes at once took no longer (they wait for a judge or a tool). It stays if it halves the waiting
    time, does not slow the trainer's work down, and still helps after many batches. Later trials are twice as long and
    must save 30%. If generation itself is the bottleneck the trial fails, and the lead stays as it was for a long time.
    The lead becomes one batch shorter when a whole batch was always left over.
    """

    def __init__(self, max_staleness: int):
        self.min_batches, self.max_batches = min(1, max_staleness), max_staleness
        self.batches = self.min_batches
        self._to_skip = _FILLING_BATCHES
        # Batches until a longer lead may be tried again.
        self._to_rest = 0
        # For each batch: seconds waited, seconds worked, whether a whole batch was left over.
        self._window: list[tuple[float, float, bool]] = []
        self._trial: _Trial | None = None
        self._rules = _FIRST
        # The two leads of the last trial if its margin was small (`_CLOSE`).
        self.close: tuple[int, int] | None = None

    def adapt(self, wait_s: float, step_s: float, has_spare_batch: bool) -> None:
        """Call after each batch, with the time waited for it and the time since the batch before."""
        self._to_rest = max(0, self._to_rest - 1)
        if self._to_skip:
            self._to_skip -= 1
            return
        self._window.append((wait_s, step_s - wait_s, has_spare_batch))
        if len(self._window) == self._rules.window:
            waits_s, works_s, spare = zip(*self._window, strict=True)
            self._window = []
            # The median ignores steps with an evaluation or a checkpoint.
            self._review(mean(waits_s), median(works_s), all(spare))

    def _review(self, wait_s: float, work_s: float, had_spare_batch: bool) -> None:
        trial, rules, self._trial = self._trial, self._rules, None
        margin_s = 0.0
        if trial is not None:
            self._rules = _LATER
            margin_s = trial.margin_s(wait_s, work_s, rules.gain)
            is_close = abs(margin_s) < _CLOSE * (trial.wait_s + trial.work_s)
            self.close = (trial.batches, self.batches) if is_close else None
        if trial is not None and margin_s < 0:
            self._to_rest = rules.rest
            self._change(trial.batches)
        elif trial is not None and rules is _FIRST:
            # The few batches may have been lucky: compare once more, over many.
            self._trial = trial
        elif wait_s > _NOTICEABLE * (wait_s + work_s):
            if self.batches < self.max_batches and not self._to_rest:
                self._trial = _Trial(self.batches, wait_s, work_s)
                enough = math.ceil((self.batches + 1) * (1 + wait_s / max(work_s, 1e-6))) - 1
                longer = enough if self._rules is _FIRST else 2 * self.batches
                self._change(min(longer, self.max_batches))
        elif had_spare_batch:
            self._change(max(self.min_batches, self.batches - 1))

    def _change(self, batches: int) -> None:
        """Set the lead and skip batches that were generated under the one before."""
        if batches != self.batches:
            self._to_skip = max(batches, self.batches)
            self.batches = batches


class FixedLead(Lead):
    """A lead that does not adapt. Episodes may still become as old as the limit allows."""

    def __init__(self, batches: int, max_staleness: int):
        super().__init__(max_staleness)
        self.batches = min(batches, max_staleness)

    def adapt(self, wait_s: float, step_s: float, has_spare_batch: bool) -> None:
        pass


class StalenessManager:
    """Controls admission and keeps the counts. Not thread-safe: its owner holds a lock."""

    def __init__(
        self,
        batch_size: int | None,
        max_staleness: int = 0,
        max_concurrent: int | None = None,
        lead: Lead | None = None,
    ):
        # None until the first batch is known.
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.max_concurrent = max_concurrent
        self.lead = lead
        self.version = 0
        self.counts = Counts()
        # Since when no episode may start, and why; for the trace.
        self._full: tuple[float, str] | None = None

    @property
    def ahead(self) -> int:
        """Batches that generation may currently be ahead of training."""
        return self.max_staleness if self.lead is None else self.lead.batches

    def capacity(self) -> int:
        """Return how many episodes may start now; negative if more run than are allowed."""
        return min(self._capacities())

    def _capacities(self) -> tuple[int, int]:
        """Return how many episodes may start now by the limit of concurrency, and by that of staleness."""
        counts = self.counts
        if self.batch_size is None:
            by_version = concurrent = UNLIMITED
        else:
            allowed = (self.ahead + self.version + 1) * self.batch_size
            by_version = allowed - (counts.accepted + counts.running)
            concurrent = (self.max_staleness + 1) * self.batch_size
        if self.max_concurrent is not None:
            concurrent = self.max_concurrent
        return concurrent - counts.running, by_version

    @property
    def oldest_allowed(self) -> int:
        """The oldest version of a token in a sample that is not stale."""
        return self.version - self.max_staleness

    def admit(self, count: int = 1) -> None:
        if count and self._full is not None:
            since, reason = self._full
            tracing.record_wait("trainer", "admission", reason, clock.monotonic() - since)
            self._full = None
        self.counts.admitted += count
        self.counts.running += count
        concurrent, by_version = self._capacities()
        if min(concurrent, by_version) <= 0 and self._full is None:
            limit = "staleness" if by_version <= concurrent else "concurrency"
            self._full = clock.monotonic(), f"wait: {limit} limit"

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
        """Count a buffered episode that became too old."""
        self.counts.accepted -= 1
        self.counts.stale += 1

    def train(self, count: int) -> None:
        self.counts.trained += count

    def load_state_dict(self, state: dict[str, Any], num_buffered: int) -> None:
        """Restore the counts of a checkpoint; episodes that ran at that time run again."""
        ended = state["counts"]
        trained, gone = ended["trained"], ended["rejected"] + ended["failed"] + ended["stale"]
        accepted = trained + num_buffered
        self.counts = Counts(**{**ended, "running": 0, "accepted": accepted, "admitted": accepted + gone})
        self.version = state["version"]
