"""Rewards in processes of their own: slow, hanging or crashing reward code costs its episode and nothing else.

A workflow awaits `pool.run(fn, rows)` on the executor's loop. A worker takes one job at a time; when it crashes or passes the deadline it is killed and
replaced, and that job alone fails, with the reason. While workers only wait (for a judge, a database) more are started, so that waiting costs no throughput; a
coroutine function is awaited on the loop itself. Workers are forked from a clean server process that has imported the user's script once, so a
function defined in the script works and a new worker is quick; all of them end with this process.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import math
import os
import pickle
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from arealite.api.errors import RewardError
from arealite.utils.child import die_with_owner, fork_context
from arealite.utils.process import is_computing

_START_TIMEOUT_S = 120.0
_LOOK_EVERY_S = 0.1  # while jobs wait: how often to look whether more workers would help
_QUICK_S = 0.05  # a job that takes longer is cut into smaller ones, its results so far are sent
_MAX_TIMEOUTS_IN_ROW = 3
_MAX_TEXT = 10_000  # of a traceback: small enough for a pipe to take it whole


class RewardPool:
    """Belongs to the event loop that runs it. `num_workers` processes compute at once, up to `max_workers` when they wait."""

    def __init__(self, num_workers: int = 0, timeout_s: float = 15.0, max_workers: int = 64):
        self.num_workers = num_workers or max(2, min(8, (os.cpu_count() or 2) // 2))
        self.timeout_s = timeout_s
        self.max_workers = max(max_workers, self.num_workers)
        self.num_replaced = 0
        self._limit = self.num_workers
        self._workers: set[_Worker] = set()
        self._idle: deque[_Worker] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._look: asyncio.TimerHandle | None = None
        self._row_s = 0.0  # what one row took lately
        self._timeouts_in_row = 0
        atexit.register(self.close)

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process (a rollout worker's workflow) it is a pool of the same kind, with workers of its own."""
        return (RewardPool, (self.num_workers, self.timeout_s, self.max_workers))

    async def run(self, fn: Callable[..., Any], rows: list[dict[str, Any]]) -> list[float]:
        """`[fn(**row) for row in rows]`; raises `RewardError` with the reason when that fails."""
        if inspect.iscoroutinefunction(fn):
            return check_rewards(fn, await self._await_all(fn, rows), len(rows))
        size = len(rows)
        if self._row_s * size > _QUICK_S:
            size = max(1, int(_QUICK_S / self._row_s))
        jobs = [self._run_job(fn, rows[i : i + size]) for i in range(0, len(rows), size)]
        parts = await asyncio.gather(*jobs)
        return check_rewards(fn, [value for part in parts for value in part], len(rows))

    async def _await_all(self, fn: Callable[..., Any], rows: list[dict[str, Any]]) -> list[Any]:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.gather(*(fn(**row) for row in rows))
        except TimeoutError as error:
            raise RewardError(f"reward {_name(fn)} {_timed_out(self.timeout_s)}") from error
        except Exception as error:  # reward code may raise anything
            raise RewardError(f"reward {_name(fn)} raised {error!r}") from error

    async def _run_job(self, fn: Callable[..., float], rows: list[dict[str, Any]]) -> list[Any]:
        try:
            job = pickle.dumps((fn, rows), protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RewardError(
                f"the reward {fn!r} cannot be sent to a worker process ({error}): define it at the top level of a module or of "
                "your script, or pass reward_inline=True"
            ) from error
        worker = await self._acquire(fn)
        began = time.monotonic()
        try:
            kind, payload = await worker.ask(job, self.timeout_s)
        except _WorkerLost as lost:
            if isinstance(lost, _WorkerSilent):
                self._row_s = self.timeout_s
                self._timeouts_in_row += 1
                if self._timeouts_in_row >= _MAX_TIMEOUTS_IN_ROW:
                    self._give_up(fn)
            self._replace(worker)
            raise RewardError(f"reward {_name(fn)} {lost}") from None
        except asyncio.CancelledError:
            self._replace(worker)  # it is still busy with a job nobody waits for
            raise
        self._timeouts_in_row = 0
        self._row_s += 0.2 * ((time.monotonic() - began) / len(rows) - self._row_s)
        self._idle.append(worker)
        self._wake(1)
        if kind == "error":
            raise RewardError(f"reward {_name(fn)} raised:\n{payload}")
        return payload

    def close(self) -> None:
        """Kill all workers; idempotent."""
        if self._look is not None:
            self._look.cancel()
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._idle.clear()
        atexit.unregister(self.close)

    # ------------------------------------------------------------------------------- who gets a worker

    async def _acquire(self, fn: Callable[..., float]) -> _Worker:
        while not self._idle:
            if len(self._workers) < self._limit:
                return await self._start(fn)
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            self._look_later()
            await turn
        return self._idle.popleft()

    async def _start(self, fn: Callable[..., float]) -> _Worker:
        worker = _Worker(fn.__module__)
        self._workers.add(worker)
        starting = asyncio.ensure_future(worker.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The deadline of an episode: a start that takes longer than that must not begin again and again.
            starting.add_done_callback(lambda done: self._offer(worker, done))
            raise
        except RewardError:
            self._remove(worker)
            raise
        return worker

    def _offer(self, worker: _Worker, started: asyncio.Future[None]) -> None:
        """A worker for whoever needs one; nobody waited for its start."""
        if started.cancelled() or started.exception() or worker not in self._workers:
            return self._remove(worker)
        self._idle.append(worker)
        self._wake(1)

    def _replace(self, worker: _Worker) -> None:
        self.num_replaced += 1
        self._remove(worker)

    def _remove(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.discard(worker)
        self._wake(1)

    def _wake(self, count: int) -> None:
        while self._waiting and count:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

    def _look_later(self) -> None:
        if self._look is None and self._limit < self.max_workers:
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(_LOOK_EVERY_S, self._grow_if_they_wait)

    def _grow_if_they_wait(self) -> None:
        """Jobs wait: allow twice as many workers, unless those there are already compute on as many cores as they may."""
        self._look = None
        if not self._waiting:
            return
        busy = sum(is_computing(worker.process.pid) for worker in self._workers)
        if busy < self.num_workers and len(self._workers) == self._limit:
            before, self._limit = self._limit, min(2 * self._limit, self.max_workers)
            self._wake(self._limit - before)
        self._look_later()

    def _give_up(self, fn: Callable[..., float]) -> None:
        """Nothing but time-outs: what waits for a worker would only hang in it as well."""
        told = f"the last {self._timeouts_in_row} calls {_timed_out(self.timeout_s)}"
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:
            if not turn.done():
                turn.set_exception(RewardError(f"reward {_name(fn)} was not tried: {told}"))


def check_rewards(fn: Callable[..., Any], values: Any, count: int) -> list[float]:
    """Rewards as finite floats, or an error that names the function and what it returned."""
    if len(values) != count:
        raise RewardError(f"reward {_name(fn)} gave {len(values)} values for {count} samples")
    for value in values:
        told = f"reward {_name(fn)} returned {value!r}"
        if isinstance(value, str) or not hasattr(value, "__float__"):
            raise RewardError(f"{told} ({type(value).__name__}); it must return a number")
        if not math.isfinite(value):
            raise RewardError(f"{told}; it must be finite")
    return [float(value) for value in values]


class _WorkerLost(Exception):
    """The worker is of no use any more; the message completes `reward f …`."""


class _WorkerSilent(_WorkerLost):
    """It passed the deadline."""


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, module: str):
        context = fork_context(module)
        self.pipe, self._theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(self._theirs,), name="arealite-reward", daemon=True)

    async def start(self) -> None:
        # On a thread: the first start lasts until the fork server has imported the script.
        try:
            await asyncio.to_thread(self.process.start)
            self._theirs.close()
            await self._receive(_START_TIMEOUT_S)
        except _WorkerLost as lost:
            raise RewardError(f"a reward worker could not start: it {lost}") from None
        except (EOFError, OSError) as error:
            raise RewardError(f"a reward worker could not start: the fork server ended ({error!r})") from error

    async def ask(self, job: bytes, timeout_s: float) -> tuple[str, Any]:
        try:
            self.pipe.send_bytes(job)
        except OSError:
            raise _WorkerLost(self._cause_of_death()) from None
        values: list[Any] = []
        while True:  # each message is a sign of life: the deadline is one row's, not the group's
            kind, payload = await self._receive(timeout_s)
            if kind == "error":
                return kind, payload
            values += payload
            if kind == "done":
                return kind, values

    async def _receive(self, timeout_s: float) -> tuple[str, Any]:
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        descriptor = self.pipe.fileno()
        loop.add_reader(descriptor, lambda: readable.done() or readable.set_result(None))
        try:
            async with asyncio.timeout(timeout_s):
                await readable
            return pickle.loads(self.pipe.recv_bytes())
        except TimeoutError:
            raise _WorkerSilent(_timed_out(timeout_s)) from None
        except (EOFError, OSError):
            raise _WorkerLost(self._cause_of_death()) from None
        finally:
            loop.remove_reader(descriptor)

    def kill(self) -> None:
        if self.process.pid is not None and self.process.is_alive():
            self.process.kill()
        self.pipe.close()

    def _cause_of_death(self) -> str:
        self.process.join(timeout=1.0)
        code = self.process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"killed its worker process ({how})"


def _serve(pipe: Connection) -> None:
    """A worker's life: take a job, answer, until the other side is gone."""
    die_with_owner()
    own_pid = os.getpid()
    pipe.send_bytes(pickle.dumps(("ready", None)))
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        try:
            fn, rows = pickle.loads(job)
            answer = ("done", _values(pipe, fn, rows))
        except BaseException:  # reward code may raise anything; the other side needs the traceback
            answer = ("error", traceback.format_exc(limit=-6)[:_MAX_TEXT])
        if os.getpid() != own_pid:
            os._exit(0)  # the reward forked: the parent answers
        pipe.send_bytes(pickle.dumps(answer))


def _values(pipe: Connection, fn: Callable[..., float], rows: list[dict[str, Any]]) -> list[Any]:
    """Rewards of the rows; those of slow ones are sent on the way, and the rest returned."""
    values, sent_at = [], time.monotonic()
    for row in rows:
        if values and time.monotonic() - sent_at > _QUICK_S:
            pipe.send_bytes(pickle.dumps(("some", values)))
            values, sent_at = [], time.monotonic()
        values.append(_plain(fn(**row)))
    return values


def _plain(value: Any) -> Any:
    """What can be sent back without importing anything: a number, or words for what it was."""
    return float(value) if hasattr(value, "__float__") else repr(value)[:200]


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _timed_out(timeout_s: float) -> str:
    return f"did not return within {timeout_s} s and was killed"
