"""One inference server: what it says about itself, and its state in this process.

State changes only through methods: `Router` opens, closes and counts load, `Fleet` records failures and membership,
clients and `WeightUpdater` record what a server has loaded.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from arealite.api.errors import AReaLiteError, ServerError

_orders = itertools.count()


@dataclass(frozen=True)
class ServerInfo:
    """What a server says about itself when it is probed."""

    # "arealite" is the embedded server.
    kind: str = ""
    version: int = 0
    endpoints: frozenset[str] = frozenset()
    num_ranks: int = 1
    # Tokens of prompt and answer together; 0: unknown.
    context_length: int = 0
    device: str = "cpu"
    dtype: str = "auto"


class ServerState(NamedTuple):
    """The state of a server that rollout workers mirror."""

    address: str
    is_open: bool
    is_lost: bool
    info: ServerInfo
    adapter: str
    version: int


class Server:
    """One inference server. Used on one event loop only."""

    def __init__(self, address: str, is_open: bool = True):
        self.address = address
        self.order = next(_orders)
        self.info = ServerInfo()
        # Open servers get requests; the requests of a lost server are sent elsewhere.
        self.is_open = is_open
        self.is_lost = False
        # Whether a lease decides if the server is still a member.
        self.is_elastic = False
        # Sequences in flight.
        self.load = 0
        self.num_failures = 0
        self.last_error = ""
        # The version of the weights it holds, and the LoRA adapter that requests must name for it.
        self.version = 0
        self.adapter = ""
        # The process group for weights that it has joined.
        self.group = ""
        self._requests: set[asyncio.Task] = set()

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def is_arealite(self) -> bool:
        return self.info.kind == "arealite"

    @property
    def num_ranks(self) -> int:
        return self.info.num_ranks

    @property
    def receives_on_gpu(self) -> bool:
        """Whether a broadcast reaches it on its GPU; the embedded server receives in host memory."""
        return self.info.device == "cuda" and not self.is_arealite

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def describe(self) -> str:
        state = "open" if self.is_open else "updating its weights"
        if self.num_failures:
            state = f"failed {self.num_failures} times (last: {self.last_error})"
        return f"{self.address}: {state}, {self.load} sequences in flight"

    # --------------------------------------------------------------------------------------- state changes

    def open(self) -> None:
        self.is_open, self.is_lost = True, False

    def close(self) -> None:
        self.is_open = False

    def update_info(self, info: ServerInfo) -> None:
        """Record the answer to a probe. A server that was restarted holds version 0 and no adapter."""
        self.info, self.version = info, info.version
        if info.version == 0:
            self.adapter = ""

    def add_load(self, num_sequences: int) -> None:
        self.load += num_sequences

    def set_elastic(self, is_elastic: bool = True) -> None:
        self.is_elastic = is_elastic

    def set_version(self, version: int) -> None:
        """Record that the server holds these weights."""
        self.version = version

    def set_adapter(self, name: str) -> None:
        """Record the LoRA adapter in use; empty for whole weights."""
        self.adapter = name

    def set_group(self, name: str) -> None:
        """Record the process group for weights that the server has joined."""
        self.group = name

    def record_error(self, error: Exception) -> None:
        self.last_error = str(error)

    def record_failure(self, error: Exception) -> None:
        self.num_failures += 1
        self.last_error = str(error)

    def record_answer(self) -> None:
        """Record that a lost server answers again."""
        self.is_lost = False

    def record_recovery(self) -> None:
        self.num_failures = 0

    def mirror(self, state: ServerState) -> None:
        """In a rollout worker: take over the trainer's view of this server."""
        self.info, self.adapter, self.version = state.info, state.adapter, state.version

    def state(self) -> ServerState:
        return ServerState(self.address, self.is_open, self.is_lost, self.info, self.adapter, self.version)

    # ------------------------------------------------------------------------------------------- requests

    @contextmanager
    def track_request(self) -> Iterator[None]:
        """Around code that waits for an answer: raises `ServerError` if the server is given up meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_lost:
                raise
            task.uncancel()
            raise ServerError(f"{self.address} was given up") from None
        finally:
            self._requests.discard(task)

    @contextmanager
    def parse_answer(self) -> Iterator[None]:
        """Around code that reads an answer: a missing or wrong field becomes a `ServerError`."""
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, AReaLiteError):
                raise
            raise ServerError(f"{self.address} answered without the expected fields: {error!r}") from error

    def give_up(self) -> None:
        """Mark the server as lost: tracked requests end with a `ServerError` and are sent elsewhere."""
        self.is_lost = True
        self.cancel_requests()

    def cancel_requests(self) -> None:
        for task in self._requests:
            task.cancel()
