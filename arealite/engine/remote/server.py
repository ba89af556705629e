"""Inference servers of a job: their state in this process, and the choice of one for a request.

Used on the executor's event loop. `Fleet` opens and closes servers and records failures and membership, clients and
`WeightUpdater` record what a server has loaded. A request that finds no server open waits in `Router.acquire`.
"""

import asyncio
import heapq
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from arealite.api.errors import AReaLiteError, ServerError
from arealite.core.waits import NamedWait

MAX_AFFINITIES = 65536
# A cached prefix is worth a queue this much longer than the shortest one.
AFFINITY_SLACK = 16


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


def new_series() -> str:
    """Return a name that no other process and no other load has."""
    return secrets.token_hex(4)


class ServerState(NamedTuple):
    """The state of a server that rollout workers mirror."""

    address: str
    is_open: bool
    is_lost: bool
    info: ServerInfo
    adapter: str
    version: int
    loads: str


class Server:
    """One inference server. Used on one event loop only."""

    def __init__(self, address: str, number: int = 0):
        self.address = address
        # Among servers with the same load the one that was added first is chosen.
        self.number = number
        self.info = ServerInfo()
        # Open servers get requests; the requests of a lost server are sent elsewhere.
        self.is_open = False
        self.is_lost = False
        # This process has told it to stop decoding, and not yet to continue.
        self.is_paused = False
        # This process has told it to free its KV cache, and not yet to allocate it again.
        self.is_released = False
        # Whether a lease decides if the server is still a member.
        self.is_elastic = False
        # Sequences in flight.
        self.load = 0
        self.num_failures = 0
        self.last_error = ""
        # Says how much slower it is than the others, if it is.
        self.slow = ""
        # The version of the weights it holds, and the LoRA adapter that requests must name for it.
        self.version = 0
        self.adapter = ""
        # Names the series of versions, each loaded once, that it is in.
        self.loads = new_series()
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

    @property
    def cache_key(self) -> str:
        """What the prefix cache of a foreign server must keep apart; it survives an update in place.

        The version alone is not enough: a run that goes back to a checkpoint trains the same versions again.
        """
        return f"v{self.version}-{self.loads}"

    def begin_load(self, version: int) -> None:
        """Start a new series if the server has had this version already, perhaps with other weights."""
        if version <= self.version:
            self.loads = new_series()

    def describe(self) -> str:
        state = "open" if self.is_open else "updating its weights"
        if self.num_failures:
            state = f"failed {self.num_failures} times (last: {self.last_error})"
        return f"{self.address}: {state}, {self.load} sequences in flight"

    def update_info(self, info: ServerInfo) -> None:
        """Record the answer to a probe. A server that was restarted holds version 0 and no adapter."""
        self.info, self.version = info, info.version
        if info.version == 0:
            self.adapter = ""

    def state(self) -> ServerState:
        return ServerState(self.address, self.is_open, self.is_lost, self.info, self.adapter, self.version, self.loads)

    @contextmanager
    def track_request(self) -> Iterator[None]:
        """Around code that waits for an answer: raises `ServerError` if the server is lost meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_lost:
                raise
            task.uncancel()
            raise ServerError(f"{self.address} was lost before it answered") from None
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

    def mark_lost(self) -> None:
        """Mark the server as lost: tracked requests end with a `ServerError` and are sent elsewhere."""
        self.is_lost = True
        self.cancel_requests()

    def cancel_requests(self) -> None:
        for task in self._requests:
            task.cancel()


class Router:
    """The servers of the job. Not thread-safe: used on one event loop only."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self._num_added = 0
        # A heap of (load, number, server): every open server with its present load, and entries that are outdated. A
        # scan of all servers for each request would take most of the event loop's time with hundreds of them.
        self._by_load: list[tuple[int, int, Server]] = []
        self._affinity: OrderedDict[str, Server] = OrderedDict()
        # Set, and replaced by a new event, when a server opens.
        self._opened = asyncio.Event()
        # Called after a server was opened or closed.
        self.on_change: Callable[[], None] = lambda: None

    def add(self, address: str) -> Server:
        """Add a server unless it is known. It gets requests only after `open`."""
        server = self.servers.get(address)
        if server is None:
            self._num_added += 1
            server = self.servers[address] = Server(address, self._num_added)
        return server

    def remove(self, address: str) -> None:
        """Remove a server. Its answers are still accepted; new requests go elsewhere."""
        server = self.servers.pop(address, None)
        if server is not None:
            self.close(server)

    def close(self, server: Server) -> None:
        server.is_open = False
        self.on_change()

    def open(self, server: Server) -> None:
        server.is_open, server.is_lost = True, False
        self._change_load(server, 0)
        self._opened.set()
        self._opened = asyncio.Event()
        self.on_change()

    async def acquire(
        self, wait: NamedWait, weight: int = 1, affinity: str | None = None, avoid: Server | None = None
    ) -> Server:
        """Choose a server and add `weight` to its load; waits while none is open. Pair with `release`."""
        while (server := self.try_acquire(weight, affinity, avoid)) is None:
            if wait.expired:
                raise wait.error(self.describe(), "no server is healthy: see the servers' logs")
            with suppress(TimeoutError):
                async with asyncio.timeout(wait.left_s):
                    await self._opened.wait()
        return server

    def try_acquire(self, weight: int = 1, affinity: str | None = None, avoid: Server | None = None) -> Server | None:
        """As `acquire`, but return None if no server is open."""
        server = self._choose(affinity, avoid)
        if server is not None:
            self._change_load(server, weight)
        return server

    def release(self, server: Server, weight: int = 1) -> None:
        self._change_load(server, -weight)

    def describe(self) -> str:
        return "; ".join(s.describe() for s in self.servers.values()) or "no server is known"

    def _is_usable(self, server: Server) -> bool:
        return server.is_open and self.servers.get(server.address) is server

    def _change_load(self, server: Server, weight: int) -> None:
        server.load += weight
        if not server.is_open:
            return
        heap = self._by_load
        heapq.heappush(heap, (server.load, server.number, server))
        if len(heap) > 4 * len(self.servers) + 16:
            heap[:] = [(s.load, s.number, s) for s in self.servers.values() if s.is_open]
            heapq.heapify(heap)

    def _least_loaded(self, avoid: Server | None) -> Server | None:
        """Return the open server with the least load; `avoid` only if there is no other."""
        heap, avoided = self._by_load, None
        while heap:
            entry = heap[0]
            load, _, server = entry
            if server is avoid and avoided is None and load == server.load and self._is_usable(server):
                avoided = entry
            elif server is not avoid and load == server.load and self._is_usable(server):
                break
            heapq.heappop(heap)
        best = heap[0][2] if heap else avoided and avoided[2]
        if avoided is not None:
            heapq.heappush(heap, avoided)
        return best

    def _choose(self, affinity: str | None, avoid: Server | None) -> Server | None:
        best = self._least_loaded(avoid)
        if best is None or affinity is None:
            return best
        known = self._affinity.get(affinity)
        if (
            known is not None
            and known is not avoid
            and known.load <= best.load + AFFINITY_SLACK
            and self._is_usable(known)
        ):
            best = known
        self._affinity[affinity] = best
        self._affinity.move_to_end(affinity)
        if len(self._affinity) > MAX_AFFINITIES:
            self._affinity.popitem(last=False)
        return best
