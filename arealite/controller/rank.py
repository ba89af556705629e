"""One rank of an engine in a Ray actor, which executes the driver's requests.

Created by `Driver.place`. Tensors stay in Ray's object store. The driver receives a `Report` of each call; tensors go
from actor to actor. Works with any engine.
"""

import inspect
import multiprocessing.spawn
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch

from arealite.api.backends import API_KEY_ENV
from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch
from arealite.controller.messages import (
    ADDED,
    Placeholder,
    Report,
    Request,
    Selection,
    Stored,
    cut,
    load,
    select,
    store,
)
from arealite.core.waits import NamedWait
from arealite.utils.config import LOG_FILE_ENV, log_to_file
from arealite.utils.data import concat_padded, split_groups
from arealite.utils.network import free_port, host_address
from arealite.utils.process import CONTROLLER_ENV, STORE_ENV
from arealite.utils.rundir import RunDir
from arealite.utils.startup import prepare_process
from arealite.utils.status.writer import status
from arealite.weights.process_group import fill_outbox, get_outbox


class RankActor:
    """The Ray actor class of all ranks.

    `main` is the preparation data of `multiprocessing.spawn`: with it, classes and functions that the driver's script
    defines can be unpickled here. The API key is read from the job: Ray shows the environment that it gives to actors
    on command lines and in its logs.
    """

    def __init__(self, main: dict[str, Any], job_path: str):
        log = os.open(os.environ[LOG_FILE_ENV], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log, stream.fileno())
        log_to_file()
        prepare_process()
        # A Ray that the driver itself started passes the driver's environment on.
        for name in (CONTROLLER_ENV, STORE_ENV):
            os.environ.pop(name, None)
        key = RunDir(Path(job_path).parent).read_key()
        if key is not None:
            os.environ[API_KEY_ENV] = key
        multiprocessing.spawn.prepare(main)
        self.engine: Any = None
        self.objects: dict[int, Any] = {}

    def address(self) -> str:
        """Return a free address for the process group of this engine. Called on rank 0."""
        host = host_address()
        return f"{host}:{free_port(host)}"

    def make(self, rank: int, world_size: int, address: str, engine: bytes) -> None:
        """Construct the engine as this rank of its process group. Its only visible device is its own."""
        host, port = address.rsplit(":", 1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        cls, args, kwargs = pickle.loads(engine)
        self.engine = cls(*args, **kwargs)

    def keep(self, number: int, payload: bytes) -> None:
        """Keep an object, such as a dataloader or workflow, whose state lasts from request to request."""
        self.objects[number] = pickle.loads(payload)

    def get(self, name: str) -> Any:
        """Return an attribute of the engine."""
        return _check_plain(name, getattr(self.engine, name))

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of the engine."""
        setattr(self.engine, name, value)

    def pick(self, column: str, stored: Stored) -> torch.Tensor:
        """Return one column, which the driver's script reads."""
        return load(stored)[column]

    def outbox(self, name: str) -> Stored:
        """Return the weights that this trainer published for a broadcast."""
        return store(get_outbox(name))

    def fill_outbox(self, name: str, stored: Stored) -> None:
        """Publish weights of a trainer's rank in this process, which broadcasts them."""
        fill_outbox(name, load(stored).items())

    def call(self, payload: bytes, *stored: Stored) -> Any:
        """Execute a `Request`. Returns its `Report`, followed by the columns of each share.

        `stored` holds the layers of the batch: for each layer, one entry for each share of this rank.
        """
        began = time.time()
        request: Request = pickle.loads(payload)
        shares = _merge(request.layers, stored)
        batch = concat_padded(shares) if len(shares) > 1 else next(iter(shares), {})
        before = dict(batch)
        value = self._execute(request, batch)
        added = {ADDED + name: column for name, column in batch.items() if before.get(name) is not column}
        if not request.num_parts:
            if added and value is None:
                raise TrainingError(
                    f"{request.method} added {[*added]} to its batch, which controller mode would lose: mark the "
                    "method with @adds_columns (arealite.api.engine_api)"
                )
            return Report(began, time.time(), _check_plain(request.method, value))
        # Statistics of an update go to the script; only the columns that it added stay here.
        stats = _check_plain(request.method, value) if isinstance(value, list) else None
        columns = {"": value} if isinstance(value, torch.Tensor) else {} if stats is not None else dict(value or {})
        columns |= added
        shapes = tuple(share["attention_mask"].shape for share in shares)
        if len(shares) > 1:
            cuts = {name: cut(column, shapes) for name, column in columns.items()}
            parts = [{name: each[i] for name, each in cuts.items()} for i in range(len(shares))]
        elif shares:
            parts = [columns]
        else:
            parts = split_groups(columns, request.num_parts)
            shapes = tuple(part["attention_mask"].shape for part in parts)
        return Report(began, time.time(), stats, tuple(columns), shapes), *map(store, parts)

    def _execute(self, request: Request, batch: Batch) -> Any:
        known = {None: batch, **self.objects}
        args = [known[a.number] if isinstance(a, Placeholder) else a for a in request.args]
        kwargs = {k: known[a.number] if isinstance(a, Placeholder) else a for k, a in request.kwargs.items()}
        status.facts["method"] = request.method
        value = getattr(self.engine, request.method)(*args, **kwargs)
        if inspect.iscoroutine(value):
            wait = NamedWait(request.method, "its result", self.engine.config.request_timeout_s)
            value = self.engine.executor.run_coroutine(value, wait)
        if request.method == "destroy":
            # The driver kills this process next.
            status.end()
        return value


def _merge(layers: list[Selection], stored: tuple[Stored, ...]) -> list[Batch]:
    """Return the batch of each share: the selected columns of its layers, later layers over earlier ones."""
    count = len(stored) // max(1, len(layers))
    shares: list[Batch] = [{} for _ in range(count)]
    for i, item in enumerate(stored):
        names = select(item[0].specs, layers[i // count])
        columns = load(item) if names else {}
        shares[i % count] |= {name: columns[kept] for kept, name in names.items()}
    return shares


def _check_plain(name: str, value: Any) -> Any:
    """Return `value` unless it holds tensors, which must not go to the driver by accident."""
    inside = value.values() if isinstance(value, dict) else [value]
    if any(isinstance(item, torch.Tensor | torch.nn.Module) for item in inside):
        raise TrainingError(
            f"{name} gives tensors, which stay in the actors: read them in a method marked with @returns_column or "
            "@returns_batch (arealite.api.engine_api)"
        )
    return value
