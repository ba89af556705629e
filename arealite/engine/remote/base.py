"""`RemoteEngine`: generation by inference servers, with retries, interruption and weight updates.

Three parts: a `ServerClient` knows the wire format, a `Fleet` keeps the servers healthy and up to date, and its
`Router` chooses the server of a request. Everything runs on the executor's event loop on rank 0.

A request that a weight update interrupts keeps its tokens and continues under the new weights; a request whose server
dies continues elsewhere. Long answers are asked for in segments, so that a killed server loses at most one segment.
Each token comes with its log-prob and weight version, exactly once.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError, HttpError, RequestError, ServerError, WaitTimeout
from arealite.api.io_struct import WeightUpdateMeta
from arealite.core.ledger.store import ServerSample
from arealite.core.waits import NamedWait
from arealite.core.worker_pool import WorkerPool
from arealite.engine.remote.client import PROBE_TIMEOUT_S, ServerClient
from arealite.engine.remote.collecting import CollectingEngine
from arealite.engine.remote.fleet import Fleet
from arealite.engine.remote.membership import Members
from arealite.engine.remote.progress import Piece, Progress
from arealite.engine.remote.sampling import server_sample
from arealite.engine.remote.server import Router, Server
from arealite.utils import distributed
from arealite.utils.activity import activity
from arealite.utils.json_client import UnreachableError
from arealite.utils.startup import startup_phase, take_meanwhile
from arealite.utils.status.waits import waiting
from arealite.utils.status.writer import status
from arealite.utils.trace import tracing

logger = logging.getLogger("arealite.remote")

ADDRESSES_ENV = "AREALITE_SERVER_ADDRS"
NAMES_ENV = "AREALITE_NAMES"
# Servers that run already answer within this time.
_ANSWER_S = 0.5


class RemoteEngine(CollectingEngine):
    """Generates with inference servers. `initialize` is called on every rank; only rank 0 connects."""

    client_class: ClassVar[type[ServerClient]]

    def __init__(self, config: InferenceEngineConfig, seed: int = 1, ledger_path: str | Path | None = None):
        super().__init__(config, seed, ledger_path)
        members, names = None, os.environ.get(NAMES_ENV)
        if distributed.rank() == 0 and (ledger_path is not None or names):
            # Servers may join a job that has a run directory, which is where its ledger is.
            members = Members(ledger_path and Path(ledger_path).parent, names)
        self.client = self.client_class(config)
        self.fleet = Fleet(config, self.client, members)
        self.fleet.on_event = lambda text, level: self.record_event("server", text, level=level)
        # An update that `begin_update` has started.
        self._begun: Future[None] | None = None

    @property
    def router(self) -> Router:
        return self.fleet.router

    def initialize(self, addrs: list[str] | None = None, train_batch_size: int | None = None) -> None:
        if distributed.rank() != 0:
            return self._work_meanwhile()
        addresses = addrs or [a for a in os.environ.get(ADDRESSES_ENV, "").split(",") if a] or self.config.server_addrs
        if not addresses:
            raise ConfigError(
                "no inference server is known: start the script with a launcher, set rollout.server_addrs, or "
                "pass addrs"
            )
        self.start_executor(train_batch_size)
        status.add("servers", self._server_status)
        wait = self._setup_wait("initialize", f"{len(addresses)} inference servers")
        try:
            connecting = asyncio.run_coroutine_threadsafe(self._connect(addresses, wait), self.executor.runner.loop)
            self._work_meanwhile(connecting)
            message = f"waiting for {len(addresses)} inference server(s): {', '.join(addresses)}"
            with startup_phase("servers", message), activity.doing(self._describe_missing):
                self.executor.run_coroutine(_result_of(connecting), wait)
        except BaseException:
            # The caller has no engine to destroy. Its thread would go on looking for servers until the process ends.
            self.destroy()
            raise

    def _work_meanwhile(self, connecting: Future[None] | None = None) -> None:
        """Do what needs no servers, unless they have answered; rank 0 is `connecting` and decides for all."""
        work = take_meanwhile()
        if work and distributed.broadcast_json(connecting is None or _is_slow(connecting)):
            for do in work:
                do()

    def _describe_missing(self) -> str:
        servers = list(self.router.servers.values())
        missing = [server.address for server in servers if not server.is_open]
        if servers and not missing:
            return f"starting {self.config.num_workers} rollout workers" if self.config.num_workers else ""
        return f"waiting for {len(missing)} of {len(servers)} inference servers: {', '.join(missing)}"

    async def _connect(self, addresses: list[str], wait: NamedWait) -> None:
        self.client.connect()
        await self.fleet.connect(addresses, wait)
        if self.config.num_workers:
            pool = WorkerPool(self.config.num_workers, type(self), self.config, self.fleet.state)
            await pool.start()
            self.router.on_change = pool.send_server_state
            self.executor.runner.pool = pool

    async def apply_server_state(self, state: dict[str, Any]) -> None:
        """In a rollout worker: use the servers that the trainer's fleet has open, at its version."""
        self.client.connect()
        self._version = state["version"]
        self.fleet.mirror(state)

    def _server_status(self) -> list[dict[str, Any]]:
        return [
            {
                "address": server.address,
                "is_open": server.is_open,
                "is_lost": server.is_lost,
                "version": server.version,
                "load": server.load,
                "failures": server.num_failures,
                "slow": server.slow,
                "last_error": server.last_error[:300] if server.num_failures or not server.is_open else "",
            }
            for server in list(self.router.servers.values())
        ]

    def stats(self) -> dict[str, float]:
        """Return counts of episodes, and statistics of the last batch and weight update (rank 0)."""
        return super().stats() | self.fleet.updater.stats()

    def destroy(self) -> None:
        if self._executor is not None:
            status.remove("servers")
            self._executor.abandon()
            wait = NamedWait("destroy", "connections to close", 10.0)
            try:
                self._executor.run_coroutine(self._disconnect(), wait)
            except (WaitTimeout, RuntimeError) as error:
                # A workflow blocks the event loop or has stopped it. Log the error, so that shutdown completes.
                logger.error("connections were not closed: %s", error)
        super().destroy()

    async def _disconnect(self) -> None:
        await self.fleet.close()
        await self.client.close()
        pool = self.executor.runner.pool
        if pool is not None:
            pool.close()

    def _setup_wait(self, who: str, what: str) -> NamedWait:
        return NamedWait(who, what, self.config.setup_timeout_s, "rollout.setup_timeout_s")

    async def ask(self, progress: Progress, count: int) -> list[Piece]:
        """Get one answer, from another server when one fails."""
        rid, metadata = progress.request.rid, progress.request.metadata
        # The server that has computed the earlier turns of a session has its prefix.
        affinity = metadata.get("session", rid)
        wait = NamedWait(f"request {rid}", "a server", self.config.request_timeout_s, "rollout.request_timeout_s")
        wait.began = progress.began
        errors: list[str] = []
        last: Server | None = None
        while len(errors) < self.config.request_retries:
            server = self.router.try_acquire(count, affinity, last)
            if server is None:
                with waiting("server", "an open server", (), self.config.request_timeout_s):
                    server = await self.router.acquire(wait, count, affinity, last)
            adapter = server.adapter
            try:
                args = {"server": server.address, "samples": count}
                with tracing.part_of_episode("generate", **args):
                    async with asyncio.timeout(wait.left_s):
                        return await self._generate(server, progress, count)
            except TimeoutError:
                state = f"{server.describe()}; {len(errors)} other attempts failed before"
                raise wait.error(state, "its answer is very long, or the server very slow") from None
            except ServerError as error:
                # A server that was restarted does not know the adapter that the request names.
                is_unknown_adapter = isinstance(error, HttpError) and adapter and adapter in error.text
                if isinstance(error, HttpError) and error.is_refusal and not is_unknown_adapter:
                    raise RequestError(f"request {rid} was refused: {error}") from error
                self.fleet.suspect(server, error)
                # A server that was not reached has not seen the request: that is no attempt.
                if not isinstance(error, UnreachableError):
                    errors.append(str(error))
                last = server
            finally:
                self.router.release(server, count)
        raise ServerError(f"request {rid} failed {len(errors)} times (rollout.request_retries): {'; '.join(errors)}")

    async def _generate(self, server: Server, progress: Progress, count: int) -> list[Piece]:
        """Ask one server; raises `ServerError` for an answer by weights that it cannot have at this time."""
        held = server.version
        with server.track_request():
            pieces = await self.client.generate(server, progress, count)
        versions = set[int]().union(*(piece.versions for piece in pieces))
        if versions and min(versions) < held:
            # It was restarted so quickly that no request failed.
            raise ServerError(f"{server.address} held version {held}, and answers with {min(versions)}")
        if versions and max(versions) > max(held, self.fleet.newest_version):
            raise ServerError(
                f"{server.address} answers with version {max(versions)}, and the newest one of this run is "
                f"{self.fleet.newest_version}: somebody else has changed its weights"
            )
        return pieces

    def begin_update(self, meta: WeightUpdateMeta) -> None:
        """Start loading while the actor still publishes, if all servers can load while they generate."""
        if distributed.rank() != 0:
            return
        can_swap = all(s.is_open and self.client.can_swap(s) for s in self.router.servers.values())
        if can_swap and self.fleet.updater.transport(meta).begin():
            update = self.fleet.updater.update(meta, self._update_wait(meta))
            self._begun = asyncio.run_coroutine_threadsafe(update, self.executor.runner.loop)

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """Have all servers load in parallel: pause, load, compare, resume. Only rank 0 acts."""
        if distributed.rank() == 0:
            if self.fleet.is_offloaded:
                raise ConfigError("the servers' memory is released: call onload() before update_weights()")
            wait = self._update_wait(meta)
            self.executor.run_coroutine(self._update(meta, wait), wait)
        self.set_version(meta.version)

    async def _update(self, meta: WeightUpdateMeta, wait: NamedWait) -> None:
        begun, self._begun = self._begun, None
        await (self.fleet.updater.update(meta, wait) if begun is None else asyncio.wrap_future(begun))

    def _update_wait(self, meta: WeightUpdateMeta) -> NamedWait:
        return self._setup_wait("update_weights", f"{len(self.router.servers)} servers to load version {meta.version}")

    def offload(self) -> None:
        """Have all servers free their KV caches until `onload`, for a trainer on the same device."""
        self._on_fleet("offload", self.fleet.offload)

    def onload(self) -> None:
        """Have all servers allocate their KV caches again; interrupted requests continue."""
        self._on_fleet("onload", self.fleet.onload)

    def _on_fleet(self, name: str, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if distributed.rank() == 0:
            wait = self._setup_wait(name, f"{len(self.router.servers)} servers")
            self.executor.run_coroutine(act(), wait)

    def has_other_weights(self) -> bool:
        return any(server.version != self._version for server in self.router.servers.values())

    def server_info(self) -> list[dict[str, Any]]:
        """Return what each open server of this package says about itself (rank 0; empty elsewhere).

        Others are not asked: vLLM runs `pip` and a compiler to answer.
        """
        return self._get_info("/server_info", [s for s in self.router.servers.values() if s.is_open and s.is_arealite])

    async def take_samples(self) -> list[ServerSample]:
        return list(await asyncio.gather(*map(self._sample, list(self.router.servers.values()))))

    async def _sample(self, server: Server) -> ServerSample:
        known = {"running": server.load}
        # Other servers have no answer that is cheap for them. `ConfigError`: the connections are being closed.
        if server.is_arealite and server.is_open:
            with suppress(ServerError, ConfigError), server.parse_answer():
                info = await self.client.http.get(f"{server.url}/server_info", timeout_s=PROBE_TIMEOUT_S)
                return server_sample(server.address, server.version, server.is_open, info)
        return server_sample(server.address, server.version, server.is_open, known)

    def read_probe(self, path: str) -> list[str]:
        infos = self._get_info(f"/server_info?probe={quote(path)}", [*self.router.servers.values()])
        return [info.get("probe", "") for info in infos]

    def _get_info(self, path: str, servers: list[Server]) -> list[dict[str, Any]]:
        """Return the answers of the servers that can be reached."""
        if distributed.rank() != 0:
            return []

        async def get(server: Server) -> dict[str, Any] | None:
            with suppress(ServerError):
                return await self.client.http.get(server.url + path, timeout_s=PROBE_TIMEOUT_S)

        async def get_all() -> list[dict[str, Any] | None]:
            return await asyncio.gather(*map(get, servers))

        wait = NamedWait("server_info", f"{len(servers)} servers", PROBE_TIMEOUT_S)
        return [answer for answer in self.executor.run_coroutine(get_all(), wait) if isinstance(answer, dict)]


def _is_slow(connecting: Future[None]) -> bool:
    return bool(futures.wait([connecting], _ANSWER_S).not_done)


async def _result_of(future: Future[None]) -> None:
    await asyncio.wrap_future(future)
