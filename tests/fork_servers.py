"""Fork servers of `multiprocessing` for tests: forks of pytest, with all modules that it has imported.

Pools of rewards, tools and environments get their workers from the fork server. A new interpreter in its place would
import torch, which takes five seconds of a core, and again after each test that kills the fork server.

All fork servers are forks of one process, the nursery, which is forked from pytest before its first test. It has one
thread and runs no test, so no fork inherits a lock that a thread of a test held, whatever tests leave behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from tests.warm_python import close_all_but, open_streams

_PR_SET_CHILD_SUBREAPER = 36

_spawnv_passfds = multiprocessing.util.spawnv_passfds


def start() -> None:
    """Let the fork server of `multiprocessing` be a fork of this process. Call it between tests."""
    global _nursery
    multiprocessing.util.spawnv_passfds = _start_fork_server
    # Another thread might hold a lock, which a fork would never release.
    if _nursery is None and threading.active_count() == 1:
        pools = sys.modules.get("arealite.utils.pools.process_pool")
        if pools is not None:
            pools.run_preparations()
        _nursery = _Nursery()
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is None:
        multiprocessing.set_forkserver_preload([])
        multiprocessing.forkserver.ensure_running()


def close() -> None:
    """End the nursery. The fork server itself ends with this process."""
    global _nursery
    if _nursery is not None:
        _nursery.close()
        _nursery = None


class _Nursery:
    """A fork of pytest that waits for the arguments and descriptors of fork servers, and forks them."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _serve(theirs)
            finally:
                # Exit functions are those of pytest.
                os._exit(0)
        theirs.close()

    def fork_server(self, code: str, descriptors: Sequence[int]) -> int:
        """Return the id of a new fork server. `multiprocessing` waits for it, so it is a child of this process."""
        request = {"code": code, "descriptors": list(descriptors), "env": dict(os.environ), "cwd": os.getcwd()}
        _adopt_orphans(True)
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            pid = self._socket.recv(64)
            # The process between the nursery and the fork server has ended.
            if self._socket.recv(64) != b"orphaned":
                raise RuntimeError("the process that forks fork servers for tests has ended")
        finally:
            _adopt_orphans(False)
        return int(pid)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        os.waitpid(self._pid, 0)


_nursery: _Nursery | None = None


def _adopt_orphans(is_on: bool) -> None:
    """Let orphaned descendants become children of this process, not of process 1."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


def _start_fork_server(path: str, args: list[Any], passfds: Sequence[int]) -> int:
    """Replaces the function with which `multiprocessing` starts its fork server and its resource tracker."""
    if "multiprocessing.forkserver" in str(args[-1]) and _nursery is not None:
        return _nursery.fork_server(args[-1], passfds)
    return _spawnv_passfds(path, args, passfds)


def _serve(connection: socket.socket) -> None:
    """Fork a fork server for each message, until pytest closes the connection."""
    close_all_but([connection.fileno()])
    # The streams of pytest may be pipes that nobody reads while a test waits for this process.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)
    open_streams()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A new interpreter has no handlers.
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
    while True:
        message, received, _, _ = socket.recv_fds(connection, 1 << 20, 8)
        if not message:
            return
        between = os.fork()
        if between == 0:
            server = os.fork()
            if server == 0:
                _become_fork_server(json.loads(message), received)
            else:
                connection.sendall(str(server).encode())
            return
        for descriptor in received:
            os.close(descriptor)
        os.waitpid(between, 0)
        connection.sendall(b"orphaned")


def _become_fork_server(request: dict[str, Any], received: Sequence[int]) -> None:
    high = 1 + max([*received, *request["descriptors"]])
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, high) for descriptor in received]
    for copy, number in zip(copies, request["descriptors"], strict=True):
        os.dup2(copy, number)
    close_all_but(request["descriptors"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.modules.pop("arealite.utils.pools.preloaded", None)
    with contextlib.suppress(SystemExit):
        exec(request["code"], {})
