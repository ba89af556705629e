"""Which server takes a request: the least loaded one that is open, the same one again for a known prefix.

Lives on the executor's event loop. Who opens and closes servers is `Fleet`; whoever finds none open waits here, without polling, until one is.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from arealite.api.errors import AReaLiteError, ServerError
from arealite.core.waits import NamedWait

MAX_AFFINITIES = 65536
# A prefix kept warm is worth a queue this much longer than the shortest one.
AFFINITY_SLACK = 16


@dataclass(eq=False)
class Server:
    """One inference server as the client sees it. `load` counts sequences in flight; `requests` the tasks that wait for it."""

    address: str
    is_open: bool = True
    load: int = 0
    failures: int = 0
    last_error: str = ""
    version: int = 0  # of the weights it holds
    kind: str = ""  # as its client has found out: "arealite" is the embedded one
    adapter: str = ""  # name of the LoRA adapter that `version` is, where requests must name it
    endpoints: frozenset[str] = frozenset()
    group: str = ""  # the process group it has joined for weights
    num_ranks: int = 1
    context: int = 0  # tokens of prompt and answer together; 0: it does not tell
    device: str = "cpu"
    dtype: str = "auto"
    is_elastic: bool = False
    is_lost: bool = False
    requests: set[asyncio.Task] = field(default_factory=set)
    order: int = field(default_factory=itertools.count().__next__)

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Around whatever waits for an answer: if the server is given up meanwhile, that ends with a `ServerError`."""
        task = asyncio.current_task()
        assert task is not None
        self.requests.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_lost:
                raise
            task.uncancel()
            raise ServerError(f"{self.address} was given up") from None
        finally:
            self.requests.discard(task)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around whatever reads an answer: one without what belongs into it is a `ServerError`."""
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, AReaLiteError):
                raise
            raise ServerError(f"{self.address} answered without the expected fields: {error!r}") from error

    def give_up(self) -> None:
        """What waits for it goes elsewhere."""
        self.is_lost = True
        for task in self.requests:
            task.cancel()

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def is_arealite(self) -> bool:
        return self.kind == "arealite"

    def describe(self) -> str:
        state = "open" if self.is_open else "updating its weights"
        if self.failures:
            state = f"failed {self.failures} times (last: {self.last_error})"
        return f"{self.address}: {state}, {self.load} sequences in flight"


class Router:
    """The servers of the job. Not thread-safe: used on one event loop only."""

    def __init__(self, addresses: Iterable[str] = ()):
        self.servers: dict[str, Server] = {}
        self._affinity: OrderedDict[str, Server] = OrderedDict()
        self._waiters: dict[asyncio.Future[None], None] = {}  # in order of arrival
        self.on_change: Callable[[], None] = lambda: None
        for address in addresses:
            self.add(address)

    def add(self, address: str, *, is_open: bool = True) -> Server:
        """A server joins; with `is_open=False` it gets requests only after `open`."""
        if address not in self.servers:
            self.servers[address] = Server(address, is_open)
            self._wake()
        return self.servers[address]

    def remove(self, address: str) -> None:
        """A server leaves; what it still answers is taken, new requests go elsewhere."""
        server = self.servers.pop(address, None)
        if server is not None:
            self.close(server)

    def close(self, server: Server) -> None:
        server.is_open = False
        self.on_change()

    def open(self, server: Server) -> None:
        server.is_open, server.is_lost = True, False
        self._wake()
        self.on_change()

    async def acquire(
        self, wait: NamedWait, weight: int = 1, affinity: str | None = None, avoid: Server | None = None
    ) -> Server:
        """Choose a server and add `weight` to its load; waits while none is open. Pair with `release`."""
        while (server := self._choose(affinity, avoid)) is None:
            if wait.expired:
                raise wait.error(self.describe(), "no server is healthy: see the servers' logs")
            await self._wait_for_change(wait)
        server.load += weight
        return server

    def release(self, server: Server, weight: int = 1) -> None:
        server.load -= weight

    def describe(self) -> str:
        return "; ".join(s.describe() for s in self.servers.values()) or "no server is known"

    def _choose(self, affinity: str | None, avoid: Server | None) -> Server | None:
        usable = [s for s in self.servers.values() if s.is_open]
        if not usable:
            return None
        best = min(usable, key=lambda s: (s is avoid, s.load, s.order))
        if affinity is None:
            return best
        known = self._affinity.get(affinity)
        if known in usable and known is not avoid and known.load <= best.load + AFFINITY_SLACK:
            best = known
        self._affinity[affinity] = best
        self._affinity.move_to_end(affinity)
        if len(self._affinity) > MAX_AFFINITIES:
            self._affinity.popitem(last=False)
        return best

    async def _wait_for_change(self, wait: NamedWait) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiters[future] = None
        try:
            async with asyncio.timeout(wait.left_s):
                await future
        except TimeoutError:
            return
        finally:
            self._waiters.pop(future, None)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for future in waiters:
            if not future.done():
                future.set_result(None)
