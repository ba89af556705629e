"""A rollout worker: a process that plays episodes with an engine of its own and streams the results back.

Started by `WorkerPool`. Reads jobs from a socket, runs any number of them at once on one event loop, and answers each as it ends. Told by its owner
which servers are open and which version they hold. Ends with its owner, whatever happens.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import traceback
from typing import Any, Protocol

import numpy as np
import torch

from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import Batch
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.diagnosis import describe
from arealite.core.event_loop import keep_running, new_event_loop
from arealite.utils.child import die_with_owner
from arealite.utils.config import log_to_file

_HEADER = struct.Struct("<Q")
_MAX_MESSAGE_BYTES = 1 << 34
_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16}


class WorkerEngine(Protocol):
    """What a worker needs of an engine besides generation."""

    async def follow(self, state: dict[str, Any]) -> None:
        """Take over which servers are open, and their version."""
        ...


async def read_message(reader: asyncio.StreamReader) -> Any:
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if size > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes cannot be right")
    return pickle.loads(await reader.readexactly(size))  # from our own process, over a socket pair


def write_message(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    writer.write(_HEADER.pack(len(data)))
    writer.write(data)


def pack(batch: Batch) -> dict[str, tuple[np.ndarray, torch.dtype]]:
    """Tensors as arrays with their types; what numpy does not know (bfloat16, float8) as integers, bit for bit."""
    return {k: (_storable(v).numpy(force=True), v.dtype) for k, v in batch.items()}


def unpack(arrays: dict[str, tuple[np.ndarray, torch.dtype]]) -> Batch:
    return {k: torch.from_numpy(array).view(dtype) for k, (array, dtype) in arrays.items()}


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dtype.is_floating_point or tensor.dtype in _NUMPY_FLOATS:
        return tensor
    return tensor.detach().view(_INTEGER_OF_SIZE[tensor.dtype.itemsize])


def serve(sock: socket.socket, engine_class: Any, config: Any) -> None:
    """A worker's life."""
    die_with_owner()
    log_to_file()
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    life = loop.create_task(_Worker(engine_class(config)).run(sock))
    life.add_done_callback(lambda _: loop.stop())
    while not life.done():  # a workflow may have stopped it
        keep_running(loop)
    life.result()


class _Worker:
    def __init__(self, engine: Any):
        self.engine: Any = engine
        self.workflows: dict[int, RolloutWorkflow] = {}
        self.tasks: dict[int, asyncio.Task] = {}

    async def run(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        write_message(writer, ("ready", 0, None))
        try:
            while True:
                kind, number, payload = await read_message(reader)
                if kind == "servers":
                    await self.engine.follow(payload)
                elif kind == "workflow":
                    self.workflows[number] = payload
                elif kind == "ping":
                    write_message(writer, ("pong", number, None))
                elif kind == "cancel":
                    self._cancel(number)
                elif kind == "play":
                    workflow, data = self.workflows[payload[0]], payload[1]
                    task = asyncio.create_task(self._play(writer, number, workflow, data), name=f"episode-{number}")
                    self.tasks[number] = task
                    task.add_done_callback(lambda _, n=number: self.tasks.pop(n, None))
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the owner has gone

    def _cancel(self, number: int) -> None:
        task = self.tasks.get(number)
        if task is not None:
            task.cancel()

    async def _play(
        self, writer: asyncio.StreamWriter, number: int, workflow: RolloutWorkflow, data: dict[str, Any]
    ) -> None:
        engine: InferenceEngine = self.engine
        try:
            batch = await workflow.arun_episode(engine, data)
            write_message(writer, ("result", number, None if batch is None else pack(batch)))
        except BaseException as error:  # it may raise anything, also CancelledError; the owner books it
            told = (describe(error), traceback.format_exc(limit=-8))
            write_message(writer, ("error", number, told))
        await writer.drain()
