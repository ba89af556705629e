"""Episodes in processes of their own, so that heavy agents and rewards do not share the trainer's interpreter.

Lives on the executor's event loop; `EpisodeRunner` plays through it when `rollout.num_workers` is set, with the same workflow code. A worker that dies, or
is blocked when an episode runs out of time, is replaced, and its episodes are played again elsewhere from the same seeds: nothing is lost, nothing counted twice.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import pickle
import socket
from collections.abc import Callable
from typing import Any

from arealite.api.errors import ConfigError, ServerError
from arealite.api.io_struct import Batch
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.worker_process import read_message, serve, unpack, write_message
from arealite.utils.child import fork_context

logger = logging.getLogger("arealite.executor")
START_TIMEOUT_S = 120.0
RETRY_S = 30.0  # after a start that failed, while other workers play on
MAX_SILENCE_S = 5  # asked for a sign of life: a loop that turns answers at once
MAX_ATTEMPTS = 3


class WorkerError(RuntimeError):
    """What a workflow raised in a worker, with its traceback."""


class WorkerPool:
    """`count` workers. `engine_class(config)` makes the engine of each; `server_state` tells what `follow` is given."""

    def __init__(self, count: int, engine_class: type, config: Any, server_state: Callable[[], dict[str, Any]]):
        self.count = count
        self.num_replaced = 0
        self._make = (engine_class, config)
        self._server_state = server_state
        self._workers: list[_Connection] = []
        atexit.register(self._kill_all)
        self._starting: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._workflows: dict[int, RolloutWorkflow] = {}  # kept alive, so that ids stay theirs

    async def start(self) -> None:
        await asyncio.gather(*(self._add_worker() for _ in range(self.count)))

    async def run_episode(self, workflow: RolloutWorkflow, data: dict[str, Any]) -> Batch | None:
        """`workflow.arun_episode` in the worker with the fewest episodes."""
        for _ in range(MAX_ATTEMPTS):
            while not self._workers:
                await self._wait_for_worker()
            worker = min(self._workers, key=lambda w: (w.is_silent, len(w.waiting)))
            try:
                return await worker.run_episode(next(self._numbers), self._known(workflow), workflow, data)
            except asyncio.CancelledError:
                # out of time: does the episode wait, or block its worker?
                self._watch(worker, worker.ping(), MAX_SILENCE_S)
                raise
            except _WorkerDied:
                self._replace(worker)
        raise ServerError(
            f"{MAX_ATTEMPTS} workers died or were blocked one after another while they played the same episode"
        )

    def tell_servers(self) -> None:
        """Servers opened, closed, joined or left."""
        state = self._server_state()
        for worker in self._workers:
            worker.send("servers", 0, state)

    async def close(self) -> None:
        self.count = 0  # none is missing any more
        for task in self._starting:
            task.cancel()
        self._starting.clear()
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        atexit.unregister(self._kill_all)

    def _kill_all(self) -> None:
        """At the end of a process that did not close the pool; it would wait for them for ever."""
        for worker in self._workers:
            worker.process.kill()

    def _known(self, workflow: RolloutWorkflow) -> int:
        self._workflows[id(workflow)] = workflow
        return id(workflow)

    async def _add_worker(self) -> None:
        try:
            worker = _Connection(*self._make)
            await worker.open()
        except (OSError, EOFError) as error:
            raise _start_error(error) from error
        worker.send("servers", 0, self._server_state())
        self._workers.append(worker)

    def _replace(self, dead: _Connection) -> None:
        """The first of its episodes to notice starts another; all of them go on elsewhere at once."""
        if dead not in self._workers:
            return
        self._workers.remove(dead)
        dead.kill()
        dead.give_up_waiting()
        self.num_replaced += 1
        self._start_missing()

    def _start_missing(self) -> None:
        for _ in range(self.count - len(self._workers) - len(self._starting)):
            task = asyncio.create_task(self._add_worker(), name="a new rollout worker")
            self._starting.add(task)
            task.add_done_callback(self._has_started)

    def _has_started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            there = f"{len(self._workers)} of {self.count} rollout workers are left"
            logger.warning("%s, tried again within %g s: %s", there, RETRY_S, error)
            asyncio.get_running_loop().call_later(RETRY_S, self._start_missing)

    def _watch(self, worker: _Connection, ping: int, left_s: int) -> None:
        """Replace a worker that stays silent. Counted in seconds of this loop: one that stood still itself blames nobody."""
        if worker.last_pong >= ping:
            return
        if left_s > 0:
            asyncio.get_running_loop().call_later(1.0, self._watch, worker, ping, left_s - 1)
        elif worker in self._workers:
            logger.warning("rollout worker %d is blocked: it is replaced", worker.process.pid)
            self._replace(worker)

    async def _wait_for_worker(self) -> None:
        """Until one has started; when all that were starting have failed, so does the episode that waits, with the reason."""
        self._start_missing()
        if not self._starting:
            raise ServerError("the rollout workers were closed: no episode can be played any more")
        done, others = set(), set(self._starting)
        while others and not self._workers:
            done, others = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        if not self._workers:
            for task in done:
                task.result()


def _start_error(error: Exception) -> ServerError:
    if isinstance(error, TimeoutError):
        reason = f"it was not ready after {START_TIMEOUT_S:g} s"
    else:
        reason = "its process ended" if isinstance(error, EOFError) else str(error)
    return ServerError(
        f"a rollout worker did not start: {reason}. Mend what the log says of it, or set rollout.num_workers=0 to play episodes "
        "in the trainer's own process"
    )


class _WorkerDied(Exception):
    """The process is gone; what it played must be played elsewhere."""


class _Connection:
    """One worker process and the socket to it."""

    def __init__(self, engine_class: type, config: Any):
        context = fork_context(engine_class.__module__)
        self.waiting: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self.last_ping = self.last_pong = 0
        self._knows: set[int] = set()
        self._reading: asyncio.Task[None] | None = None
        self._sock, theirs = socket.socketpair()
        self.process = context.Process(
            target=serve, args=(theirs, engine_class, config), name="arealite-rollout", daemon=False
        )
        self.process.start()
        theirs.close()

    async def open(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._sock)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await read_message(reader)
            name = f"worker {self.process.pid}"
            self._reading = asyncio.create_task(self._read(reader), name=name)
        finally:
            if self._reading is None:
                self.kill()

    async def run_episode(
        self, number: int, workflow_id: int, workflow: RolloutWorkflow, data: dict[str, Any]
    ) -> Batch | None:
        if workflow_id not in self._knows:
            self._teach(workflow_id, workflow)
        future = asyncio.get_running_loop().create_future()
        self.waiting[number] = future
        try:
            self.send("play", number, (workflow_id, data))
            await self._writer.drain()
            kind, payload = await future
        except ConnectionError:
            raise _WorkerDied from None
        except asyncio.CancelledError:
            self.send("cancel", number, None)
            raise
        finally:
            self.waiting.pop(number, None)
        if kind == "died":
            raise _WorkerDied
        if kind == "error":
            raise WorkerError("{}\n{}".format(*payload))
        return None if payload is None else unpack(payload)

    @property
    def is_silent(self) -> bool:
        return self.last_pong < self.last_ping

    def ping(self) -> int:
        """Ask for a sign of life; answered when `last_pong` is what this returns."""
        self.last_ping += 1
        self.send("ping", self.last_ping, None)
        return self.last_ping

    def give_up_waiting(self) -> None:
        for future in self.waiting.values():
            if not future.done():
                future.set_result(("died", None))

    def send(self, kind: str, number: int, payload: Any) -> None:
        if not self._writer.is_closing():
            write_message(self._writer, (kind, number, payload))

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        if self._reading is not None:
            self._reading.cancel()
        self._writer.close()

    def _teach(self, workflow_id: int, workflow: RolloutWorkflow) -> None:
        try:
            self.send("workflow", workflow_id, workflow)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{type(workflow).__name__} cannot be sent to a worker process ({error}): define it and what it holds at the top "
                "level of a module, or set rollout.num_workers=0"
            ) from error
        self._knows.add(workflow_id)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                kind, number, payload = await read_message(reader)
                future = self.waiting.get(number)
                if kind == "pong":
                    self.last_pong = number
                elif future is not None and not future.done():
                    future.set_result((kind, payload))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.give_up_waiting()
