"""Pools of worker processes, for rewards and rollout workers: start, messages, replacement, end.

Workers are forked from a fork server that has imported the user's script once: functions defined in the script work in
them, and a new worker is ready within milliseconds. Workers inherit none of the owner's descriptors but its standard
streams. Every wait for a worker has a deadline, and nothing that a worker sends or does not send blocks the event loop.
Workers end with their owner, also if it is killed.
"""

import asyncio
import atexit
import contextlib
import fcntl
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.context import ForkServerContext
from typing import Any, Generic, TypeVar

START_TIMEOUT_S = 120.0
# For a process that has closed its connection to end.
EXIT_TIMEOUT_S = 1.0
_CHUNK_BYTES = 1 << 20
# Read by `preloaded`, which only the fork server imports.
PRELOAD_ENV = "AREALITE_PRELOAD"
_SCRIPT_KEYS = ("sys_path", "init_main_from_name", "init_main_from_path")
# The size of a message in bytes, as `Connection` writes it.
_HEADER = struct.Struct("!i")


_imports_script = True


def never_import_script() -> None:
    """Have workers not import the script of this process: it may train without an `if __name__` guard.

    Functions that the script defines then do not work in them. The first worker of a process decides.
    """
    global _imports_script
    _imports_script = False


_preparations: list[Callable[[], object]] = []


def prepare_workers(function: Callable[[], object]) -> None:
    """Have the fork server call `function` before it forks workers.

    Call it in a module that the fork server imports. It is for what is slow at its first use, which would else be part
    of the first job of each worker, and of its deadline.
    """
    _preparations.append(function)


def run_preparations() -> None:
    """Call what `prepare_workers` was given, each function once."""
    while _preparations:
        _preparations.pop()()


def fork_context(module: str) -> ForkServerContext:
    """Return a context that forks processes from a server with the script and `module` imported."""
    script = {k: v for k, v in spawn.get_preparation_data("").items() if k in _SCRIPT_KEYS}
    os.environ[PRELOAD_ENV] = json.dumps({**script, "module": module, "imports_script": _imports_script})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["arealite.utils.pools.preloaded"])
    return context


def start_fork_server(module: str) -> None:
    """Start the fork server in the background, unless it runs or this process is a worker."""
    is_importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    if not is_importing and multiprocessing.parent_process() is None:
        fork_context(module)
        forkserver.ensure_running()


def die_with_owner() -> None:
    """Have the kernel end this process when the one that started it ends, also in the middle of a job.

    Its parent is the fork server, which lives as long as any of its children. The owner holds the other end of the
    sentinel's pipe; when that closes the kernel sends SIGIO, which by default ends a process. The process leads a group
    of its own, so that what it has started ends with it.
    """
    owner = multiprocessing.parent_process()
    assert owner is not None
    # Not a session: launchers find what is left of a job by its session.
    os.setpgid(0, 0)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(owner.sentinel, fcntl.F_SETOWN, -os.getpid())
    flags = fcntl.fcntl(owner.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(owner.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    # The owner may have ended before the request was in place.
    if multiprocessing.connection.wait([owner.sentinel], timeout=0):
        os._exit(1)


def close_pool_pipes() -> None:
    """Close the pipes that multiprocessing gives a worker, so that it could start processes of its own.

    The owner has the other ends: without them a worker shares nothing with it but the socket of its messages.
    """
    # multiprocessing has no public way; with None it starts its own helpers if they are needed.
    for holder, name in (
        (forkserver._forkserver, "_forkserver_alive_fd"),  # type: ignore[attr-defined]
        (resource_tracker._resource_tracker, "_fd"),  # type: ignore[attr-defined]
    ):
        descriptor = getattr(holder, name)
        if descriptor is not None:
            os.close(descriptor)
            setattr(holder, name, None)
    forkserver._forkserver._forkserver_address = None  # type: ignore[attr-defined]


def _kill_fork_server() -> None:
    """End a fork server that does not answer; the next worker starts another one."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    # Under the lock, and with its end awaited: a start meanwhile would take the dying server for a live one.
    with server._lock:
        # A worker that uses its owner's fork server has no pid of it.
        if server._forkserver_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop_unlocked()


class MessageError(Exception):
    """The other side of a channel sent something that is no message."""


class WorkerLost(Exception):
    """A worker process ended, failed to start or sent nonsense; the message continues "it …"."""


class WorkerTimeout(WorkerLost):
    """A worker did not respond within its deadline."""


class Channel:
    """Sends and receives pickled messages over one end of a socket pair, on an event loop.

    Code without an event loop uses a `multiprocessing.connection.Connection` at the other end.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._socket = sock
        self._outbox: deque[memoryview] = deque()
        self._sender: asyncio.Task[None] | None = None

    def __del__(self) -> None:
        # Not before: an event loop must not watch a closed socket.
        self._socket.close()

    def send(self, message: Any) -> None:
        """Send a message without waiting. If the other side is gone, `receive` raises."""
        message_bytes = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        data = memoryview(_HEADER.pack(len(message_bytes)) + message_bytes)
        if not self._outbox:
            with contextlib.suppress(OSError):
                data = data[self._socket.send(data) :]
        if data:
            # The socket is full: a task sends the rest.
            self._outbox.append(data)
            if self._sender is None or self._sender.done():
                self._sender = asyncio.create_task(self._send_outbox(), name="worker messages")

    async def _send_outbox(self) -> None:
        with contextlib.suppress(OSError):
            while self._outbox:
                await asyncio.get_running_loop().sock_sendall(self._socket, self._outbox[0])
                self._outbox.popleft()

    async def receive(self) -> Any:
        """Return the next message; raises EOFError or OSError when the other side is gone, or `MessageError`."""
        (size,) = _HEADER.unpack(await self._read(_HEADER.size))
        if size < 0:
            raise MessageError(f"sent a message of {size} bytes")
        data = await self._read(size)
        try:
            return pickle.loads(data)
        # Damaged bytes may raise anything.
        except Exception as error:
            raise MessageError(f"sent a message that cannot be read: {error!r}") from error

    async def _read(self, size: int) -> bytearray:
        """Read so many bytes. Memory is taken as they arrive: the announced size may be wrong."""
        data = bytearray()
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self._socket, min(size - len(data), _CHUNK_BYTES))
            if not part:
                raise EOFError
            data += part
        return data

    def shut_down(self) -> None:
        """End the connection; a task that uses it gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def run_worker(environment: dict[str, str], target: Callable[..., None], *args: Any) -> None:
    """Call `target` in a worker process, with the environment that its owner has now."""
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


class WorkerProcess:
    """A process and its channel. `target(socket, *args)` sends one message when it is ready."""

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, ...], module: str, name: str, is_daemon: bool = True
    ):
        context = fork_context(module)
        ours, self._theirs = socket.socketpair()
        self.channel = Channel(ours)
        # The fork server has the environment of its start: keys and log files of an earlier run in this process.
        environment = {key: value for key, value in os.environ.items() if key != PRELOAD_ENV}
        self.process = context.Process(
            target=run_worker, args=(environment, target, self._theirs, *args), name=name, daemon=is_daemon
        )
        self._is_killed = False

    async def start(self) -> None:
        """Start the process and wait until it is ready; raises `WorkerLost`."""
        is_started = False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                # In a thread: the first start waits until the fork server has imported the script.
                await asyncio.to_thread(self._start_process)
            is_started = True
            self._theirs.close()
            await self.receive(START_TIMEOUT_S)
        except BaseException as error:
            self.kill()
            if not is_started and isinstance(error, TimeoutError | asyncio.CancelledError):
                # Ends the thread too, which would else wait for an answer as long as this process lives.
                _kill_fork_server()
            if isinstance(error, TimeoutError):
                raise WorkerLost(f"had no answer from its fork server within {START_TIMEOUT_S:g} s") from error
            if isinstance(error, EOFError | OSError):
                raise WorkerLost(f"lost its fork server ({error!r})") from error
            raise

    def _start_process(self) -> None:
        try:
            self.process.start()
        except (EOFError, OSError):
            if self._is_killed:
                raise
            # All pools share the fork server, and another one may have killed it just now. This starts a new one.
            self.process.start()
        if self._is_killed:
            self._kill_group()

    def _kill_group(self) -> None:
        """Kill the process and all that it has started, also if it has ended itself."""
        pid = self.process.pid
        if pid is None:
            return
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            # It has no group yet and so has started nothing, or all has ended.
            if self.process.is_alive():
                self.process.kill()

    async def receive(self, timeout_s: float | None) -> Any:
        """Return the next message of the worker; raises `WorkerLost`, or `WorkerTimeout` after the deadline."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.channel.receive()
        except TimeoutError:
            raise WorkerTimeout(f"did not respond within {timeout_s:g} s") from None
        except (EOFError, OSError):
            raise WorkerLost(await self._describe_exit()) from None
        except MessageError as error:
            raise WorkerLost(str(error)) from error

    def kill(self) -> None:
        """End the process and its children at once; idempotent. A task that waits for it gets `WorkerLost`."""
        if not self._is_killed:
            # Once only: later, another process may have the number.
            self._is_killed = True
            self._kill_group()
        self.channel.shut_down()

    async def _describe_exit(self) -> str:
        """Say how the process ended; it has closed its socket, so it ends within moments."""
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.process.sentinel, has_ended.set)
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await has_ended.wait()
        except TimeoutError:
            return "closed its connection and did not end"
        finally:
            loop.remove_reader(self.process.sentinel)
        code = self.process.exitcode
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"


W = TypeVar("W", bound=WorkerProcess)


class ProcessPool(Generic[W]):
    """Workers that are ready or starting. Subclasses decide when to start one and which one gets a job.

    They end with the pool, also if nobody closes it: a script may make a workflow, and so a pool, for each step.
    """

    # Set by `__init__`, before which a subclass may raise.
    _owner_pid = 0

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self.num_replaced = 0
        self.is_closed = False
        self._workers: list[W] = []
        self._starting: dict[asyncio.Task[None], W] = {}
        # multiprocessing waits for non-daemon workers at exit. A method would keep the pool until then.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def __del__(self) -> None:
        # Nobody waits for a worker: who does has a reference. A forked process does not own them.
        if os.getpid() == self._owner_pid:
            for worker in self._workers:
                worker.kill()
            atexit.unregister(self._at_exit)

    def _launch(self, worker: W) -> asyncio.Task[None]:
        """Start a worker in a task of its own, which goes on if the job that needs the worker is cancelled."""
        task = asyncio.create_task(self._start(worker), name=f"start {worker.process.name}")
        self._starting[task] = worker
        task.add_done_callback(self._end_launch)
        return task

    async def _start(self, worker: W) -> None:
        try:
            await worker.start()
        except WorkerLost as lost:
            raise self._start_error(lost) from None
        self._workers.append(worker)
        self._on_ready(worker)

    def _end_launch(self, task: asyncio.Task[None]) -> None:
        self._starting.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_start_failed(error)

    def _start_error(self, lost: WorkerLost) -> Exception:
        """The error for callers that wait for a worker which could not start."""
        return lost

    def _on_ready(self, worker: W) -> None:
        """Called when a worker has started."""

    def _on_start_failed(self, error: BaseException) -> None:
        """Called when a worker could not start."""

    def _remove(self, worker: W) -> None:
        worker.kill()
        if worker in self._workers:
            self._workers.remove(worker)

    def close(self) -> None:
        """Kill all workers; idempotent."""
        self.is_closed = True
        for worker in (*self._workers, *self._starting.values()):
            worker.kill()
        for task in self._starting:
            task.cancel()
        self._starting.clear()
        self._workers.clear()
        atexit.unregister(self._at_exit)


def _close(pool: weakref.ref[ProcessPool[Any]]) -> None:
    if (found := pool()) is not None:
        found.close()
