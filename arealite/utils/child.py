"""Processes made by `multiprocessing` that must not outlive whoever uses them."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
from multiprocessing import spawn
from multiprocessing.context import ForkServerContext

PRELOAD_ENV = "AREALITE_PRELOAD"  # for whoever imports `preloaded`, which is the fork server alone
_OF_THE_SCRIPT = ("sys_path", "init_main_from_name", "init_main_from_path")


def fork_context(module: str) -> ForkServerContext:
    """For processes forked from a server that has imported this process's script and `module` once: a new one is ready in milliseconds."""
    told = {k: v for k, v in spawn.get_preparation_data("").items() if k in _OF_THE_SCRIPT}
    os.environ[PRELOAD_ENV] = json.dumps({**told, "module": module})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["arealite.utils.preloaded"])
    return context


def die_with_owner() -> None:
    """Have the kernel end this process with the one that started it, also in the middle of a job.

    Its parent is the fork server, which lives as long as any of its children. The owner holds the other end of the
    sentinel's pipe; when that closes, SIGIO comes, whose default is to end the process.
    """
    owner = multiprocessing.parent_process()
    assert owner is not None
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(owner.sentinel, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(owner.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(owner.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    if multiprocessing.connection.wait([owner.sentinel], timeout=0):
        os._exit(1)  # it ended before the request was in place
