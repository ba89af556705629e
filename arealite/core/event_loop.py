"""The event loops that workflows run on, in the trainer's process and in rollout workers."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging

logger = logging.getLogger("arealite.executor")


def new_event_loop() -> asyncio.AbstractEventLoop:
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    return importlib.import_module("uvloop").new_event_loop()


def keep_running(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped.

    A task of a workflow's own (a `gather`, a coroutine reward) that exits would end it, and all other episodes with it. Whoever awaits that task is
    given the same error: there it costs an episode.
    """
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            logger.warning("a task that a workflow started raised %r", error)
