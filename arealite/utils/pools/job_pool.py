"""`JobPool`: worker processes that take one job at a time, under rewards and calls of tools."""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

from arealite.utils.pools.process_pool import ProcessPool, WorkerProcess, close_pool_pipes, die_with_owner
from arealite.utils.status.writer import status


class JobPool(ProcessPool[WorkerProcess]):
    """Up to `limit` workers that take one job at a time; a job that finds none idle waits for one.

    `answer(owner, job)`, a function of a module, runs in the workers (`serve_jobs`).
    """

    def __init__(self, limit: int, answer: Callable[[Connection, bytes], bytes], name: str):
        super().__init__()
        self._limit, self._answer, self._name = limit, answer, name
        self._idle: deque[WorkerProcess] = deque()
        # With what each of them asked for, so that a subclass can tell them apart.
        self._waiting: deque[tuple[asyncio.Future[None], object]] = deque()

    async def _acquire(self, module: str, wanted_for: object = None) -> WorkerProcess:
        """Return an idle worker. `module` is imported once, before workers are forked."""
        while not self._idle:
            if len(self._workers) + len(self._starting) < self._limit:
                # Shielded: a start that takes longer than an episode must not begin again and again.
                worker = WorkerProcess(serve_jobs, (self._answer,), module, self._name)
                await asyncio.shield(self._launch(worker))
                continue
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, wanted_for))
            self._on_wait()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake()
                raise
        return self._idle.popleft()

    def _on_wait(self) -> None:
        """Called when a job begins to wait for a worker."""

    def _on_ready(self, worker: WorkerProcess) -> None:
        self._idle.append(worker)
        self._wake()

    def _on_start_failed(self, error: BaseException) -> None:
        self._wake()

    def _replace(self, worker: WorkerProcess) -> None:
        """Remove a worker; the next job that waits starts another one."""
        self.num_replaced += 1
        self._remove(worker)
        self._wake()

    def _wake(self, count: int = 1) -> None:
        while self._waiting and count:
            turn, _ = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

    def close(self) -> None:
        self._idle.clear()
        super().close()


def serve_jobs(sock: socket.socket, answer: Callable[[Connection, bytes], bytes]) -> None:
    """Answer jobs in a worker process until the owner is gone."""
    die_with_owner()
    close_pool_pipes()
    status.begin_quietly("job")
    own_pid = os.getpid()
    owner = Connection(sock.detach())
    owner.send("ready")
    while True:
        try:
            job = owner.recv()
        # A reset: the owner ended before it had read the last answer.
        except (EOFError, ConnectionResetError):
            return
        message = answer(owner, job)
        if os.getpid() != own_pid:
            # A function of the user forked; the original process answers.
            os._exit(0)
        owner.send_bytes(message)
