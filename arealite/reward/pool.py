"""`RewardPool`: runs reward functions in worker processes.

Reward code that hangs or crashes fails its own job only. A workflow awaits `pool.run(fn, rows)` on the executor's event
loop. A worker takes one job at a time; if it crashes or passes the deadline it is killed and replaced, and that job
alone fails, with the reason. While all workers only wait (for a judge, a database) more are started, so that waiting
costs no throughput. Coroutine functions are awaited on the event loop itself.
"""

import asyncio
import inspect
import math
import os
import pickle
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from arealite.api.errors import RewardError
from arealite.utils.process import is_computing
from arealite.utils.process_pool import (
    ProcessPool,
    WorkerLost,
    WorkerProcess,
    WorkerTimeout,
    die_with_owner,
    start_fork_server,
)

# While jobs wait: how often to check whether more workers would help.
_GROWTH_INTERVAL_S = 0.1
# Jobs that take longer are split, and a worker sends the results that it has.
_MAX_JOB_S = 0.05
_MAX_TIMEOUTS_IN_ROW = 3
# Of a traceback.
_MAX_TEXT = 10_000


class RewardPool(ProcessPool[WorkerProcess]):
    """Computes in `num_workers` processes, and in up to `max_workers` while those only wait."""

    def __init__(self, num_workers: int = 0, timeout_s: float = 15.0, max_workers: int = 64):
        super().__init__()
        self.num_workers = num_workers or max(2, min(8, (os.cpu_count() or 2) // 2))
        self.timeout_s = timeout_s
        self.max_workers = max(max_workers, self.num_workers)
        self._limit = self.num_workers
        self._idle: deque[WorkerProcess] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._growth_timer: asyncio.TimerHandle | None = None
        # Running mean of the time for one row.
        self._row_s = 0.0
        self._timeouts_in_row = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process (the workflow of a rollout worker) it becomes a pool with workers of its own."""
        return (RewardPool, (self.num_workers, self.timeout_s, self.max_workers))

    def warm_up(self, fn: Callable[..., Any]) -> None:
        """Start what forks workers, without waiting for it: it imports the script, which takes seconds."""
        if not inspect.iscoroutinefunction(fn):
            start_fork_server(fn.__module__)

    async def run(self, fn: Callable[..., Any], rows: list[dict[str, Any]]) -> list[float]:
        """Return `[fn(**row) for row in rows]`; raises `RewardError` with the reason if that fails."""
        if inspect.iscoroutinefunction(fn):
            return check_rewards(fn, await self._await_all(fn, rows), len(rows))
        size = len(rows)
        if self._row_s * size > _MAX_JOB_S:
            size = max(1, int(_MAX_JOB_S / self._row_s))
        jobs = [self._run_job(fn, rows[i : i + size]) for i in range(0, len(rows), size)]
        parts = await asyncio.gather(*jobs)
        return check_rewards(fn, [value for part in parts for value in part], len(rows))

    async def _await_all(self, fn: Callable[..., Any], rows: list[dict[str, Any]]) -> list[Any]:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.gather(*(fn(**row) for row in rows))
        except TimeoutError as error:
            raise RewardError(f"reward {_name(fn)} did not return within {self.timeout_s} s") from error
        # Reward code may raise anything.
        except Exception as error:
            raise RewardError(f"reward {_name(fn)} raised {error!r}") from error

    async def _run_job(self, fn: Callable[..., float], rows: list[dict[str, Any]]) -> list[Any]:
        try:
            job = pickle.dumps((fn, rows), protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RewardError(
                f"the reward {fn!r} cannot be sent to a worker process ({error}): define it at the top level of a "
                "module or of your script, or pass reward_inline=True"
            ) from error
        worker = await self._acquire(fn)
        began = time.monotonic()
        try:
            kind, payload = await self._ask(worker, job)
        except WorkerLost as lost:
            text = f"failed: its worker process {lost}"
            if isinstance(lost, WorkerTimeout):
                text = self._timeout_text()
                self._row_s = self.timeout_s
                self._timeouts_in_row += 1
                if self._timeouts_in_row >= _MAX_TIMEOUTS_IN_ROW:
                    self._fail_waiting(fn)
            self._replace(worker)
            raise RewardError(f"reward {_name(fn)} {text}") from None
        except asyncio.CancelledError:
            # The worker is still busy with a job that nobody waits for.
            self._replace(worker)
            raise
        self._timeouts_in_row = 0
        self._row_s += 0.2 * ((time.monotonic() - began) / len(rows) - self._row_s)
        self._on_ready(worker)
        if kind == "error":
            raise RewardError(f"reward {_name(fn)} raised:\n{payload}")
        return payload

    async def _ask(self, worker: WorkerProcess, job: bytes) -> tuple[str, Any]:
        worker.channel.send(job)
        values: list[Any] = []
        # Each message restarts the deadline: it is that of one row, not of the group.
        while True:
            kind, payload = await worker.receive(self.timeout_s)
            if kind == "error":
                return kind, payload
            values += payload
            if kind == "done":
                return kind, values

    def close(self) -> None:
        """Kill all workers; idempotent."""
        if self._growth_timer is not None:
            self._growth_timer.cancel()
        self._idle.clear()
        super().close()

    async def _acquire(self, fn: Callable[..., float]) -> WorkerProcess:
        while not self._idle:
            if len(self._workers) + len(self._starting) < self._limit:
                # Shielded: a start that takes longer than an episode must not begin again and again.
                await asyncio.shield(self._launch(WorkerProcess(_serve, (), fn.__module__, "arealite-reward")))
            else:
                turn = asyncio.get_running_loop().create_future()
                self._waiting.append(turn)
                self._check_growth_later()
                await turn
        return self._idle.popleft()

    def _start_error(self, lost: WorkerLost) -> RewardError:
        return RewardError(f"a reward worker did not start: it {lost}")

    def _on_ready(self, worker: WorkerProcess) -> None:
        self._idle.append(worker)
        self._wake(1)

    def _on_start_failed(self, error: BaseException) -> None:
        self._wake(1)

    def _replace(self, worker: WorkerProcess) -> None:
        """Remove a worker; the next job that waits starts another one."""
        self.num_replaced += 1
        self._remove(worker)
        self._wake(1)

    def _wake(self, count: int) -> None:
        while self._waiting and count:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

    def _check_growth_later(self) -> None:
        if self._growth_timer is None and self._limit < self.max_workers:
            loop = asyncio.get_running_loop()
            self._growth_timer = loop.call_later(_GROWTH_INTERVAL_S, self._grow_if_workers_wait)

    def _grow_if_workers_wait(self) -> None:
        """Allow twice as many workers if jobs wait and fewer workers compute than may."""
        self._growth_timer = None
        if not self._waiting:
            return
        num_computing = sum(is_computing(worker.process.pid) for worker in self._workers)
        if num_computing < self.num_workers and len(self._workers) == self._limit:
            before, self._limit = self._limit, min(2 * self._limit, self.max_workers)
            self._wake(self._limit - before)
        self._check_growth_later()

    def _fail_waiting(self, fn: Callable[..., float]) -> None:
        """Fail all jobs that wait for a worker: after timeouts only, they would time out as well."""
        waiting, self._waiting = self._waiting, deque()
        text = f"reward {_name(fn)} was not tried: the last {self._timeouts_in_row} calls {self._timeout_text()}"
        for turn in waiting:
            if not turn.done():
                turn.set_exception(RewardError(text))

    def _timeout_text(self) -> str:
        return f"did not return within {self.timeout_s} s and was killed"


def check_rewards(fn: Callable[..., Any], values: Any, count: int) -> list[float]:
    """Return rewards as finite floats, or raise an error that names the function and what it returned."""
    if len(values) != count:
        raise RewardError(f"reward {_name(fn)} returned {len(values)} values for {count} samples")
    for value in values:
        text = f"reward {_name(fn)} returned {value!r}"
        if isinstance(value, str) or not hasattr(value, "__float__"):
            raise RewardError(f"{text} ({type(value).__name__}); it must return a number")
        if not math.isfinite(value):
            raise RewardError(f"{text}; it must be finite")
    return [float(value) for value in values]


def _serve(sock: socket.socket) -> None:
    """Run jobs in a worker process until the owner is gone."""
    die_with_owner()
    own_pid = os.getpid()
    owner = Connection(sock.detach())
    owner.send("ready")
    while True:
        try:
            job = owner.recv()
        except EOFError:
            return
        try:
            fn, rows = pickle.loads(job)
            response = ("done", _compute(owner, fn, rows))
        # Reward code may raise anything; the owner needs the traceback.
        except BaseException:
            response = ("error", traceback.format_exc(limit=-6)[:_MAX_TEXT])
        if os.getpid() != own_pid:
            # The reward forked; the original process answers.
            os._exit(0)
        owner.send(response)


def _compute(owner: Connection, fn: Callable[..., float], rows: list[dict[str, Any]]) -> list[Any]:
    """Return the rewards of the rows, without those of slow ones, which are sent at once."""
    values, sent_at = [], time.monotonic()
    for row in rows:
        if values and time.monotonic() - sent_at > _MAX_JOB_S:
            owner.send(("some", values))
            values, sent_at = [], time.monotonic()
        value = fn(**row)
        # Something that unpickles without imports: a number, or the text of anything else.
        values.append(float(value) if hasattr(value, "__float__") else repr(value)[:200])
    return values


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
