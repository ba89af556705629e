"""Chooses the server of a request: the least loaded open one, or the one with the prefix cached.

Lives on the executor's event loop. `Fleet` opens and closes servers; a request that finds none open waits here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

from arealite.core.waits import NamedWait
from arealite.engine.remote.server import Server

MAX_AFFINITIES = 65536
# A cached prefix is worth a queue this much longer than the shortest one.
AFFINITY_SLACK = 16


class Router:
    """The servers of the job. Not thread-safe: used on one event loop only."""

    def __init__(self, addresses: Iterable[str] = ()):
        self.servers: dict[str, Server] = {}
        self._affinity: OrderedDict[str, Server] = OrderedDict()
        # In order of arrival.
        self._waiters: dict[asyncio.Future[None], None] = {}
        # Called after a server was opened or closed.
        self.on_change: Callable[[], None] = lambda: None
        for address in addresses:
            self.add(address)

    def add(self, address: str, *, is_open: bool = True) -> Server:
        """Add a server; with `is_open=False` it gets requests only after `open`."""
        if address not in self.servers:
            self.servers[address] = Server(address, is_open)
            self._wake()
        return self.servers[address]

    def remove(self, address: str) -> None:
        """Remove a server. Its answers are still accepted; new requests go elsewhere."""
        server = self.servers.pop(address, None)
        if server is not None:
            self.close(server)

    def close(self, server: Server) -> None:
        server.close()
        self.on_change()

    def open(self, server: Server) -> None:
        server.open()
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
        server.add_load(weight)
        return server

    def release(self, server: Server, weight: int = 1) -> None:
        server.add_load(-weight)

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
