"""Runs episodes: thousands at once on one event-loop thread, handing finished ones to the trainer as batches.

The trainer's thread calls `submit`, `wait`, `prepare_batch` and `rollout_batch`; the loop's thread admits queued episodes whenever the
staleness rule allows (`StalenessManager`), runs them and wakes the trainer when it has what it waits for. Guarantees: nothing polls; results
come oldest first; no sample older than η versions is handed out; an episode that raises costs itself only, and when all fail the
trainer gets the first cause; every wait has a deadline. With η = 0 a batch is that of a plain loop over the same rows.
"""

from __future__ import annotations

import gc
import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ServerError, TrainingError
from arealite.api.io_struct import Batch
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.book import Book
from arealite.core.diagnosis import FailureStreak, describe, diagnose, refuse_if_all_rejected, stuck
from arealite.core.episode import DirectCall, Episode, Trajectories, check_trajectories, join_trajectories
from arealite.core.episode_runner import Ended, EpisodeRunner
from arealite.core.ledger import Ledger
from arealite.core.row_stream import RowStream
from arealite.core.staleness_manager import Lead, StalenessManager
from arealite.core.waits import NamedWait

logger = logging.getLogger("arealite.executor")
T = TypeVar("T")

# Ids of submitted episodes begin here; those of `prepare_batch` are positions in the stream of rows.
MANUAL_IDS = 1 << 40


class WorkflowExecutor:
    """One per job, on rank 0. `engine` is what workflows generate with."""

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
        self.seed = seed
        self.book = Book(ledger, config.dump_rollouts)
        self.staleness = StalenessManager(batch_size, config.max_head_offpolicyness, config.max_concurrent_rollouts)
        self._lock = threading.Condition()  # guards staleness, _finished, _running, _calls
        self._pending: deque[Episode] = deque()
        self._direct: deque[Episode] = deque()
        self._finished: list[tuple[int, Episode]] = []  # heap, oldest first
        # Joined already. Each tensor freed gives up the interpreter's lock, so the thread that made them frees them:
        # the trainer would have to win it back from a busy loop hundreds of times per batch.
        self._spent: list[list[Episode]] = []
        self._next_manual_id = MANUAL_IDS
        self._next_direct_id = 0
        # After `load_state_dict`: which calls of `submit`, counted from 0 over the whole run, the caller must make again.
        self.to_submit_again: list[int] = []
        self._stream: RowStream | None = None
        # state to go on from, until the dataloader is known
        self._resume: dict[str, Any] | None = None
        self._left_out: set[int] = set()  # rows that the stream does not give out again
        self._is_new_run = True
        self._needed = 0  # finished episodes the trainer waits for; 0 when it does not wait
        self._low_water = -1  # with fewer queued, the trainer wants to queue more
        self._paused = False
        self._wake_pending = False
        self._failures = FailureStreak(config.max_failed_episodes)
        self._fatal: BaseException | None = None
        self._last_hand_over = time.monotonic()
        self.runner = EpisodeRunner(
            engine, seed, config.episode_timeout_s, self._check_weights, self._ended, self._crashed
        )

    # ------------------------------------------------------------------------------- the trainer's side

    def start(self) -> None:
        if not gc.get_freeze_count():
            # Torch's objects, very many: the collector would go through them again and again between episodes.
            gc.collect()
            gc.freeze()
        self.runner.start()

    def abandon(self) -> None:
        """Start nothing more, and take no notice of episodes that end from now on: the run is over."""
        self._paused = True
        self.runner.is_stopping = True

    def stop(self) -> None:
        """Cancel all episodes, end the loop, write the ledger; idempotent."""
        self.runner.stop()
        self.book.finish()

    def run_coroutine(self, coroutine: Coroutine[Any, Any, T], wait: NamedWait) -> T:
        """Run one of the engine's own coroutines on the loop and return its result."""
        return self.runner.run_coroutine(coroutine, wait)

    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Queue one episode; it starts as soon as the staleness rule allows.

        A checkpoint keeps what has ended, not the rows of what has not: after a resume the caller, who alone has them,
        submits those in `to_submit_again` again.
        """
        self._enqueue(self._next_manual_id, data, workflow)
        self._next_manual_id += 1

    def _enqueue(self, episode_id: int, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        self._raise_fatal()
        if self._is_new_run:
            self._is_new_run = False
            self.book.open_new()
        self._pending.append(Episode(episode_id, data, workflow))
        self._wake()

    def wait(self, count: int, timeout_s: float | None = None) -> Batch:
        """The oldest `count` finished episodes as one batch."""
        self.staleness.lead = None  # whoever submits decides how far to run ahead
        limit = self.config.batch_timeout_s if timeout_s is None else timeout_s
        wait = NamedWait("wait", f"{count} episodes", limit, "its timeout_s")
        return self._collect(count, wait, lambda: None, patience_s=0.0)

    def prepare_batch(self, dataloader: Iterable[list[dict[str, Any]]], workflow: RolloutWorkflow) -> Batch:
        """The next training batch, while further episodes keep running up to the staleness limit."""
        stream = self._open_stream(dataloader)
        if self.staleness.batch_size is None:
            self.staleness.batch_size = stream.batch_size()
        if self.staleness.lead is None and self.config.adaptive_lead:
            self.staleness.lead = Lead(self.staleness.max_staleness)
        count = self.staleness.batch_size
        stream.require(count)
        before, patience = replace(self.staleness.counts), self.config.max_failed_episodes * count

        def top_up() -> None:
            refuse_if_all_rejected(before, self.staleness.counts, max(patience, stream.epoch_rows))
            # rows beyond what may start now, so that generation never waits for the trainer's thread
            with self._lock:
                wanted = max(0, self.staleness.capacity()) + 2 * count
            while len(self._pending) < wanted:
                episode_id, row = stream.next_row()
                self._enqueue(episode_id, row, workflow)

        self._low_water = count
        wait = NamedWait("prepare_batch", f"{count} episodes", self.config.batch_timeout_s, "rollout.batch_timeout_s")
        began, last = wait.began, self._last_hand_over
        # stragglers that would be too old for the next batch may hold this one up for as long as the last step took
        batch = self._collect(count, wait, top_up, patience_s=began - last)
        if self.staleness.lead is not None:
            step_s, has_spare = self._last_hand_over - last, len(self._finished) >= count
            self.staleness.lead.adapt(self.book.last_batch["wait_s"], step_s, has_spare)
        return batch

    def _open_stream(self, dataloader: Iterable[list[dict[str, Any]]]) -> RowStream:
        if self._stream is None or self._stream.dataloader is not dataloader:
            first = 0 if self._stream is None else self._stream.position
            if self._resume is not None:
                first = self._resume["stream_start"]
            self._stream = RowStream(dataloader, first)
            if self._resume is not None:
                self._stream.seek(self._resume["position"], self._left_out)
                self._resume = None
        return self._stream

    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> Batch:
        """Run these rows now, whatever the staleness rule says, and return them in their order.

        Rejected and failed rows are left out; if none is left, the first error is raised.
        """
        self._raise_fatal()
        call = DirectCall(remaining=len(data))
        first = self._next_direct_id
        self._direct.extend(Episode(first + i, row, workflow, call) for i, row in enumerate(data))
        self._next_direct_id += len(data)
        self._wake()
        option = "rollout.batch_timeout_s"
        wait = NamedWait("rollout_batch", f"{len(data)} episodes", self.config.batch_timeout_s, option)
        with self._lock:
            while call.remaining and self._fatal is None:
                if wait.expired:
                    raise wait.error(*self._diagnosis())
                self._lock.wait(wait.left_s)
        self._raise_fatal()
        if not call.results:
            cause = call.errors[0] if call.errors else None
            told = describe(cause) if cause else "all were rejected"
            raise TrainingError(f"none of {len(data)} episodes gave a result; first cause: {told}") from cause
        done = sorted(call.results.items())
        return join_trajectories([episode_id for episode_id, _ in done], [result for _, result in done])

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake()

    def set_version(self, version: int) -> None:
        with self._lock:
            self.staleness.version = version
        self._wake()

    def stats(self) -> dict[str, float]:
        """Counts over the run, and lag, waiting time and reward of the last batch."""
        with self._lock:
            counts = self.staleness.counts
            now = {"queued": len(self._pending), "buffered": counts.buffered, **asdict(counts)}
            now |= {"lead": self.staleness.ahead, "version": self.staleness.version}
            return {**now, **self.book.stats()}

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands between two steps, as JSON; buffered trajectories go to the ledger.

        Every row before `position` and those in `done` have ended; all others, less the buffered ones, run again. `manual`
        says the same of submitted episodes.
        """
        with self._lock:
            counts = asdict(self.staleness.counts)
            finished = [e for _, e in sorted(self._finished, key=lambda item: item[0])]
            others = [e for e in (*self._pending, *self.runner.running) if e.call is None]
        version = self.staleness.version
        if self.book.ledger is not None:
            pairs = [(e.id, e.result.batch) for e in finished if e.result]
            self.book.ledger.save_buffer(version, pairs)
        unfinished = {e.id for e in (*finished, *others)}
        manual = {i for i in unfinished if i >= MANUAL_IDS}
        start = pulled = 0
        if self._stream is not None:
            start, pulled = self._stream.first_id, self._stream.position
        elif self._resume is not None:
            start, pulled = self._resume["stream_start"], self._resume["position"]
        return {
            "version": version,
            "counts": counts,
            "stream_start": start,
            **_ended(pulled, unfinished - manual, self._left_out),
            "manual": {"next_id": self._next_manual_id, **_ended(self._next_manual_id, manual)},
            "next_direct_id": self._next_direct_id,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; before the first episode."""
        if not self._is_new_run:
            raise TrainingError("load_state_dict comes before the first episode")
        self._is_new_run = False
        version = state["version"]
        # checkpoints of earlier releases know nothing of submitted episodes
        manual = {"next_id": MANUAL_IDS, "position": MANUAL_IDS, "done": []} | state.get("manual", {})
        self._next_manual_id = manual["next_id"]
        self._next_direct_id = state.get("next_direct_id", 0)
        ended = {*state["done"], *manual["done"]}

        def has_ended(i: int) -> bool:
            return i in ended or i < (state if i < MANUAL_IDS else manual)["position"]

        buffered: list[tuple[int, Batch]] = []
        if self.book.ledger is not None:
            buffered = self.book.ledger.rewind(version, has_ended)
        with self._lock:
            self.staleness.load_state_dict(state, len(buffered))
            for episode_id, batch in buffered:
                episode = Episode(episode_id, {}, None, start_version=version)
                episode.result = check_trajectories(batch)
                heapq.heappush(self._finished, (episode_id, episode))
                self.book.note(episode, "buffered")
        ended.update(i for i, _ in buffered)
        self._left_out = {i for i in ended if i < MANUAL_IDS}
        self._resume = state
        known = range(manual["position"], manual["next_id"])
        self.to_submit_again = [i - MANUAL_IDS for i in known if i not in ended]
        if self.to_submit_again:
            logger.warning(
                "%d episodes had been submitted and had not ended at the checkpoint; only the caller has their rows, and must "
                "submit them again (calls of submit, from 0: %s; all are in executor.to_submit_again)",
                len(self.to_submit_again),
                self.to_submit_again[:8],
            )

    # --------------------------------------------------------------------------------------- collecting

    def _collect(self, count: int, wait: NamedWait, top_up: Callable[[], None], patience_s: float) -> Batch:
        while True:
            top_up()
            with self._lock:
                dropped = self._drop_stale()
                enough = len(self._finished) >= count
                held = wait.waited_s < patience_s and self._has_straggler()
                if enough and not held:
                    episodes = [heapq.heappop(self._finished)[1] for _ in range(count)]
                    self.staleness.train(count)
                    break
                if not dropped:
                    patience_left_s = patience_s - wait.waited_s if enough else None
                    self._wait_for_progress(count, wait, patience_left_s)
            self._raise_fatal()
            if dropped:
                self._wake()
        batch = self.book.hand_over(episodes, self.staleness.version, wait.waited_s)
        self._last_hand_over = time.monotonic()
        self._spent.append(episodes)
        del episodes
        if not self.runner.is_stopping:
            self._wake()
        return batch

    def _has_straggler(self) -> bool:
        """Whether an episode still runs that the next batch could not take any more (lock held).

        By the admission rule all of them fit into this batch, so waiting for them starves nobody.
        """
        oldest = next((e for e in self.runner.running if e.call is None), None)
        return oldest is not None and oldest.start_version <= self.staleness.oldest_allowed

    def _wait_for_progress(self, count: int, wait: NamedWait, hold_s: float | None) -> None:
        """Sleep (lock held) until there are `count` results, too few queued rows, an error, or a deadline."""
        if self._fatal is not None:
            return
        if wait.expired:
            raise wait.error(*self._diagnosis())
        none_runs = self.staleness.counts.running == 0 and not self._paused
        if none_runs and (not self._pending or self.staleness.capacity() <= 0):
            finished, queued = len(self._finished), len(self._pending)
            raise TrainingError(stuck(self.staleness, finished, queued, count, wait.who))
        limits = [s for s in (wait.left_s, hold_s) if s is not None]
        self._needed = count
        try:
            self._lock.wait(min(limits, default=None))
        finally:
            self._needed = 0

    def _drop_stale(self) -> int:
        """Remove finished episodes that became too old (lock held); they are replaced by new ones."""
        limit = self.staleness.oldest_allowed
        stale = [e for _, e in self._finished if e.result and e.result.oldest_version < limit]
        for episode in stale:
            self.staleness.drop_stale()
            self.book.close(episode, "stale")
        if stale:
            gone = set(stale)
            self._finished = [item for item in self._finished if item[1] not in gone]
            heapq.heapify(self._finished)
        return len(stale)

    # ---------------------------------------------------------------------------------- the loop's side

    def _wake(self) -> None:
        """Have the loop look at its queues; one call per burst crosses the threads."""
        if not self._wake_pending:
            self._wake_pending = True
            self.runner.call_soon(self._admit)

    def _admit(self) -> None:
        self._wake_pending = False
        self._spent.clear()
        while self._direct and self._fatal is None:
            episode = self._direct.popleft()
            with self._lock:
                self.runner.running[episode] = None
            self._start(episode)
        if self._paused or self._fatal is not None or not self._pending:
            return
        with self._lock:
            count = max(0, min(self.staleness.capacity(), len(self._pending)))
            self.staleness.admit(count)
            starting = [self._pending.popleft() for _ in range(count)]
            self.runner.running.update(dict.fromkeys(starting))
        for episode in starting:
            self._start(episode)

    def _start(self, episode: Episode) -> None:
        episode.start_version = self.staleness.version
        episode.started_at = time.monotonic()
        if episode.call is None:
            self.book.note(episode, "running")
        self.runner.spawn(episode)

    def _check_weights(self, episode: Episode, result: Trajectories) -> None:
        """Tokens far older than the weights an episode started under mean that a server missed an update."""
        behind = episode.start_version - result.oldest_version
        if behind > self.staleness.max_staleness:
            raise ServerError(
                f"episode {episode.id} started under version {episode.start_version} but has tokens of version "
                f"{result.oldest_version}: a server missed a weight update, or the workflow fills in wrong versions"
            )

    def _ended(self, ended: Ended) -> None:
        """Book what ended in one turn of the loop: lock once, wake once, then start others in their place."""
        with self._lock:
            for episode, error in ended:
                self.runner.running.pop(episode, None)
                if episode.call is not None:
                    self._ended_directly(episode, episode.call, error)
                elif error is not None:
                    self._failed(episode, error)
                else:
                    self._failures.end()
                    self._accept_or_reject(episode)
            self._notify_if_due()
        self._admit()

    def _accept_or_reject(self, episode: Episode) -> None:
        if episode.result is None:
            self.staleness.reject()
            self.book.close(episode, "rejected", reason="the workflow returned None")
        else:
            self.staleness.accept()
            heapq.heappush(self._finished, (episode.id, episode))
            self.book.note(episode, "buffered")

    def _ended_directly(self, episode: Episode, call: DirectCall, error: Any) -> None:
        if error is not None:
            logger.error("episode direct-%d failed", episode.id, exc_info=error)
            call.errors.append(error)
        elif episode.result is not None:
            call.results[episode.id] = episode.result
        call.remaining -= 1
        if call.remaining == 0:
            self._lock.notify_all()

    def _failed(self, episode: Episode, error: BaseException) -> None:
        self.staleness.fail()
        self.book.close(episode, "failed", reason=describe(error))
        too_many = self._failures.add(episode.id, error)
        if too_many is not None and self._fatal is None:
            self._fatal = too_many
            self._lock.notify_all()

    def _notify_if_due(self) -> None:
        if not self._needed:
            return
        # also when nothing runs any more: then the trainer looks why
        if (
            len(self._finished) >= self._needed
            or len(self._pending) < self._low_water
            or self.staleness.counts.running == 0
        ):
            self._lock.notify_all()

    def _diagnosis(self) -> tuple[str, str]:
        oldest = next(iter(self.runner.running), None)
        numbers = (len(self._finished), len(self._pending))
        return diagnose(self.staleness, *numbers, oldest, self._paused, self.runner.thread_id)

    def _crashed(self, error: BaseException) -> None:
        with self._lock:
            self._fatal = TrainingError(f"the rollout thread ended: {type(error).__name__}: {error}")
            self._fatal.__cause__ = error
            self._lock.notify_all()

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal


def _ended(next_id: int, unfinished: set[int], before: Collection[int] = ()) -> dict[str, Any]:
    """Ids less than `next_id`, and those ended `before` a resume, less the `unfinished` ones, as `state_dict` names them."""
    position = min({next_id, *unfinished})
    done = {*range(position, next_id), *before} - unfinished
    return {"position": position, "done": sorted(i for i in done if i >= position)}
