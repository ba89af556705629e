"""Event loops of the trainer's process, of rollout workers and of the embedded server."""

import asyncio
import importlib
import importlib.util
import logging

logger = logging.getLogger("arealite.executor")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an uvloop event loop if uvloop is installed, else asyncio's."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    return importlib.import_module("uvloop").new_event_loop()


def keep_running(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped.

    SystemExit in a task that a workflow started (a `gather`, a coroutine reward) would end the loop and all other
    episodes with it. Whatever awaits that task gets the same error, so only that episode fails.
    """
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            logger.warning("a task that a workflow started raised %r", error)
