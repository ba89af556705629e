"""Rewards in processes of their own: slow, hanging or crashing reward code costs its episode and nothing else.

A workflow awaits `pool.run(fn, rows)` on the executor's loop. A worker takes one job (all samples of a group) at a time; when it crashes or passes
the deadline it is killed and replaced, and that job alone fails, with the reason. Workers are forked from a clean server process that
has imported the user's script once, so a function defined in the script works and a new worker is quick; all of them end with this process.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import multiprocessing
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from arealite.api.errors import RewardError
from arealite.utils.child import die_with_owner

_START_TIMEOUT_S = 120.0


class RewardPool:
    """`num_workers` processes, started when first needed. Belongs to the event loop that runs it."""

    def __init__(self, num_workers: int | None = None, timeout_s: float = 15.0):
        self.num_workers = num_workers or max(1, min(8, (os.cpu_count() or 2) // 2))
        self.timeout_s = timeout_s
        self.num_replaced = 0
        self._workers: set[_Worker] = set()
        self._idle: deque[_Worker] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        atexit.register(self.close)

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process (a rollout worker's workflow) it is a pool of the same kind, with workers of its own."""
        return (RewardPool, (self.num_workers, self.timeout_s))

    async def run(self, fn: Callable[..., float], rows: list[dict[str, Any]]) -> list[float]:
        """`[fn(**row) for row in rows]` in one worker; raises `RewardError` with the reason when that fails."""
        try:
            job = pickle.dumps((fn, rows), protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RewardError(
                f"the reward {fn!r} cannot be sent to a worker process ({error}): define it at the top level of a module or of "
                "your script, or pass reward_inline=True"
            ) from error
        worker = await self._acquire(fn)
        try:
            kind, payload = await worker.ask(job, self.timeout_s)
        except _WorkerLost as lost:
            self._replace(worker)
            raise RewardError(f"reward {_name(fn)} {lost}") from None
        except asyncio.CancelledError:
            self._replace(worker)  # it is still busy with a job nobody waits for
            raise
        self._release(worker)
        if kind == "error":
            raise RewardError(f"reward {_name(fn)} raised:\n{payload}")
        return check_rewards(fn, payload, len(rows))

    def close(self) -> None:
        """Kill all workers; idempotent."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._idle.clear()
        atexit.unregister(self.close)

    async def _acquire(self, fn: Callable[..., float]) -> _Worker:
        while not self._idle:
            if len(self._workers) < self.num_workers:
                worker = _Worker(fn.__module__)
                self._workers.add(worker)
                try:
                    await worker.started()
                except BaseException:
                    self._workers.discard(worker)
                    worker.kill()
                    self._wake_one()
                    raise
                return worker
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        return self._idle.popleft()

    def _release(self, worker: _Worker) -> None:
        self._idle.append(worker)
        self._wake_one()

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.discard(worker)
        self.num_replaced += 1
        self._wake_one()

    def _wake_one(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


def check_rewards(fn: Callable[..., float], values: Any, count: int) -> list[float]:
    """Rewards as finite floats, or an error that names the function and what it returned."""
    if len(values) != count:
        raise RewardError(f"reward {_name(fn)} gave {len(values)} values for {count} samples")
    for value in values:
        if isinstance(value, str) or not hasattr(value, "__float__"):
            raise RewardError(
                f"reward {_name(fn)} returned {value!r} ({type(value).__name__}); it must return a number"
            )
        if not math.isfinite(value):
            raise RewardError(f"reward {_name(fn)} returned {value!r}; it must be finite")
    return [float(value) for value in values]


class _WorkerLost(Exception):
    """The worker is of no use any more; the message completes `reward f …`."""


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, module: str):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", __name__, module])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs,), name="arealite-reward", daemon=True
        )
        self.process.start()
        theirs.close()

    async def started(self) -> None:
        try:
            await self._receive(_START_TIMEOUT_S)
        except _WorkerLost as lost:
            raise RewardError(f"a reward worker could not start: it {lost}") from None

    async def ask(self, job: bytes, timeout_s: float) -> tuple[str, Any]:
        try:
            self.pipe.send_bytes(job)
        except OSError:
            raise _WorkerLost(self._cause_of_death()) from None
        return await self._receive(timeout_s)

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
            raise _WorkerLost(f"did not return within {timeout_s} s and was killed") from None
        except (EOFError, OSError):
            raise _WorkerLost(self._cause_of_death()) from None
        finally:
            loop.remove_reader(descriptor)

    def kill(self) -> None:
        if self.process.is_alive():
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
    pipe.send_bytes(pickle.dumps(("ready", None)))
    while True:
        try:
            fn, rows = pickle.loads(pipe.recv_bytes())
            answer = ("ok", [_plain(fn(**row)) for row in rows])
        except (EOFError, BrokenPipeError):
            return
        except Exception:  # reward code may raise anything; the other side needs the traceback
            answer = ("error", traceback.format_exc(limit=-6))
        pipe.send_bytes(pickle.dumps(answer))


def _plain(value: Any) -> Any:
    """What can be sent back without importing anything: a number, or words for what it was."""
    return float(value) if hasattr(value, "__float__") else repr(value)[:200]


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
