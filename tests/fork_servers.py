"""Fork servers of `multiprocessing` for tests: forks of pytest, with all modules that it has imported.

Pools of rewards, tools and environments get their workers from the fork server. A new interpreter in its place would
import torch, which takes five seconds of a core, and again after each test that kills the fork server.
"""

from __future__ import annotations

import contextlib
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
from typing import Any, NoReturn

from tests.warm_python import close_all_but, open_streams

# Tests kill the fork server a few times, and some leave a thread, after which pytest forks no more.
_NUM_SPARES = 8

_spawnv_passfds = multiprocessing.util.spawnv_passfds


def start() -> None:
    """Let the fork server of `multiprocessing` be a fork of this process.

    Call it between tests. If a test kills the fork server, a spare takes its place, at once. Spares are forked in
    advance, while this process has one thread: another thread might hold a lock, which a fork would never release.
    """
    multiprocessing.util.spawnv_passfds = _start_spare
    while len(_spares) < _NUM_SPARES and threading.active_count() == 1:
        _spares.append(_Spare())
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is None:
        multiprocessing.set_forkserver_preload([])
        multiprocessing.forkserver.ensure_running()


def close() -> None:
    """End the spares. The fork server itself ends with this process."""
    while _spares:
        _spares.pop().close()


class _Spare:
    """A fork of pytest that waits for the arguments and descriptors of a fork server, and becomes one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._wait(theirs)
        theirs.close()

    def use(self, code: str, descriptors: Sequence[int]) -> int:
        request = {"code": code, "descriptors": list(descriptors), "env": dict(os.environ), "cwd": os.getcwd()}
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        self._socket.close()
        return self.pid

    def close(self) -> None:
        self._socket.close()
        os.waitpid(self.pid, 0)

    @staticmethod
    def _wait(connection: socket.socket) -> NoReturn:
        close_all_but([connection.fileno()])
        # The streams of pytest may be pipes that nobody reads while a test waits for this process.
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        open_streams()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A new interpreter has no handlers. Those of tests may hold locks of threads that this process does not have.
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger):
                logger.handlers.clear()
        message, received, _, _ = socket.recv_fds(connection, 1 << 20, 8)
        # Without a message pytest has ended.
        if message:
            request = json.loads(message)
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
        # Exit functions are those of pytest.
        os._exit(0)


_spares: list[_Spare] = []


def _start_spare(path: str, args: list[Any], passfds: Sequence[int]) -> int:
    """Replaces the function with which `multiprocessing` starts its fork server and its resource tracker."""
    if "multiprocessing.forkserver" in str(args[-1]) and _spares:
        return _spares.pop().use(args[-1], passfds)
    return _spawnv_passfds(path, args, passfds)
