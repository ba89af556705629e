"""A rollout worker process: runs episodes with its own engine and sends the results back.

Started by `WorkerPool`. It runs any number of episodes at once on one event loop and answers each as it ends. Its owner
sends it which servers are open and which version they hold. It ends with its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import traceback
from typing import Any

from arealite.api.engine_api import InferenceEngine
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.diagnosis import describe
from arealite.core.episode import to_bytes
from arealite.core.event_loop import keep_running, new_event_loop
from arealite.utils.config import log_to_file
from arealite.utils.process_pool import Channel, die_with_owner


def serve(sock: socket.socket, engine_class: Any, config: Any) -> None:
    """Run a worker until its owner is gone."""
    die_with_owner()
    log_to_file()
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    task = loop.create_task(_Worker(engine_class(config), Channel(sock)).run())
    task.add_done_callback(lambda _: loop.stop())
    # A workflow may stop the loop.
    while not task.done():
        keep_running(loop)
    task.result()


class _Worker:
    """The receiving end of `RolloutWorker`."""

    def __init__(self, engine: Any, channel: Channel):
        self.engine = engine
        self.channel = channel
        self.workflows: dict[int, RolloutWorkflow] = {}
        self.tasks: dict[int, asyncio.Task] = {}

    async def run(self) -> None:
        self.channel.send("ready")
        # The socket closes when the owner is gone.
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                await self._handle(*await self.channel.receive())

    async def _handle(self, kind: str, number: int, payload: Any) -> None:
        if kind == "servers":
            await self.engine.apply_server_state(payload)
        elif kind == "workflow":
            self.workflows[number] = payload
        elif kind == "ping":
            self.channel.send(("pong", number, None))
        elif kind == "cancel" and number in self.tasks:
            self.tasks[number].cancel()
        elif kind == "run":
            workflow, data = self.workflows[payload[0]], payload[1]
            task = asyncio.create_task(self._run_episode(number, workflow, data), name=f"episode-{number}")
            self.tasks[number] = task
            task.add_done_callback(lambda _: self.tasks.pop(number, None))

    async def _run_episode(self, number: int, workflow: RolloutWorkflow, data: dict[str, Any]) -> None:
        engine: InferenceEngine = self.engine
        try:
            batch = await workflow.arun_episode(engine, data)
            self.channel.send(("result", number, None if batch is None else to_bytes(batch)))
        # A workflow may raise anything, also CancelledError; the owner records it.
        except BaseException as error:
            self.channel.send(("error", number, (describe(error), traceback.format_exc(limit=-8))))
