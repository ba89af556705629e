"""One rank of an engine, in a Ray actor: does what the driver asks and leaves tensors in Ray's object store.

Made by `Driver.place`. The driver gets a `Head` of each call (a plain value, or the names of columns); the tensors themselves go from actor to
actor. Knows no engine in particular.
"""

from __future__ import annotations

import inspect
import multiprocessing.spawn
import os
import pickle
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch
from arealite.controller.lazy import ADDED, Selection, cut, select
from arealite.core.waits import NamedWait
from arealite.utils.config import LOG_FILE_ENV, log_to_file
from arealite.utils.data import concat_padded, split_groups
from arealite.utils.distributed import from_bytes, to_bytes
from arealite.utils.network import free_port, host_address
from arealite.weights.process_group import get_outbox, put_outbox

# Columns as they lie in the object store: (name, type, shape) of each, and all their bytes.
Stored = tuple[list[tuple[str, str, list[int]]], np.ndarray]


class Head(NamedTuple):
    """What the driver learns of a call: when it ran, and its plain result, or the columns that it left and their shape in each share."""

    began: float
    ended: float
    value: Any = None
    columns: tuple[str, ...] = ()
    shapes: tuple[torch.Size, ...] = ()


class Given(NamedTuple):
    """Stands in a request's arguments for the batch (`number` None) or for an object that was sent before."""

    number: int | None = None


@dataclass
class Request:
    """A method to call. `layers` says which columns of each stored layer go into the batch, and under which names."""

    method: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    layers: list[Selection] = field(default_factory=list)
    num_parts: int = 0  # of how many shares it leaves columns; 0: it has a plain result


class RankActor:
    """`main` is what `multiprocessing` tells a child of its parent's script, so that classes and functions defined there are found here."""

    def __init__(self, main: dict[str, Any]):
        log = os.open(os.environ[LOG_FILE_ENV], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log, stream.fileno())
        log_to_file()
        multiprocessing.spawn.prepare(main)
        self.engine: Any = None
        self.kept: dict[int, Any] = {}

    def address(self) -> str:
        """Where the ranks of this engine meet, if this is the first."""
        host = host_address()
        return f"{host}:{free_port(host)}"

    def make(self, rank: int, world_size: int, address: str, engine: bytes) -> None:
        """Construct the engine as this rank of its group; Ray shows each actor its own device alone."""
        host, port = address.rsplit(":", 1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        cls, args, kwargs = pickle.loads(engine)
        self.engine = cls(*args, **kwargs)

    def keep(self, number: int, thing: bytes) -> None:
        """Have an object that later requests name: a dataloader or workflow goes on from call to call."""
        self.kept[number] = pickle.loads(thing)

    def get(self, name: str) -> Any:
        return _plain(name, getattr(self.engine, name))

    def set(self, name: str, value: Any) -> None:
        setattr(self.engine, name, value)

    def pick(self, column: str, stored: Stored) -> torch.Tensor:
        """One column for the driver, which wants to see its numbers."""
        return load(stored)[column]

    def outbox(self, name: str) -> Stored:
        """Weights that this trainer published for a broadcast."""
        return store(get_outbox(name))

    def fill_outbox(self, name: str, stored: Stored) -> None:
        put_outbox(name, load(stored).items())

    def call(self, payload: bytes, *stored: Stored) -> Any:
        """`Head`, then the columns of each share. `stored`: for each layer of the batch, each of this rank's shares."""
        began = time.time()
        request: Request = pickle.loads(payload)
        shares = _merge(request.layers, stored)
        batch = concat_padded(shares) if len(shares) > 1 else next(iter(shares), {})
        before = dict(batch)
        given = {None: batch, **self.kept}
        args = [given[a.number] if isinstance(a, Given) else a for a in request.args]
        kwargs = {k: given[a.number] if isinstance(a, Given) else a for k, a in request.kwargs.items()}
        value = getattr(self.engine, request.method)(*args, **kwargs)
        if inspect.iscoroutine(value):
            wait = NamedWait(request.method, "its result", self.engine.config.request_timeout_s)
            value = self.engine.executor.run_coroutine(value, wait)
        if not request.num_parts:
            return Head(began, time.time(), _plain(request.method, value))
        columns = {"": value} if isinstance(value, torch.Tensor) else dict(value or {})
        columns |= {ADDED + k: v for k, v in batch.items() if before.get(k) is not v}
        shapes = tuple(share["attention_mask"].shape for share in shares)
        if len(shares) > 1:
            cuts = {name: cut(column, shapes) for name, column in columns.items()}
            parts = [{name: each[i] for name, each in cuts.items()} for i in range(len(shares))]
        elif shares:
            parts = [columns]
        else:
            parts = split_groups(columns, request.num_parts)
            shapes = tuple(part["attention_mask"].shape for part in parts)
        return Head(began, time.time(), None, tuple(columns), shapes), *map(store, parts)


def store(columns: Batch) -> Stored:
    header, data = to_bytes(columns)
    return header, data.numpy()


def load(stored: Stored) -> Batch:
    header, data = stored
    return from_bytes(header, torch.from_numpy(data.copy()))  # Ray's memory is read-only


def _merge(layers: list[Selection], stored: tuple[Stored, ...]) -> list[Batch]:
    """The batch of each share: its layers one over the other."""
    count = len(stored) // max(1, len(layers))
    shares: list[Batch] = [{} for _ in range(count)]
    for i, item in enumerate(stored):
        names = select([name for name, _, _ in item[0]], layers[i // count])
        columns = load(item) if names else {}
        shares[i % count] |= {name: columns[kept] for kept, name in names.items()}
    return shares


def _plain(method: str, value: Any) -> Any:
    """Tensors do not go to the driver by accident."""
    inside = value.values() if isinstance(value, dict) else [value]
    if any(isinstance(item, torch.Tensor | torch.nn.Module) for item in inside):
        raise TrainingError(
            f"{method} is tensors, which stay in the actors: read them in a method annotated with `-> torch.Tensor` or `-> Batch`"
        )
    return value
