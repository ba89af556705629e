"""`EpisodeRunner`: the event-loop thread that runs episodes.

Owned by `WorkflowExecutor`; it knows nothing of batches or staleness. It starts episodes, cancels those past their
deadline, checks results and reports: each started episode is passed to `on_end` exactly once, on the loop's thread,
together with all that ended in the same iteration of the loop, whatever the workflow does. If the loop itself fails,
`on_crash` gets the error.
"""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from arealite.api.engine_api import InferenceEngine
from arealite.core.diagnosis import describe_wait
from arealite.core.episode import Episode, copy_containers
from arealite.core.event_loop import keep_running, new_event_loop
from arealite.core.waits import NamedWait
from arealite.core.worker_pool import WorkerPool
from arealite.utils import clock
from arealite.utils.request_log import use_log
from arealite.utils.seeds import derive_seed
from arealite.utils.status.waits import waiting
from arealite.utils.trace import tracing
from arealite.utils.trace.episode_clock import EpisodeClock, use_clock

logger = logging.getLogger("arealite.executor")
T = TypeVar("T")
Ended = list[tuple[Episode, BaseException | None]]
_EAGER: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}


class EpisodeRunner:
    """One event loop on one thread. Callbacks run on that thread.

    `admit` starts queued episodes with `spawn`; `check_versions` raises if the oldest token of a result is too old.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        seed: int,
        timeout_s: float,
        admit: Callable[[], None],
        check_versions: Callable[[Episode, int], None],
        on_end: Callable[[Ended], None],
        on_crash: Callable[[BaseException], None],
    ):
        self.engine = engine
        self.seed = seed
        self.timeout_s = timeout_s
        # If set, episodes run in worker processes.
        self.pool: WorkerPool | None = None
        # Whether episodes keep their generation requests, for the record of the run.
        self.keeps_requests = False
        # In order of start; guarded by the executor's lock.
        self.running: dict[Episode, None] = {}
        self._admit, self._check_versions, self._on_end, self._on_crash = admit, check_versions, on_end, on_crash
        self._is_admission_requested = False
        self._ended: Ended = []
        self._cancelled: set[asyncio.Task] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.is_stopping = False
        self.loop = new_event_loop()
        self.thread = threading.Thread(target=self._run_loop, name="rollout", daemon=True)

    def stop(self) -> None:
        """Cancel all tasks and end the thread; idempotent."""
        self.is_stopping = True
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(timeout=10)

    def request_admission(self) -> None:
        """Have the loop call `admit` (any thread); requests that come before it runs are merged."""
        if not self._is_admission_requested:
            self._is_admission_requested = True
            self.loop.call_soon_threadsafe(self._run_callback, self._run_admission)

    def _run_admission(self) -> None:
        self._is_admission_requested = False
        self._admit()

    def _run_callback(self, callback: Callable[[], None]) -> None:
        """Run a callback of the executor and report what it raises, which asyncio would only log."""
        try:
            callback()
        except BaseException as error:
            self._on_crash(error)
            raise

    def run_coroutine(self, coroutine: Coroutine[Any, Any, T], wait: NamedWait) -> T:
        """Run `coroutine` on the loop and wait for its result (another thread)."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            with waiting("call", f"{wait.what} ({wait.who})", (), wait.left_s):
                # A little longer than its own deadline: its own error says more than ours could.
                return future.result(None if wait.left_s is None else wait.left_s + 2.0)
        except TimeoutError:
            if future.done():
                # The coroutine's own error.
                raise
            future.cancel()
            raise wait.error("no response yet", "a server hangs or is very slow: see its log") from None

    def spawn(self, episode: Episode) -> None:
        """Start an episode that is already in `running` (loop thread)."""
        if self._timer is None:
            self._arm_deadline(episode)
        task = asyncio.Task(self._run(episode), loop=self.loop, name=f"episode-{episode.id}", **_EAGER)
        episode.task = None if task.done() else task

    async def _run(self, episode: Episode) -> None:
        data = {key: copy_containers(value) for key, value in episode.data.items()}
        assert episode.workflow is not None
        episode.lane = tracing.begin_episode()
        tracing.enter_episode(episode.lane)
        parts = EpisodeClock()
        use_clock(parts)
        episode.log = [] if self.keeps_requests and episode.call is None else None
        use_log(episode.log)
        if "seed" not in data:
            data["seed"] = derive_seed(self.seed, episode.id.group_id)
        try:
            if self.pool is None:
                result = await episode.workflow.arun_episode(self.engine, data)
            else:
                result = await self.pool.run_episode(episode.workflow, data, episode.lane, episode.log, parts)
            episode.set_result(result)
            if episode.result is not None:
                self._check_versions(episode, episode.result.oldest_version)
        except asyncio.CancelledError:
            if not self.is_stopping:
                self._end(episode, self._cancellation_error(episode), parts)
            raise
        # A workflow may raise anything; it fails that episode only.
        except BaseException as error:
            self._end(episode, error, parts)
        else:
            self._end(episode, None, parts)

    def _cancellation_error(self, episode: Episode) -> Exception:
        if clock.monotonic() < episode.started_at + self.timeout_s:
            return RuntimeError("the workflow awaited something that was cancelled")
        return TimeoutError(f"no result within rollout.episode_timeout_s={self.timeout_s:g}")

    def _end(self, episode: Episode, error: BaseException | None, parts: EpisodeClock | None = None) -> None:
        episode.task = None
        if self.is_stopping or episode.has_ended:
            return
        episode.has_ended = True
        episode.finished_at = clock.time()
        episode.parts = parts.stop() if parts is not None else None
        if episode.lane is not None:
            # The task begins later than the episode is admitted: until then its lane may be that of another one.
            self._trace(episode, episode.lane, episode.started_at if parts is None else parts.began, error)
        if not self._ended:
            self.loop.call_soon(self._run_callback, self._report)
        self._ended.append((episode, error))

    def _trace(self, episode: Episode, lane: str, began: float, error: BaseException | None) -> None:
        seconds, result = clock.monotonic() - began, episode.result
        args: dict[str, Any] = {"version": episode.start_version}
        if error is not None:
            args["error"] = type(error).__name__
        elif result is not None:
            args |= {"tokens": result.num_tokens, "samples": result.num_samples, "reward": result.mean_reward}
        tracing.end_episode(lane, f"episode {episode.id}", clock.time() - seconds, seconds, **args)

    def _report(self) -> None:
        ended, self._ended = self._ended, []
        self._on_end(ended)

    def _arm_deadline(self, oldest: Episode) -> None:
        """Set the one timer to the deadline of the oldest episode; all episodes have the same timeout."""
        delay_s = max(0.0, oldest.started_at + self.timeout_s - clock.monotonic())
        self._timer = self.loop.call_later(delay_s, self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._timer = None
        now = clock.monotonic()
        for episode in list(self.running):
            if now < episode.started_at + self.timeout_s:
                self._arm_deadline(episode)
                return
            if episode.task is not None:
                logger.error("%s: past its deadline", describe_wait(episode))
                self._cancel(episode, episode.task)

    def _cancel(self, episode: Episode, task: asyncio.Task) -> None:
        """Cancel an episode and report it as ended at once: its workflow may ignore the cancellation."""
        task.cancel()
        # The loop itself does not keep a reference.
        self._cancelled.add(task)
        task.add_done_callback(self._cancelled.discard)
        self._end(episode, self._cancellation_error(episode))

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            keep_running(self.loop)
            # A workflow may have stopped the loop.
            while not self.is_stopping:
                keep_running(self.loop)
        except BaseException as error:
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
