"""Tracks health, membership and weight version of all inference servers of a job.

Lives on the executor's event loop, owned by `RemoteEngine`. Guarantees: a server is open only while it answers and
holds the current weights; a server that fails is retried with backoff and gets the weights it missed first; one that
does not answer health checks for `health_timeout_s` loses its requests to others; after an update every server's
fingerprints equal what the trainer published, or the run stops and the tensor is named.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from arealite.api.backends import API_KEY_ENV
from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError, HttpError, ServerError, WeightUpdateError
from arealite.core.ledger.store import Level
from arealite.core.waits import NamedWait
from arealite.engine.remote.client import ServerClient
from arealite.engine.remote.laggards import Laggards
from arealite.engine.remote.membership import POLL_INTERVAL_S, Members
from arealite.engine.remote.server import Router, Server, ServerState
from arealite.engine.remote.updates import WeightUpdater
from arealite.utils.console import show_message
from arealite.utils.json_client import UnreachableError

logger = logging.getLogger("arealite.fleet")

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
# A single refusal may be chance: the trainer wrote the next weights while the server read.
REFUSALS_BEFORE_WARNING = 3


class Fleet:
    """All inference servers of a job."""

    def __init__(self, config: InferenceEngineConfig, client: ServerClient, members: Members | None = None):
        self.config = config
        self.client = client
        self.members = members
        self.router = Router()
        self.updater = WeightUpdater(config, client, self.router, self._healthy, self.suspect)
        self._laggards = Laggards(self.router)
        self._tasks: set[asyncio.Task] = set()
        # Servers that are being probed until they are ready.
        self._recovering: set[Server] = set()
        # Cleared from `offload` to `onload`.
        self._onloaded = asyncio.Event()
        self._onloaded.set()
        # In a rollout worker: the servers that the trainer has open, and the versions they hold.
        self._mirrored: dict[str, int] | None = None
        # Called with what happens to servers.
        self.on_event: Callable[[str, Level], None] = lambda text, level: None

    async def connect(self, addresses: list[str], wait: NamedWait) -> None:
        """Wait for the servers that the job starts with, then monitor them.

        A server that has died is not waited for: the launcher starts another one, which joins.
        """
        servers = [self.router.add(address) for address in addresses]
        self._recovering.update(servers)
        if self.members is not None:
            for server in servers:
                # Those of `rollout.server_addrs` hold no lease: one that fails is probed until it is back.
                server.is_elastic = self.members.has_launcher and server.address not in self.config.server_addrs
            self._spawn(self._watch_members(self.members), "membership")
        await asyncio.gather(*(self._wait_until_healthy(server, wait) for server in servers))
        for server in servers:
            self._compare_context_lengths(server)
        self.router.release(await self.router.acquire(wait))

    async def close(self) -> None:
        """Stop all background tasks and cancel all requests."""
        for server in self.router.servers.values():
            server.cancel_requests()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.updater.close()
        if self.members is not None:
            self.members.close()

    # ------------------------------------------------------------------------------- mirrors in rollout workers

    def state(self) -> dict[str, Any]:
        """Return what rollout workers must know: the servers, what each one holds, and the newest version."""
        servers = [server.state() for server in self.router.servers.values()]
        return {"version": max((s.version for s in servers), default=0), "servers": servers}

    @property
    def newest_version(self) -> int:
        """The newest version that an answer may have; a rollout worker learns of an update after the servers."""
        return self.updater.version + (self._mirrored is not None)

    def mirror(self, state: dict[str, Any]) -> None:
        """In a rollout worker: take over the state of the trainer's fleet."""
        servers: list[ServerState] = state["servers"]
        self.updater.version = state["version"]
        self._mirrored = {s.address: s.version for s in servers if s.is_open}
        for address in set(self.router.servers) - {s.address for s in servers}:
            self._remove(self.router.servers[address])
        for mirrored in servers:
            server = self.router.add(mirrored.address)
            server.info, server.adapter, server.version = mirrored.info, mirrored.adapter, mirrored.version
            server.loads = mirrored.loads
            (self.router.open if mirrored.is_open else self.router.close)(server)
            if mirrored.is_lost and not server.is_lost:
                server.mark_lost()

    # -------------------------------------------------------------------------------------------- memory

    @property
    def is_offloaded(self) -> bool:
        return not self._onloaded.is_set()

    async def offload(self) -> None:
        """Have all servers free their KV caches; one that recovers or joins before `onload` does so too."""
        self._onloaded.clear()
        await self.for_all(self.release_memory)

    async def onload(self) -> None:
        """Have all servers allocate their KV caches again."""
        self._onloaded.set()
        await self.for_all(self.resume_memory)

    async def release_memory(self, server: Server) -> None:
        """Interrupt requests in flight (they continue after `resume_memory`) and free the server's KV cache."""
        self.router.close(server)
        await self.client.pause(server, "abort")
        await self.client.release_memory(server)

    async def resume_memory(self, server: Server) -> None:
        """Allocate the server's KV cache again and open it."""
        await self.client.resume_memory(server)
        await self.client.resume(server)
        self.router.open(server)

    async def for_all(self, act: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        """Call `act` for every healthy server; one that fails recovers as usual, the others go on."""
        async with self.updater.lock:
            servers = self._healthy()
            outcomes = await asyncio.gather(*map(act, servers), return_exceptions=True)
        self.updater.handle(servers, outcomes)

    def _healthy(self) -> list[Server]:
        return [s for s in self.router.servers.values() if s not in self._recovering]

    # --------------------------------------------------------------------------------- failure and recovery

    def suspect(self, server: Server, error: ServerError) -> None:
        """Close a server where a request or an update failed, until it has answered a probe."""
        self.router.close(server)
        server.last_error = str(error)
        if server in self._recovering or server.address not in self.router.servers:
            return
        server.num_failures += 1
        self.on_event(f"{server.address} failed: {error}", "warning")
        self._recovering.add(server)
        self._spawn(self._recover(server), f"recover {server.address}")

    def lose(self, server: Server, error: ServerError) -> None:
        """Mark a silent server as lost: its requests are sent elsewhere."""
        logger.error("%s is lost: %s", server.address, error)
        self.on_event(f"{server.address} is lost: its requests are sent elsewhere", "warning")
        server.mark_lost()
        self.suspect(server, error)

    async def _recover(self, server: Server) -> None:
        """Probe until the server answers, bring its weights up to date, open it."""
        backoff_s, num_refusals = FIRST_BACKOFF_S, 0
        try:
            while self.router.servers.get(server.address) is server:
                try:
                    await self._probe(server)
                    server.is_lost = False
                    with server.track_request():
                        if self.is_offloaded:
                            await self.release_memory(server)
                            await self._onloaded.wait()
                            # It may have failed meanwhile.
                            continue
                        await self._catch_up(server)
                    if self.is_offloaded:
                        continue
                except (ServerError, WeightUpdateError, ConfigError) as error:
                    server.last_error = str(error)
                    logger.warning("%s is not ready: %s", server.address, error)
                    num_refusals += _is_refusal(error)
                    if num_refusals == REFUSALS_BEFORE_WARNING:
                        show_message(f"warning: {server.address} gets no requests: {error}")
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
                    continue
                if not server.num_failures:
                    self._compare_context_lengths(server)
                server.num_failures = 0
                self.on_event(f"{server.address} is open with version {server.version}", "info")
                return
        finally:
            self._recovering.discard(server)

    async def _probe(self, server: Server) -> None:
        try:
            with server.parse_answer():
                server.update_info(await self.client.probe(server))
        except UnreachableError:
            # Its process is gone; another one has released nothing.
            server.is_released = False
            raise

    async def _catch_up(self, server: Server) -> None:
        """Bring a server to the current weights and open it."""
        if self._mirrored is None:
            await self.client.reclaim_memory(server)
            await self.updater.catch_up(server)
            return
        # In a rollout worker. The trainer alone updates servers.
        if server.version < self._mirrored.get(server.address, server.version + 1):
            raise ServerError(f"{server.address} is not open: the trainer's log says why")
        self.router.open(server)

    def _compare_context_lengths(self, server: Server) -> None:
        longest = max((s.info.context_length for s in self.router.servers.values()), default=0)
        if 0 < server.info.context_length < longest:
            show_message(
                f"warning: {server.address} takes {server.info.context_length} tokens of prompt and answer, others "
                f"{longest}: its answers end earlier or are refused. Start it with the same context_length and "
                "max_total_tokens"
            )

    # ---------------------------------------------------------------------------- health checks and membership

    async def _wait_until_healthy(self, server: Server, wait: NamedWait) -> None:
        backoff_s = 0.05
        while self.router.servers.get(server.address) is server:
            try:
                await self._probe(server)
                # A trainer that was killed in the middle of an update, or after `offload`, has left it so.
                await self.client.reclaim_memory(server)
                await self.client.resume(server)
                break
            except ServerError as error:
                if isinstance(error, HttpError) and error.status in (401, 403):
                    raise ConfigError(
                        f"{error}: set {API_KEY_ENV} to the api_key that the server was started with"
                    ) from error
                if (wait.left_s or 0) <= backoff_s:
                    cause = "the server died or still loads: see its log"
                    raise wait.error(str(error), cause) from error
            # A server that is starting cannot notify anybody.
            await asyncio.sleep(backoff_s)
            backoff_s = min(1.0, backoff_s * 1.5)
        self._recovering.discard(server)
        if server.address in self.router.servers:
            self.router.open(server)
            self._spawn(self._monitor(server), f"monitor {server.address}")

    async def _monitor(self, server: Server) -> None:
        """Check the health of a server periodically; give it up if it does not answer."""
        limit_s = self.config.health_timeout_s
        while True:
            await asyncio.sleep(limit_s / 3)
            if self.router.servers.get(server.address) is not server:
                return
            if server in self._recovering and not server.has_requests:
                continue
            began = time.monotonic()
            try:
                await self.client.check_health(server, limit_s)
            except ServerError as error:
                self.lose(server, error)
            else:
                message = self._laggards.measure(server, time.monotonic() - began)
                if message:
                    logger.warning(message)
                    self.on_event(message, "warning")

    async def _watch_members(self, members: Members) -> None:
        """Add servers that hold a lease; remove failed ones whose lease has expired."""
        while True:
            try:
                living = await asyncio.to_thread(members.living)
            except OSError as error:
                # A shared folder that is unavailable for a moment, a full disk.
                logger.warning("cannot read the leases of servers: %s", error)
                await asyncio.sleep(POLL_INTERVAL_S)
                continue
            except RuntimeError:
                # The process ends without `destroy`: no thread can be started any more.
                if not threading.main_thread().is_alive():
                    return
                raise
            for address in living - set(self.router.servers):
                self._add(address)
            for address, server in list(self.router.servers.items()):
                if address in living:
                    server.is_elastic = True
                elif server.is_elastic and server in self._recovering:
                    # A lease alone is not enough: it also expires when its holder is stopped or the clock jumps.
                    self._remove(server)
            # A shared folder cannot notify anybody.
            await asyncio.sleep(POLL_INTERVAL_S)

    def _add(self, address: str) -> None:
        logger.info("%s joins", address)
        self.on_event(f"{address} joins", "info")
        server = self.router.add(address)
        server.is_elastic = True
        self._recovering.add(server)
        self._spawn(self._recover(server), f"join {address}")
        self._spawn(self._monitor(server), f"monitor {address}")

    def _remove(self, server: Server) -> None:
        logger.info("%s has left", server.address)
        self.on_event(f"{server.address} has left", "warning")
        self.router.remove(server.address)
        server.mark_lost()

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s ended", task.get_name(), exc_info=error)


def _is_refusal(error: Exception) -> bool:
    """Whether the error will not pass by itself: wrong weights (400 for a broadcast), or a wrong token."""
    if isinstance(error, HttpError):
        return error.is_refusal or error.status in (401, 403)
    return not isinstance(error, ServerError)
