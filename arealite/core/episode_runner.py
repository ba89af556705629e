"""The event-loop thread that plays episodes. It knows nothing of batches or staleness: it starts, times out, checks and reports.

Used by `WorkflowExecutor`. Whatever a workflow does, each started episode is reported exactly once by `on_end`, on the loop's thread, together
with all that ended in the same turn of the loop; if the loop itself dies, `on_crash` is told.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from arealite.api.engine_api import InferenceEngine
from arealite.core.diagnosis import describe_wait
from arealite.core.episode import Episode, Trajectories, check_trajectories, episode_seed, own_copy
from arealite.core.event_loop import keep_running, new_event_loop
from arealite.core.waits import NamedWait
from arealite.core.worker_pool import WorkerPool

logger = logging.getLogger("arealite.executor")
T = TypeVar("T")
Ended = list[tuple[Episode, BaseException | None]]
_EAGER: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}


class EpisodeRunner:
    """One loop, one thread. `check` looks at a result before it is reported as good."""

    def __init__(
        self,
        engine: InferenceEngine,
        seed: int,
        timeout_s: float,
        check: Callable[[Episode, Trajectories], None],
        on_end: Callable[[Ended], None],
        on_crash: Callable[[BaseException], None],
    ):
        self.engine = engine
        self.seed = seed
        self.timeout_s = timeout_s
        self.pool: WorkerPool | None = None  # set: episodes run in processes of their own
        self.running: dict[Episode, None] = {}  # in order of start; guarded by the executor's lock
        self._check, self._on_end, self._on_crash = check, on_end, on_crash
        self._ended: Ended = []
        self._overdue: set[asyncio.Task] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.is_stopping = False
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="rollout", daemon=True)

    @property
    def thread_id(self) -> int | None:
        return self._thread.ident

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Cancel everything and end the thread; idempotent."""
        self.is_stopping = True
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout=10)

    def call_soon(self, work: Callable[[], None]) -> None:
        """Have the loop's thread do this (any thread)."""
        self.loop.call_soon_threadsafe(self._guarded, work)

    def _guarded(self, work: Callable[[], None]) -> None:
        """asyncio only logs what fails in a callback: episodes that were not booked would be waited for."""
        try:
            work()
        except BaseException as error:
            self._on_crash(error)
            raise

    def run_coroutine(self, coroutine: Coroutine[Any, Any, T], wait: NamedWait) -> T:
        """Run `coroutine` on the loop for another thread, which waits for its result."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            # a little more than it has itself: its own error says more than ours could
            return future.result(None if wait.left_s is None else wait.left_s + 2.0)
        except TimeoutError:
            if future.done():
                raise  # the coroutine's own error
            future.cancel()
            raise wait.error("no answer yet", "a server hangs or is very slow: see its log") from None

    def spawn(self, episode: Episode) -> None:
        """Start an episode that is already in `running` (loop thread)."""
        if self._timer is None:
            self._arm_deadline(episode)
        name = f"episode-{episode.id}" if episode.call is None else f"direct-{episode.id}"
        task = asyncio.Task(self._play(episode), loop=self.loop, name=name, **_EAGER)
        episode.task = None if task.done() else task

    async def _play(self, episode: Episode) -> None:
        data = {key: own_copy(value) for key, value in episode.data.items()}
        assert episode.workflow is not None
        if "seed" not in data:
            data["seed"] = episode_seed(self.seed, episode.id)
        try:
            if self.pool is None:
                result = await episode.workflow.arun_episode(self.engine, data)
            else:
                result = await self.pool.play(episode.workflow, data)
            if result is not None:
                episode.result = check_trajectories(result)
                self._check(episode, episode.result)
        except asyncio.CancelledError:
            if not self.is_stopping:
                self._end(episode, self._why_cancelled(episode))
            raise
        except BaseException as error:  # a workflow may raise anything: it costs its episode
            self._end(episode, error)
        else:
            self._end(episode, None)

    def _why_cancelled(self, episode: Episode) -> Exception:
        if time.monotonic() < episode.started_at + self.timeout_s:
            return RuntimeError("the workflow awaited something that was cancelled")
        return TimeoutError(f"no result within rollout.episode_timeout_s={self.timeout_s:g}")

    def _end(self, episode: Episode, error: BaseException | None) -> None:
        episode.task = None
        if self.is_stopping or episode.has_ended:
            return
        episode.has_ended = True
        if not self._ended:
            self.loop.call_soon(self._guarded, self._report)
        self._ended.append((episode, error))

    def _report(self) -> None:
        ended, self._ended = self._ended, []
        self._on_end(ended)

    def _arm_deadline(self, oldest: Episode) -> None:
        """All episodes have the same time-out, so one timer for the oldest serves them all."""
        delay_s = max(0.0, oldest.started_at + self.timeout_s - time.monotonic())
        self._timer = self.loop.call_later(delay_s, self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._timer = None
        now = time.monotonic()
        for episode in list(self.running):
            if now < episode.started_at + self.timeout_s:
                self._arm_deadline(episode)
                return
            if episode.task is not None:
                logger.error("%s: past its deadline", describe_wait(episode))
                self._cancel(episode, episode.task)

    def _cancel(self, episode: Episode, task: asyncio.Task) -> None:
        """Its place is free at once: the workflow may take long to clean up, or take no notice."""
        task.cancel()
        self._overdue.add(task)  # the loop itself does not keep it alive
        task.add_done_callback(self._overdue.discard)
        self._end(episode, self._why_cancelled(episode))

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            keep_running(self.loop)
            while not self.is_stopping:  # a workflow has stopped it
                keep_running(self.loop)
        except BaseException as error:  # the trainer must hear of it, or it waits for nothing
            self._on_crash(error)
            raise
        finally:
            self.is_stopping = True
            self._cancel_all()
            self.loop.close()

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
