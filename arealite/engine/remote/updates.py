"""Weight updates of servers: pause, load, verify, resume; also for servers that missed an update.

Owned by `Fleet`, on the executor's event loop. Guarantees: one update at a time, and a server is opened only after its
fingerprints equal what the trainer published. How weights travel is the transport's part.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.core.waits import NamedWait
from arealite.engine.remote.client import ServerClient
from arealite.engine.remote.server import Router, Server
from arealite.utils.status.waits import waiting
from arealite.utils.trace import tracing
from arealite.weights.fingerprint import Fingerprints
from arealite.weights.sync import make_transport
from arealite.weights.transport import Transport


class WeightUpdater:
    """Brings servers to the published weights. `version` is the one that all servers should hold.

    `healthy` returns the servers to update, `suspect` is called with one that fails. `lock` is held while servers
    change: no update may begin meanwhile.
    """

    def __init__(
        self,
        config: InferenceEngineConfig,
        client: ServerClient,
        router: Router,
        healthy: Callable[[], list[Server]],
        suspect: Callable[[Server, ServerError], None],
    ):
        self.config = config
        self.client = client
        self.router = router
        self._healthy = healthy
        self._suspect = suspect
        self.version = 0
        self.lock = asyncio.Lock()
        self._published: WeightUpdateMeta | None = None
        self._transport: Transport | None = None

    def transport(self, meta: WeightUpdateMeta) -> Transport:
        """Return the transport for `meta`, kept from one update to the next where possible."""
        self._transport = make_transport(meta, self._transport)
        return self._transport

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def stats(self) -> dict[str, float]:
        """Return statistics of the last update."""
        return self._transport.stats() if self._transport is not None else {}

    async def update(self, meta: WeightUpdateMeta, wait: NamedWait) -> None:
        """Bring every healthy server to `meta`, in parallel; the others get it before their next request."""
        async with self.lock:
            self._published, self.version = meta, meta.version
            self.transport(meta).forget_read()
            servers = self._healthy()
            outcomes = await self._load_all(servers, meta)
        self.handle(servers, outcomes)
        self.router.on_change()
        # With no server left, training continues as soon as one has come back with these weights.
        self.router.release(await self.router.acquire(wait))

    def handle(self, servers: list[Server], outcomes: list[BaseException | None]) -> None:
        """Suspect servers that failed; raise any other error."""
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerError):
                self._suspect(server, outcome)
            elif outcome is not None:
                raise outcome

    async def catch_up(self, server: Server) -> None:
        """Bring a server that comes back or joins to the current weights, and open it."""
        async with self.lock:
            meta, is_current = self._published, server.version == self.version
            if meta is not None and meta.is_adapter and not server.is_arealite:
                # Its version does not say that requests name the adapter: a server that left and joins again has none
                # here, and would generate with the base model.
                is_current = is_current and bool(server.adapter)
            if meta is not None and not (is_current and await self._mismatch(server, meta) is None):
                (error,) = await self._load_all([server], meta)
                if error is not None:
                    raise error
                return
            if not is_current:
                raise ServerError(
                    f"{server.address} holds version {server.version}, the job is at {self.version} and has "
                    "nothing to send"
                )
            await self._compare_with_peers(server)
            # It may have failed in the middle of an update.
            await self.client.resume(server)
            self.router.open(server)

    async def _load_all(self, servers: list[Server], meta: WeightUpdateMeta) -> list[BaseException | None]:
        try:
            await self.transport(meta).connect(self.client, servers)
        except ServerError as error:
            # Servers that are still alive are then brought up to date one by one.
            return [error for _ in servers]
        return await asyncio.gather(*(self._load(s, meta) for s in servers), return_exceptions=True)

    async def _load(self, server: Server, meta: WeightUpdateMeta) -> None:
        name = f"load v{meta.version}"
        traced = tracing.span("weights", server.address, name)
        server.begin_load(meta.version)
        with server.track_request(), traced, waiting("load", f"version {meta.version}", (server.address,)):
            if self.client.can_swap(server) and server.is_open:
                # It reads while it generates and swaps between two steps: nothing has to stop.
                await self._load_and_verify(server, meta)
                server.version = meta.version
            else:
                self.router.close(server)
                await self._load_paused(server, meta)
                server.version = meta.version
                self.router.open(server)

    async def _load_paused(self, server: Server, meta: WeightUpdateMeta) -> None:
        # A request is bound to its adapter: to continue under another one it has to be sent again.
        mode = "abort" if meta.is_adapter else self.config.pause_mode
        await self.client.pause(server, mode)
        try:
            await self._load_and_verify(server, meta)
        except (ServerError, WeightUpdateError):
            # No request may continue with half of the weights.
            with suppress(ServerError):
                await self.client.pause(server, "abort")
                await self.client.resume(server)
            raise
        await self.client.resume(server)

    async def _load_and_verify(self, server: Server, meta: WeightUpdateMeta) -> None:
        await self.transport(meta).load(self.client, server, meta)
        name = await self._mismatch(server, meta)
        if name is not None:
            raise WeightUpdateError(
                f"{server.address} says it loaded version {meta.version}, but its tensor {name} differs from what the "
                f"trainer published at {meta.path}: the update was torn or went wrong; nothing may be generated with it"
            )

    async def _mismatch(self, server: Server, meta: WeightUpdateMeta) -> str | None:
        """Return the name of a tensor in which the server differs from what `meta` published."""
        if meta.is_adapter and not server.is_arealite:
            # Other servers report no fingerprints of an adapter's tensors.
            return None
        held = await self._fingerprints(server)
        if held is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self.transport(meta).first_mismatch, meta, held)

    async def _fingerprints(self, server: Server) -> Fingerprints | None:
        with server.parse_answer():
            return await self.client.fingerprints(server)

    async def _compare_with_peers(self, server: Server) -> None:
        """Before the first update nothing is published: a server that joins must hold what the others hold."""
        peer = next((s for s in self.router.servers.values() if s.is_open), None)
        if self._published is not None or peer is None or not server.is_elastic:
            return
        if await self._fingerprints(server) != await self._fingerprints(peer):
            raise WeightUpdateError(
                f"{server.address} serves other weights than {peer.address}, or in another dtype: it can join from the "
                "first update on"
            )
