"""Which server takes a request: the least loaded one that is healthy and open, the same one again for a known prefix.

Lives on the executor's event loop and is used by the remote engines. A server that fails backs off for longer each time and returns by itself;
during a weight update it is closed and nobody is sent to it. Whoever finds no server waits, without polling, until one opens.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from arealite.api.errors import ServerError
from arealite.core.waits import NamedWait

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_AFFINITIES = 65536
# A prefix kept warm is worth a queue this much longer than the shortest one.
AFFINITY_SLACK = 16


@dataclass(eq=False)
class Server:
    """One inference server as the client sees it. `load` counts sequences in flight."""

    address: str
    load: int = 0
    failures: int = 0
    retry_at: float = 0.0
    is_open: bool = True
    version: int | None = None
    last_error: str = ""
    is_arealite: bool = False
    order: int = field(default_factory=itertools.count().__next__)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def describe(self) -> str:
        state = "open" if self.is_open else "updating its weights"
        if self.failures:
            wait_s = max(0.0, self.retry_at - time.monotonic())
            state = f"failed {self.failures} times (last: {self.last_error}), next try in {wait_s:.0f} s"
        return f"{self.address}: {state}, {self.load} sequences in flight"


class Router:
    """The servers of the job. Not thread-safe: used on one event loop only."""

    def __init__(self, addresses: Iterable[str] = ()):
        self.servers: dict[str, Server] = {}
        self._affinity: OrderedDict[str, Server] = OrderedDict()
        self._waiters: list[asyncio.Future[None]] = []
        for address in addresses:
            self.add(address)

    def add(self, address: str, *, is_open: bool = True) -> Server:
        """A server joins; with `is_open=False` it gets requests only after `open`."""
        if address not in self.servers:
            self.servers[address] = Server(address, is_open=is_open)
            self._wake()
        return self.servers[address]

    def remove(self, address: str) -> None:
        """A server leaves; requests that it still answers are taken, new ones go elsewhere."""
        server = self.servers.pop(address, None)
        if server is not None:
            server.is_open = False
        self._wake()

    async def acquire(
        self,
        wait: NamedWait,
        weight: int = 1,
        affinity: str | None = None,
        avoid: Server | None = None,
    ) -> Server:
        """Choose a server and add `weight` to its load; waits while there is none. Pair with `release`."""
        while True:
            server = self._choose(affinity, avoid)
            if server is not None:
                server.load += weight
                return server
            if wait.expired:
                raise wait.error(self.describe(), "no server is healthy: see the servers' logs")
            await self._wait_for_change(wait)

    def release(self, server: Server, weight: int = 1) -> None:
        server.load -= weight

    def succeeded(self, server: Server) -> None:
        server.failures = 0

    def failed(self, server: Server, error: ServerError) -> None:
        """Send nobody there for a while, twice as long each time."""
        now = time.monotonic()
        server.last_error = str(error)
        if now < server.retry_at:
            return  # many requests fail together when a server dies: that is one failure
        server.failures += 1
        backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (server.failures - 1))
        server.retry_at = now + backoff_s
        asyncio.get_running_loop().call_later(backoff_s + 0.001, self._wake)

    def close(self, server: Server) -> None:
        server.is_open = False

    def open(self, server: Server) -> None:
        server.is_open = True
        self._wake()

    def describe(self) -> str:
        return "; ".join(s.describe() for s in self.servers.values()) or "no server is known"

    def _choose(self, affinity: str | None, avoid: Server | None) -> Server | None:
        now = time.monotonic()
        usable = [s for s in self.servers.values() if s.is_open and s.retry_at <= now]
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
        self._waiters.append(future)
        try:
            async with asyncio.timeout(wait.left_s):
                await future
        except TimeoutError:
            self._waiters.remove(future)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)
