"""Runs functions that block beside an event loop: `run_beside`. Needs the standard library only."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

# The name of the threads.
_BESIDE = "beside the event loop"
R = TypeVar("R")


async def run_beside(function: Callable[[], R]) -> R:
    """Run a function that may block on a thread of its own, which does not keep the process from ending."""
    future: Future[R] = Future()

    def run() -> None:
        # The caller may have been cancelled meanwhile.
        with contextlib.suppress(InvalidStateError):
            try:
                future.set_result(function())
            # Whatever it is, the caller awaits it; what only ends threads or generators cannot be awaited.
            except BaseException as error:
                is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                future.set_exception(error if is_plain else RuntimeError(repr(error)))

    threading.Thread(target=run, name=_BESIDE, daemon=True).start()
    return await asyncio.wrap_future(future)


def has_threads_beside() -> bool:
    """Return whether a function of `run_beside` has not returned, in any server of this process."""
    return any(thread.name == _BESIDE for thread in threading.enumerate())
