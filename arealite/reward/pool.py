"""`RewardPool`: runs reward functions in worker processes.

Reward code that hangs or crashes fails its own job only. A workflow awaits `pool.run(fn, rows)` on the executor's event
loop. A worker takes one job at a time; if it crashes or passes the deadline it is killed and replaced, and that job
alone fails, with the reason. While workers spend their time blocked in jobs (on a judge, a database) more are started,
so that waiting costs no throughput; workers that compute, or wait for the next job, are never more than `num_workers`.
Coroutine functions are awaited on the event loop itself.
"""

import asyncio
import contextlib
import functools
import os
import pickle
import resource
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from arealite.api.errors import RewardError
from arealite.api.reward_api import MAX_REWARD, Score, is_async
from arealite.utils.pools.job_pool import JobPool
from arealite.utils.pools.process_pool import WorkerLost, WorkerProcess, WorkerTimeout, start_fork_server
from arealite.utils.process import is_computing
from arealite.utils.trace.tracing import part_of_episode

# Deadlines of one row in a worker, and of coroutine functions, which wait for services with deadlines of their own.
TIMEOUT_S = 15.0
AWAIT_TIMEOUT_S = 1800.0
# While jobs wait: how often to check whether more workers would help.
_GROWTH_INTERVAL_S = 0.1
# A job that more checks in a row find blocked counts before its worker has reported for how long it was. Checks, not
# seconds: the event loop may itself have been blocked.
_LONG_JOB_CHECKS = 5
# Jobs that take longer are split, and a worker sends the results that it has.
_MAX_JOB_S = 0.05
_MAX_TIMEOUTS_IN_ROW = 3
# Longest traceback that is reported, in characters.
_MAX_TEXT = 10_000
_MAX_NAME = 100
T = TypeVar("T")


class RewardPool(JobPool):
    """Computes in `num_workers` processes, and in up to `max_workers` while those are blocked in jobs.

    `timeout_s` is the deadline of a reward; None: 15 s in a worker, half an hour for coroutine functions.
    """

    def __init__(self, num_workers: int = 0, timeout_s: float | None = None, max_workers: int = 64):
        self.num_workers = num_workers or max(2, min(8, len(os.sched_getaffinity(0)) // 2))
        super().__init__(self.num_workers, _answer, "arealite-reward")
        self._given_timeout_s = timeout_s
        self.timeout_s, self.await_timeout_s = timeout_s or TIMEOUT_S, timeout_s or AWAIT_TIMEOUT_S
        self.max_workers = max(max_workers, self.num_workers)
        # Busy workers, and how many checks in a row have found the job of each blocked.
        self._busy: dict[WorkerProcess, int] = {}
        self._growth_timer: asyncio.TimerHandle | None = None
        # Since the timer was set: when, and for how long workers were blocked in the jobs that have ended.
        self._timer_set = 0.0
        self._blocked_s = 0.0
        # Running mean of a worker's time for one row.
        self._row_s = 0.0
        # By function: that of another dataset may be fine.
        self._timeouts_in_row: Counter[Hashable] = Counter()

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process (the workflow of a rollout worker) it becomes a pool with workers of its own."""
        return (RewardPool, (self.num_workers, self._given_timeout_s, self.max_workers))

    def warm_up(self, fn: Callable[..., Any]) -> None:
        """Start what forks workers, without waiting for it: it imports the script, which takes seconds.

        The attribute `worker_module` of a coroutine function names a module of which it needs a worker process.
        """
        module = getattr(fn, "worker_module", None) if is_async(fn) else fn.__module__
        if module:
            start_fork_server(module)

    async def run(self, fn: Callable[..., Any], rows: list[dict[str, Any]]) -> list[float]:
        """Return `[fn(**row) for row in rows]`; raises `RewardError` with the reason if that fails.

        A reward that returns a dict of parts becomes a `Score`: a number that has them.
        """
        return check_rewards(fn, await self.run_unchecked(fn, rows), len(rows))

    async def run_unchecked(self, fn: Callable[..., Any], rows: list[dict[str, Any]]) -> list[Any]:
        """Do as `run`, but return values as they are, which may be no numbers."""
        with part_of_episode("reward", rows=len(rows), reward=_name(fn)):
            return await self._run(fn, rows)

    async def _run(self, fn: Callable[..., Any], rows: list[dict[str, Any]]) -> list[Any]:
        if is_async(fn):
            return await self._await_all(fn, rows)
        size = len(rows)
        if self._row_s * size > _MAX_JOB_S:
            size = max(1, int(_MAX_JOB_S / self._row_s))
        jobs = [self._run_job(fn, rows[i : i + size]) for i in range(0, len(rows), size)]
        # Making an asyncio task costs more than the rest of this method.
        parts = [await jobs[0]] if len(jobs) == 1 else await asyncio.gather(*jobs)
        return [value for part in parts for value in part]

    async def _await_all(self, fn: Callable[..., Any], rows: list[dict[str, Any]]) -> list[Any]:
        try:
            async with asyncio.timeout(self.await_timeout_s) as deadline:
                return await gather_or_cancel(*(fn(**row) for row in rows))
        # Reward code may raise anything, also a TimeoutError of its own.
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                text = f"did not return within {self.await_timeout_s:g} s (reward_timeout_s)"
                raise RewardError(f"reward {_name(fn)} {text}") from error
            raise RewardError(f"reward {_name(fn)} raised {error!r}") from error

    async def _run_job(self, fn: Callable[..., float], rows: list[dict[str, Any]]) -> list[Any]:
        try:
            job = pickle.dumps((fn, rows), protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RewardError(
                f"the reward {fn!r} cannot be sent to a worker process ({error}): define it at the top level of a "
                "module or of your script, or pass reward_inline=True"
            ) from error
        worker = await self._acquire(fn.__module__, _key(fn))
        self._busy[worker] = 0
        try:
            kind, payload, busy_s, blocked_s = await self._ask(worker, job)
        except WorkerLost as lost:
            text = f"failed: its worker process {lost}"
            if isinstance(lost, WorkerTimeout):
                text = self._timeout_text()
                self._row_s = self.timeout_s
                self._timeouts_in_row[_key(fn)] += 1
                if self._timeouts_in_row[_key(fn)] >= _MAX_TIMEOUTS_IN_ROW:
                    self._fail_waiting(fn)
            self._replace(worker)
            raise RewardError(f"reward {_name(fn)} {text}") from None
        except asyncio.CancelledError:
            # The worker is still busy with a job that nobody waits for.
            self._replace(worker)
            raise
        finally:
            del self._busy[worker]
        self._timeouts_in_row.pop(_key(fn), None)
        self._row_s += 0.2 * (busy_s / len(rows) - self._row_s)
        self._blocked_s += blocked_s
        self._on_ready(worker)
        if kind == "error":
            raise RewardError(f"reward {_name(fn)} raised:\n{payload}")
        return payload

    async def _ask(self, worker: WorkerProcess, job: bytes) -> tuple[str, Any, float, float]:
        """Return whether the job is "done" or an "error", its values or text, and its busy and blocked time."""
        worker.channel.send(job)
        values: list[Any] = []
        # Each message restarts the deadline: it is that of one row, not of the group.
        while True:
            match await worker.receive(self.timeout_s):
                case "some", list(part):
                    values += part
                case "done", list(part), float(busy_s), float(blocked_s):
                    return "done", values + part, busy_s, blocked_s
                case "error", str(text), float(busy_s), float(blocked_s):
                    return "error", text, busy_s, blocked_s
                case _:
                    raise WorkerLost("sent a message that is not an answer")

    def close(self) -> None:
        """Kill all workers; idempotent."""
        if self._growth_timer is not None:
            self._growth_timer.cancel()
        super().close()

    def _start_error(self, lost: WorkerLost) -> RewardError:
        return RewardError(f"a reward worker did not start: it {lost}")

    def _on_wait(self) -> None:
        """Check later whether more workers would help."""
        if self._growth_timer is None and self._limit < self.max_workers:
            loop = asyncio.get_running_loop()
            self._growth_timer = loop.call_later(_GROWTH_INTERVAL_S, self._grow_if_workers_are_blocked)
            self._timer_set, self._blocked_s = time.monotonic(), 0.0

    def _grow_if_workers_are_blocked(self) -> None:
        """Allow twice as many workers if jobs wait and workers are mostly blocked in theirs."""
        self._growth_timer = None
        for worker, num_checks in self._busy.items():
            self._busy[worker] = 0 if is_computing(worker.process.pid) else num_checks + 1
        if not self._waiting:
            return
        if len(self._workers) == self._limit and self._are_workers_blocked():
            before, self._limit = self._limit, min(2 * self._limit, self.max_workers)
            self._wake(self._limit - before)
        self._on_wait()

    def _are_workers_blocked(self) -> bool:
        """Whether they spent half of the last interval or more blocked in jobs, and few compute now.

        A worker that waits for its next job is not blocked: with very short jobs the event loop is what limits, and
        more workers would only take its processor.
        """
        interval_s = time.monotonic() - self._timer_set
        num_long = sum(num_checks > _LONG_JOB_CHECKS for num_checks in self._busy.values())
        if self._blocked_s + num_long * interval_s < interval_s * len(self._workers) / 2:
            return False
        return sum(is_computing(worker.process.pid) for worker in self._workers) < self.num_workers

    def _fail_waiting(self, fn: Callable[..., float]) -> None:
        """Fail the jobs of a function that wait for a worker: after timeouts only, they would time out."""
        key, waiting, self._waiting = _key(fn), self._waiting, deque()
        self._waiting.extend(entry for entry in waiting if entry[1] != key)
        before = f"the last {self._timeouts_in_row[key]} calls {self._timeout_text()}"
        text = f"reward {_name(fn)} was not tried: {before}"
        for turn, wanted_for in waiting:
            if wanted_for == key and not turn.done():
                turn.set_exception(RewardError(text))

    def _timeout_text(self) -> str:
        return f"did not return within {self.timeout_s:g} s (reward_timeout_s) and was killed"


async def gather_or_cancel(*calls: Awaitable[T]) -> list[T]:
    """Await all; if one fails the others are cancelled, which may ask a paid service for nothing."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def check_rewards(fn: Callable[..., Any], values: Any, count: int) -> list[float]:
    """Return rewards as finite floats, or raise an error that names the function and what it returned.

    A dict with `reward` and parts becomes a `Score`.
    """
    if len(values) != count:
        raise RewardError(f"reward {_name(fn)} returned {len(values)} values for {count} samples")
    return [_check_parts(fn, value) if isinstance(value, dict) else _check_number(fn, value) for value in values]


def _check_number(fn: Callable[..., Any], value: Any, part: str = "") -> float:
    try:
        number = None if isinstance(value, str) or not hasattr(value, "__float__") else float(value)
    # An array of several numbers, a number beyond those of float64.
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = None
    if number is None:
        text = f"reward {_name(fn)} returned {repr(value)[:200]}{part} ({type(value).__name__})"
        raise RewardError(f"{text}; it must return a number, or a dict of numbers with the key `reward`")
    if not abs(number) <= MAX_REWARD:
        raise RewardError(f"reward {_name(fn)} returned {number!r}{part}; it must be finite, also in float32")
    return number


def _check_parts(fn: Callable[..., Any], values: dict[str, Any]) -> Score:
    if "reward" not in values:
        raise RewardError(f"reward {_name(fn)} returned a dict with {sorted(map(str, values))}, without `reward`")
    numbers = {str(name): _check_number(fn, value, f" as {name!r}") for name, value in values.items()}
    return Score(numbers.pop("reward"), numbers)


def _answer(owner: Connection, job: bytes) -> bytes:
    """Return the answer to one job, with its busy and blocked time, in a worker process."""
    began, used = time.monotonic(), _processor_s()
    try:
        fn, rows = pickle.loads(job)
        response = ("done", _compute(owner, fn, rows))
    # Reward code may raise anything; the owner needs the traceback.
    except BaseException as error:
        response = ("error", _describe(error)[:_MAX_TEXT])
    busy_s = time.monotonic() - began
    return pickle.dumps((*response, busy_s, max(0.0, busy_s - (_processor_s() - used))))


def _describe(error: BaseException) -> str:
    """Return an error with its traceback from the reward function on, without the frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace, limit=-6)).rstrip()


def _processor_s() -> float:
    """Return how long this process and its ended children had a processor, or waited for one."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    waited_ns = 0
    # Not every kernel keeps it.
    with contextlib.suppress(OSError, IndexError), open("/proc/self/schedstat") as file:
        waited_ns = int(file.read().split()[1])
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + waited_ns / 1e9


def _compute(owner: Connection, fn: Callable[..., float], rows: list[dict[str, Any]]) -> list[Any]:
    """Return the rewards of the rows, without those of slow ones, which are sent at once."""
    values, sent_at = [], time.monotonic()
    for row in rows:
        if values and time.monotonic() - sent_at > _MAX_JOB_S:
            owner.send(("some", values))
            values, sent_at = [], time.monotonic()
        value = fn(**row)
        values.append({str(k): _plain(v) for k, v in value.items()} if isinstance(value, dict) else _plain(value))
    return values


def _plain(value: Any) -> float | str | None:
    """Return something that unpickles without imports: a number, None, or the text of anything else."""
    return None if value is None else float(value) if hasattr(value, "__float__") else repr(value)[:200]


def _key(fn: Callable[..., Any]) -> Hashable:
    """Return what tells rewards apart: the name of a function or method, the identity of an object."""
    return (fn.__module__, fn.__qualname__) if hasattr(fn, "__qualname__") else id(fn)


def _name(fn: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of an object: its address says nothing."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    is_bare = type(fn).__repr__ is object.__repr__
    return getattr(fn, "__qualname__", "") or (type(fn).__qualname__ if is_bare else repr(fn)[:_MAX_NAME])
