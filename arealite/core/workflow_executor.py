"""`WorkflowExecutor`: runs episodes asynchronously and returns finished ones as batches.

Thousands of episodes run at once on one event-loop thread. The trainer's thread calls `submit`, `wait`, `prepare_batch`
and `rollout_batch`. The loop's thread starts queued episodes whenever the staleness limit allows (`StalenessManager`)
and wakes the trainer when its batch is ready. Guarantees: nothing polls; batches are filled oldest first; no returned
sample is older than η versions; an exception in a workflow fails that episode only, and if all fail the trainer gets
the first cause; every wait has a deadline. With η = 0 batches equal those of a plain loop over the same rows.
"""

import gc
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ServerError, TrainingError
from arealite.api.io_struct import Batch
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.diagnosis import FailureStreak, RejectionStreak, describe, diagnose, explain_deadlock
from arealite.core.episode import DirectCall, Episode, EpisodeId, FinishedEpisodes, check_trajectories
from arealite.core.episode_runner import Ended, EpisodeRunner
from arealite.core.ledger.accounts import EpisodeAccounts
from arealite.core.ledger.store import Ledger
from arealite.core.resume import ResumeState
from arealite.core.staleness_manager import Lead, StalenessManager
from arealite.core.waits import Demand, NamedWait
from arealite.utils import clock
from arealite.utils.text import format_error

logger = logging.getLogger("arealite.executor")
T = TypeVar("T")
Rows = list[dict[str, Any]]
Task = Callable[[], None] | None


class WorkflowExecutor:
    """Runs the episodes of one job, on rank 0. Workflows generate with `engine`."""

    def __init__(
        self,
        config: InferenceEngineConfig,
        engine: InferenceEngine,
        batch_size: int | None = None,
        seed: int = 1,
        ledger: Ledger | None = None,
    ):
        self.config = config
        self.engine = engine
        self.accounts = EpisodeAccounts(ledger, config.dump_rollouts, config.max_dump_tokens)
        self.staleness = StalenessManager(batch_size, config.max_head_offpolicyness, config.max_concurrent_rollouts)
        self.resume_state = ResumeState()
        self.runner = EpisodeRunner(
            engine, seed, config.episode_timeout_s, self._admit, self._check_versions, self._on_end, self._on_crash
        )
        # Guards `staleness`, `_finished`, `runner.running` and the fields of direct calls.
        self._lock = threading.Condition()
        self._pending: deque[Episode] = deque()
        # Direct calls with episodes that have not started.
        self._direct_calls: list[DirectCall] = []
        self._finished = FinishedEpisodes()
        # Episodes already joined. Freeing a tensor releases the GIL, so the loop's thread frees them: the trainer's
        # thread would have to win the GIL back from a busy loop hundreds of times per batch.
        self._to_free: list[list[Episode]] = []
        # None while the trainer does not wait.
        self._demand: Demand | None = None
        self._is_paused = False
        self._failures = FailureStreak(config.max_failed_episodes)
        self._fatal: BaseException | None = None
        self._last_batch_at = clock.monotonic()

    # ------------------------------------------------------------------------------- trainer's thread

    def start(self) -> None:
        if not gc.get_freeze_count():
            # Exempt torch's many objects from garbage collection, which would scan them between episodes.
            gc.collect()
            gc.freeze()
        self.runner.thread.start()

    def abandon(self) -> None:
        """Start no more episodes and ignore those that end from now on: the run is over."""
        self._is_paused = True
        self.runner.is_stopping = True

    def stop(self) -> None:
        """Cancel all episodes, end the loop and close the ledger; idempotent."""
        self.runner.stop()
        self.accounts.finish()

    def run_coroutine(self, coroutine: Coroutine[Any, Any, T], wait: NamedWait) -> T:
        """Run one of the engine's coroutines on the loop and return its result."""
        return self.runner.run_coroutine(coroutine, wait)

    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Queue one episode; it starts as soon as the staleness limit allows.

        A checkpoint does not store rows. After a resume the caller submits those listed in `to_submit_again` again.
        """
        self._enqueue(self.resume_state.next_submitted(), data, workflow)

    @property
    def to_submit_again(self) -> list[int]:
        """After a resume: which calls of `submit`, counted from 0 over the whole run, the caller must repeat."""
        return self.resume_state.to_submit_again

    def _enqueue(self, episode_id: EpisodeId, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        self._raise_fatal()
        if self.resume_state.is_new_run:
            self.resume_state.is_new_run = False
            # Direct episodes of this process, if there are any, have already replaced those of an earlier run.
            self.accounts.clear("stream", "submitted", *(() if self.resume_state.num_direct else ("direct",)))
        self._pending.append(Episode(episode_id, data, workflow))
        self.runner.request_admission()

    def wait(self, count: int, timeout_s: float | None = None) -> Batch:
        """Return the oldest `count` finished episodes as one batch."""
        # The caller of `submit` decides how far to run ahead.
        self.staleness.lead = None
        limit = self.config.batch_timeout_s if timeout_s is None else timeout_s
        wait = NamedWait("wait", f"{count} episodes", limit, "its timeout_s")
        return self._collect(Demand(count, 0), wait, lambda: None, patience_s=0.0)

    def prepare_batch(self, dataloader: Iterable[Rows], workflow: RolloutWorkflow, meanwhile: Task = None) -> Batch:
        """Return the next training batch; `meanwhile` is called after its episodes were queued."""
        stream = self.resume_state.open_stream(dataloader)
        if self.staleness.batch_size is None:
            self.staleness.batch_size = stream.batch_size()
        if self.staleness.lead is None and self.config.adaptive_lead:
            self.staleness.lead = Lead(self.staleness.max_staleness)
        stream.require(count := self.staleness.batch_size)
        max_rejected, before = self.config.max_failed_episodes * count, replace(self.staleness.counts)
        rejections = RejectionStreak(before, max_rejected, stream.epoch_rows, first_warning=4 * count)

        def fill_queue() -> None:
            rejections.check(self.staleness.counts)
            # More rows than may start now, so that generation never waits for the trainer's thread.
            with self._lock:
                wanted = max(0, self.staleness.capacity()) + 2 * count
            while len(self._pending) < wanted:
                number, row = stream.next_row()
                self._enqueue(EpisodeId("stream", number), row, workflow)

        if meanwhile is not None:
            fill_queue()
            meanwhile()
        wait = NamedWait("prepare_batch", f"{count} episodes", self.config.batch_timeout_s, "rollout.batch_timeout_s")
        last = self._last_batch_at
        # Stragglers that would be too old for the next batch may delay this one for as long as the last step took.
        batch = self._collect(Demand(count, count), wait, fill_queue, patience_s=wait.began - last)
        if self.staleness.lead is not None:
            step_s, has_spare = self._last_batch_at - last, len(self._finished) >= count
            self.staleness.lead.adapt(self.accounts.last_batch["wait_s"], step_s, has_spare)
        return batch

    def rollout_batch(self, data: Rows, workflow: RolloutWorkflow) -> Batch:
        """Run these rows now, regardless of the staleness limit, and return the results in their order.

        Rejected and failed rows are left out; if none is left, the first error is raised.
        """
        call = self.start_direct(data, workflow)
        self.wait_direct(call, "rollout_batch")
        return call.join()

    def start_direct(self, data: Rows, workflow: RolloutWorkflow, max_running: int | None = None) -> DirectCall:
        """Start these rows, at most `max_running` at once, and return without waiting for them."""
        self._raise_fatal()
        if self.resume_state.is_new_run and not self.resume_state.num_direct:
            self.accounts.clear("direct")
        call = DirectCall(self.staleness.version, max_running)
        call.add(Episode(self.resume_state.next_direct(), row, workflow, call) for row in data)
        with self._lock:
            self._direct_calls.append(call)
        self.runner.request_admission()
        return call

    def wait_direct(self, call: DirectCall, who: str) -> None:
        """Wait until all episodes of a call have ended, and record them."""
        what, option = f"{len(call.episodes)} episodes", "rollout.batch_timeout_s"
        wait = NamedWait(who, what, self.config.batch_timeout_s, option)
        with self._lock:
            # The trainer waits now: nothing has to be left for its batches.
            call.max_running = None
            if call.pending:
                self.runner.request_admission()
            if not self._lock.wait_for(lambda: not call.remaining or self._fatal is not None, wait.left_s):
                raise wait.error(*self._diagnosis())
        self._raise_fatal()
        self.accounts.close_direct(call)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.runner.request_admission()

    def set_version(self, version: int) -> None:
        with self._lock:
            self.staleness.version = version
        self.runner.request_admission()

    def stats(self) -> dict[str, float]:
        """Return counts over the run, and lag, waiting time and reward of the last batch."""
        with self._lock:
            counts = self.staleness.counts
            now = {"queued": len(self._pending), "buffered": counts.buffered, **asdict(counts)}
            now |= {"lead": self.staleness.ahead, "version": self.staleness.version}
            return {**now, **self.accounts.stats()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two steps as JSON; trajectories of buffered episodes go to the ledger."""
        with self._lock:
            counts = asdict(self.staleness.counts)
            finished = self._finished.in_order()
            others = [e for e in (*self._pending, *self.runner.running) if e.call is None]
        version = self.staleness.version
        if self.accounts.ledger is not None:
            self.accounts.ledger.save_buffer(version, [(e.id, e.result.batch) for e in finished if e.result])
        unfinished = (e.id for e in (*finished, *others))
        return {"version": version, "counts": counts, **self.resume_state.state_dict(unfinished)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; call it before the first episode."""
        self.resume_state.load_state_dict(state)
        version = state["version"]
        ledger = self.accounts.ledger
        buffered = [] if ledger is None else ledger.rewind(version, self.resume_state.has_ended)
        with self._lock:
            self.staleness.load_state_dict(state, len(buffered))
            for episode_id, batch in buffered:
                episode = Episode(episode_id, {}, None, start_version=version, result=check_trajectories(batch))
                self._finished.push(episode)
                self.accounts.record(episode, "buffered")
        self.resume_state.skip_buffered(episode_id for episode_id, _ in buffered)

    # ------------------------------------------------------------------------- collecting one batch

    def _collect(self, demand: Demand, wait: NamedWait, fill_queue: Callable[[], None], patience_s: float) -> Batch:
        while True:
            fill_queue()
            with self._lock:
                num_stale = self._drop_stale()
                has_enough = len(self._finished) >= demand.finished
                is_delayed = wait.waited_s < patience_s and self._has_straggler()
                if has_enough and not is_delayed:
                    episodes = self._finished.pop_oldest(demand.finished)
                    self.staleness.train(demand.finished)
                    break
                if not num_stale:
                    self._wait_for_progress(demand, wait, patience_s - wait.waited_s if has_enough else None)
            self._raise_fatal()
            if num_stale:
                self.runner.request_admission()
        batch = self.accounts.close_batch(episodes, self.staleness.version, wait.waited_s)
        self._last_batch_at = clock.monotonic()
        self._to_free.append(episodes)
        del episodes
        if not self.runner.is_stopping:
            self.runner.request_admission()
        return batch

    def _has_straggler(self) -> bool:
        """Whether this batch should wait for an episode that is too old for the next one (lock held).

        Two versions older: it hangs. One version older: it may have begun during an update, with newer tokens only.
        """
        ages = (e.start_version - self.staleness.oldest_allowed for e in self.runner.running if e.call is None)
        return next((age for age in ages if age >= -1), 1) <= 0

    def _wait_for_progress(self, demand: Demand, wait: NamedWait, patience_left_s: float | None) -> None:
        """Sleep (lock held) until the demand is met, an error, or a deadline."""
        if self._fatal is not None:
            return
        if wait.expired:
            raise wait.error(*self._diagnosis())
        is_idle = self.staleness.counts.running == 0 and not self._is_paused
        if is_idle and (not self._pending or self.staleness.capacity() <= 0):
            sizes = len(self._finished), len(self._pending), demand.finished
            raise TrainingError(explain_deadlock(self.staleness, *sizes, wait.who))
        limits = [s for s in (wait.left_s, patience_left_s) if s is not None]
        self._demand = demand
        try:
            self._lock.wait(min(limits, default=None))
        finally:
            self._demand = None

    def _drop_stale(self) -> int:
        """Remove finished episodes that became too old (lock held); new ones replace them."""
        stale = self._finished.pop_stale(self.staleness.oldest_allowed)
        for episode in stale:
            self.staleness.drop_stale()
            self.accounts.close(episode, "stale")
        return len(stale)

    # --------------------------------------------------------------------------------- loop's thread

    def _admit(self) -> None:
        """Start direct episodes, and as many others as the staleness limit allows."""
        self._to_free.clear()
        if self._direct_calls and self._fatal is None:
            with self._lock:
                starting = [episode for call in self._direct_calls for episode in call.take_startable()]
                self._direct_calls = [call for call in self._direct_calls if call.pending]
                self.runner.running.update(dict.fromkeys(starting))
            for episode in starting:
                self._start(episode)
        if self._is_paused or self._fatal is not None or not self._pending:
            return
        with self._lock:
            count = max(0, min(self.staleness.capacity(), len(self._pending)))
            self.staleness.admit(count)
            starting = [self._pending.popleft() for _ in range(count)]
            self.runner.running.update(dict.fromkeys(starting))
        for episode in starting:
            self._start(episode)

    def _start(self, episode: Episode) -> None:
        episode.start_version, episode.started_at = self.staleness.version, clock.monotonic()
        if episode.call is None:
            self.accounts.record(episode, "running")
        self.runner.spawn(episode)

    def _check_versions(self, episode: Episode, oldest_version: int) -> None:
        """Raise if tokens are far older than the weights an episode started under: a server missed an update."""
        if episode.start_version - oldest_version > self.staleness.max_staleness:
            raise ServerError(
                f"episode {episode.id} started under version {episode.start_version} but has tokens of version "
                f"{oldest_version}: a server missed a weight update, or the workflow fills in wrong versions"
            )

    def _on_end(self, ended: Ended) -> None:
        """Record what ended in one iteration of the loop: lock once, notify once, then start others instead."""
        with self._lock:
            for episode, error in ended:
                self.runner.running.pop(episode, None)
                if episode.call is not None:
                    self._end_direct(episode, episode.call, error)
                elif error is not None:
                    self._fail(episode, error)
                else:
                    self._failures.end()
                    self._accept_or_reject(episode)
            self._notify_trainer()
        self._admit()

    def _accept_or_reject(self, episode: Episode) -> None:
        self.resume_state.report(episode)
        if episode.result is None:
            self.staleness.reject()
            self.accounts.close(episode, "rejected", reason="the workflow rejected it")
        else:
            self.staleness.accept()
            self._finished.push(episode)
            self.accounts.record(episode, "buffered")

    def _end_direct(self, episode: Episode, call: DirectCall, error: BaseException | None) -> None:
        if error is not None:
            logger.error("episode %s failed: %s", episode.id, format_error(error))
            call.reasons[episode.id.number] = describe(error)
            call.first_error = call.first_error or error
        call.remaining -= 1
        if call.remaining == 0:
            self._lock.notify_all()

    def _fail(self, episode: Episode, error: BaseException) -> None:
        self.staleness.fail()
        self.accounts.close(episode, "failed", reason=describe(error))
        too_many = self._failures.add(episode.id, error)
        if too_many is not None and self._fatal is None:
            self._fatal = too_many
            self._lock.notify_all()

    def _notify_trainer(self) -> None:
        """Wake the trainer if its demand is met (lock held)."""
        demand = self._demand
        if demand is None:
            return
        # Also if nothing runs any more: then the trainer finds out why.
        is_idle = self.staleness.counts.running == 0
        if is_idle or len(self._finished) >= demand.finished or len(self._pending) < demand.queued:
            self._lock.notify_all()

    def _diagnosis(self) -> tuple[str, str]:
        oldest = next(iter(self.runner.running), None)
        sizes = len(self._finished), len(self._pending)
        return diagnose(self.staleness, *sizes, oldest, self._is_paused, self.runner.thread.ident)

    def _on_crash(self, error: BaseException) -> None:
        with self._lock:
            self._fatal = TrainingError(f"the rollout thread ended: {type(error).__name__}: {error}")
            self._fatal.__cause__ = error
            self._lock.notify_all()

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal
