"""The servers of a job as a body: health, weight updates, servers that fail, come back, join and leave.

Lives on the executor's event loop, owned by `RemoteEngine`. Guarantees: a server is open only while it answers and holds the current weights; one that
fails is tried again, later each time, and gets the weights it missed first; one that is silent for `health_timeout_s` loses its requests to others;
after an update every server's fingerprint equals what the trainer published, or the run stops and the tensor is named.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import torch

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError, ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.core.waits import NamedWait
from arealite.engine.remote.membership import LOOK_EVERY_S, Members
from arealite.engine.remote.published import read_published
from arealite.engine.remote.router import Router, Server
from arealite.utils.console import show_message
from arealite.utils.http import API_KEY_ENV, HttpError
from arealite.weights.fingerprint import Fingerprints, first_mismatch

logger = logging.getLogger("arealite.fleet")

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
TOLD_REFUSALS = 3


class Wire(abc.ABC):
    """How one kind of server is spoken to. Everything raises `ServerError` when the server cannot be reached."""

    @abc.abstractmethod
    async def probe(self, server: Server) -> None:
        """Return when the server can generate, and learn its version and kind."""

    @abc.abstractmethod
    async def ping(self, server: Server, timeout_s: float) -> None: ...

    @abc.abstractmethod
    async def pause_server(self, server: Server, mode: str) -> None:
        """Stop decoding: `abort` returns what is in flight, `in_place` keeps it."""

    @abc.abstractmethod
    async def continue_server(self, server: Server) -> None: ...

    def can_swap(self, server: Server) -> bool:
        """Whether `load_weights` may be called while the server generates."""
        return False

    @abc.abstractmethod
    async def begin_load(self, servers: list[Server], meta: WeightUpdateMeta) -> None:
        """Whatever must happen once before these servers load together."""

    @abc.abstractmethod
    async def load_weights(self, server: Server, meta: WeightUpdateMeta) -> None:
        """Have a paused server load weights; raises `WeightUpdateError` when it refuses them."""

    @abc.abstractmethod
    async def fingerprints(self, server: Server) -> Fingerprints | None:
        """What the server holds; None if it cannot tell."""

    @abc.abstractmethod
    async def release_memory(self, server: Server) -> None:
        """Have a paused server give its cache's memory back."""

    @abc.abstractmethod
    async def resume_memory(self, server: Server) -> None: ...


class Fleet:
    """All servers. `version` is the one they should hold."""

    def __init__(self, config: InferenceEngineConfig, wire: Wire, members: Members | None = None):
        self.config = config
        self.wire = wire
        self.members = members
        self.router = Router()
        self.version = 0
        self._published: WeightUpdateMeta | None = None
        self._tensors: tuple[WeightUpdateMeta, dict[str, torch.Tensor]] | None = None
        self._changing_weights = asyncio.Lock()
        self._tasks: set[asyncio.Task] = set()
        self._reviving: set[Server] = set()
        # In a rollout worker: the servers that its owner has open, and the versions they hold.
        self._followed: dict[str, int] | None = None

    async def connect(self, addresses: list[str], wait: NamedWait) -> None:
        """Wait for the servers that the job starts with, then watch over them. One that has died is not waited for: a launcher starts another, which joins."""
        servers = [self.router.add(address, is_open=False) for address in addresses]
        self._reviving.update(servers)
        if self.members is not None:
            for server in servers:
                server.is_elastic = self.members.has_launcher
            self._spawn(self._watch_members(self.members), "membership")
        await asyncio.gather(*(self._await_health(server, wait) for server in servers))
        for server in servers:
            self._compare_contexts(server)
        self.router.release(await self.router.acquire(wait))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.members is not None:
            self.members.close()

    def state(self) -> dict[str, Any]:
        """What rollout workers must know: the servers, what each one holds, and the newest version."""
        servers = [
            (s.address, s.is_open, s.is_lost, s.kind, s.adapter, s.version) for s in self.router.servers.values()
        ]
        return {"version": max((s[-1] for s in servers), default=0), "servers": servers}

    def follow(self, state: dict[str, Any]) -> None:
        """In a rollout worker: do as the owner's fleet."""
        self.version = state["version"]
        self._followed = {address: held for address, is_open, *_, held in state["servers"] if is_open}
        for address in set(self.router.servers) - {address for address, *_ in state["servers"]}:
            self._leave(self.router.servers[address])
        for address, is_open, is_lost, kind, adapter, version in state["servers"]:
            server = self.router.add(address, is_open=False)
            server.kind, server.adapter, server.version = kind, adapter, version
            (self.router.open if is_open else self.router.close)(server)
            if is_lost and not server.is_lost:
                server.give_up()

    # ------------------------------------------------------------------------------------ weight updates

    async def update(self, meta: WeightUpdateMeta, wait: NamedWait) -> None:
        """Bring every server that answers to `meta`, in parallel; the others get it before their next request."""
        async with self._changing_weights:
            self._published, self.version = meta, meta.version
            servers = self._living()
            outcomes = await self._load_all(servers, meta)
        self._judge(servers, outcomes)
        self.router.on_change()
        # with no server left, training goes on as soon as one has come back with these weights
        self.router.release(await self.router.acquire(wait))

    async def _load_all(self, servers: list[Server], meta: WeightUpdateMeta) -> list[BaseException | None]:
        try:
            await self.wire.begin_load(servers, meta)
        except ServerError as error:
            return [error for _ in servers]  # whoever still lives is served on its own
        return await asyncio.gather(*(self._load(s, meta) for s in servers), return_exceptions=True)

    async def _load(self, server: Server, meta: WeightUpdateMeta) -> None:
        with server.asked():
            if self.wire.can_swap(server) and server.is_open:
                # it reads while it generates and swaps between two steps: nothing has to stop
                await self.wire.load_weights(server, meta)
                await self._verify(server, meta)
            else:
                self.router.close(server)
                await self._load_paused(server, meta)
                server.version = meta.version
                self.router.open(server)
        server.version = meta.version

    async def _load_paused(self, server: Server, meta: WeightUpdateMeta) -> None:
        # a request is bound to its adapter: to go on under another one it has to be sent again
        mode = "abort" if meta.is_adapter else self.config.pause_mode
        await self.wire.pause_server(server, mode)
        try:
            await self.wire.load_weights(server, meta)
            await self._verify(server, meta)
        except (ServerError, WeightUpdateError):
            with suppress(ServerError):  # nothing may go on with half of the weights
                await self.wire.pause_server(server, "abort")
                await self.wire.continue_server(server)
            raise
        await self.wire.continue_server(server)

    async def _verify(self, server: Server, meta: WeightUpdateMeta) -> None:
        name = await self._mismatch(server, meta)
        if name is not None:
            raise WeightUpdateError(
                f"{server.address} says it loaded version {meta.version}, but its tensor {name} differs from what the trainer "
                f"published at {meta.path}: the update was torn or went wrong; nothing may be generated with it"
            )

    async def _mismatch(self, server: Server, meta: WeightUpdateMeta) -> str | None:
        """The name of a tensor that the server holds and that is not what `meta` published."""
        # others tell nothing of an adapter's tensors
        tells = server.is_arealite or not meta.is_adapter
        held = await self._fingerprints(server) if tells else None
        if held is None:
            return None
        if self._tensors is None or self._tensors[0] != meta:  # read once for all servers
            self._tensors = (meta, read_published(meta))
        return first_mismatch(self._tensors[1], held)

    async def _fingerprints(self, server: Server) -> Fingerprints | None:
        with server.answering():
            return await self.wire.fingerprints(server)

    # --------------------------------------------------------------------------------------------- memory

    async def release_memory(self) -> None:
        """Interrupt what is in flight (it goes on after `resume_memory`) and free the servers' caches."""
        await self._at_all(self._release_memory)

    async def _release_memory(self, server: Server) -> None:
        self.router.close(server)
        await self.wire.pause_server(server, "abort")
        await self.wire.release_memory(server)

    async def resume_memory(self) -> None:
        await self._at_all(self._resume_memory)

    async def _resume_memory(self, server: Server) -> None:
        await self.wire.resume_memory(server)
        await self.wire.continue_server(server)
        self.router.open(server)

    async def _at_all(self, act: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        """Whoever fails meanwhile is looked after as always; the others go on."""
        async with self._changing_weights:
            servers = self._living()
            outcomes = await asyncio.gather(*map(act, servers), return_exceptions=True)
        self._judge(servers, outcomes)

    def _judge(self, servers: list[Server], outcomes: list[BaseException | None]) -> None:
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerError):
                self.suspect(server, outcome)
            elif outcome is not None:
                raise outcome

    def _living(self) -> list[Server]:
        return [s for s in self.router.servers.values() if s not in self._reviving]

    # ------------------------------------------------------------------------------ failing and coming back

    def suspect(self, server: Server, error: ServerError) -> None:
        """A request or an update failed there: no new requests until it has answered a probe."""
        self.router.close(server)
        server.last_error = str(error)
        if server in self._reviving or server.address not in self.router.servers:
            return
        server.failures += 1
        self._reviving.add(server)
        self._spawn(self._revive(server), f"revive {server.address}")

    def lose(self, server: Server, error: ServerError) -> None:
        """A server is silent: what it was working on goes elsewhere."""
        logger.error("%s is given up: %s", server.address, error)
        server.give_up()
        self.suspect(server, error)

    async def _revive(self, server: Server) -> None:
        """Probe until the server answers, bring its weights up to date, open it."""
        backoff_s, num_refusals = FIRST_BACKOFF_S, 0
        try:
            while self.router.servers.get(server.address) is server:
                try:
                    await self._probe(server)
                    server.is_lost = False
                    with server.asked():
                        await self._catch_up(server)
                except (ServerError, WeightUpdateError, ConfigError) as error:
                    server.last_error = str(error)
                    logger.warning("%s is not ready: %s", server.address, error)
                    # Once may be chance: the trainer wrote the next weights while the server read.
                    num_refusals += _is_refusal(error)
                    if num_refusals == TOLD_REFUSALS:
                        show_message(f"warning: {server.address} gets no requests: {error}")
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
                    continue
                if not server.failures:
                    self._compare_contexts(server)
                server.failures = 0
                return
        finally:
            self._reviving.discard(server)

    async def _probe(self, server: Server) -> None:
        with server.answering():
            await self.wire.probe(server)

    async def _catch_up(self, server: Server) -> None:
        if self._followed is not None:
            return self._open_as_followed(server, self._followed)
        async with self._changing_weights:
            meta, is_current = self._published, server.version == self.version
            if meta is not None and not (is_current and await self._mismatch(server, meta) is None):
                (error,) = await self._load_all([server], meta)
                if error is not None:
                    raise error
                return
            if not is_current:
                raise ServerError(
                    f"{server.address} holds version {server.version}, the job is at {self.version} and has nothing to send"
                )
            await self._compare_with_peers(server)
            # it may have failed in the middle of an update
            await self.wire.continue_server(server)
            self.router.open(server)

    def _open_as_followed(self, server: Server, followed: dict[str, int]) -> None:
        """In a rollout worker: the owner alone pauses, loads and continues a server, and says when it is fit."""
        if server.version < followed.get(server.address, server.version + 1):
            raise ServerError(f"{server.address} is not open: the trainer's log says why")
        self.router.open(server)

    async def _compare_with_peers(self, server: Server) -> None:
        """Before the first update nobody has published weights: a server that joins must hold what others hold."""
        peer = next((s for s in self.router.servers.values() if s.is_open), None)
        if self._published is not None or peer is None or not server.is_elastic:
            return
        mine, theirs = await self._fingerprints(server), await self._fingerprints(peer)
        if mine != theirs:
            raise WeightUpdateError(
                f"{server.address} serves other weights than {peer.address}, or in another dtype: it can join from the first update on"
            )

    def _compare_contexts(self, server: Server) -> None:
        longest = max((s.context for s in self.router.servers.values()), default=0)
        if 0 < server.context < longest:
            show_message(
                f"warning: {server.address} takes {server.context} tokens of prompt and answer, others {longest}: what it is asked "
                "for ends earlier or is refused. Start it with the same context_length and max_total_tokens"
            )

    # ------------------------------------------------------------------------------------------- watching

    async def _await_health(self, server: Server, wait: NamedWait) -> None:
        backoff_s = 0.05
        while self.router.servers.get(server.address) is server:
            try:
                await self._probe(server)
                break
            except ServerError as error:
                if isinstance(error, HttpError) and error.status in (401, 403):
                    told = f"{error}: set {API_KEY_ENV} to the api_key that the server was started with"
                    raise ConfigError(told) from error
                if (wait.left_s or 0) <= backoff_s:
                    cause = "the server died or still loads: see its log"
                    raise wait.error(str(error), cause) from error
            await asyncio.sleep(backoff_s)  # a server that is starting cannot call back
            backoff_s = min(1.0, backoff_s * 1.5)
        self._reviving.discard(server)
        if server.address in self.router.servers:
            self.router.open(server)
            self._spawn(self._monitor(server), f"monitor {server.address}")

    async def _monitor(self, server: Server) -> None:
        """Ask for a sign of life now and then; without one the server is given up, by whatever still waits for it."""
        limit_s = self.config.health_timeout_s
        while True:
            await asyncio.sleep(limit_s / 3)
            if self.router.servers.get(server.address) is not server:
                return
            if server in self._reviving and not server.requests:
                continue
            try:
                await self.wire.ping(server, limit_s)
            except ServerError as error:
                self.lose(server, error)

    async def _watch_members(self, members: Members) -> None:
        """Take in servers that hold a lease, let go of those that do not any more."""
        while True:
            try:
                living = await asyncio.to_thread(members.living)
            except OSError as error:  # a shared folder that is away for a moment, a full disk
                logger.warning("cannot see who joins or leaves: %s", error)
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            for address in living - set(self.router.servers):
                self._join(address)
            for address, server in list(self.router.servers.items()):
                if address in living:
                    server.is_elastic = True
                elif server.is_elastic and server in self._reviving:
                    # Not for the lease alone: it lapses too when its keeper stands still or the clock jumps.
                    self._leave(server)
            await asyncio.sleep(LOOK_EVERY_S)  # a shared folder cannot call back

    def _leave(self, server: Server) -> None:
        logger.info("%s has left", server.address)
        self.router.remove(server.address)
        server.give_up()

    def _join(self, address: str) -> None:
        logger.info("%s joins", address)
        server = self.router.add(address, is_open=False)
        server.is_elastic = True
        self._reviving.add(server)
        self._spawn(self._revive(server), f"join {address}")
        self._spawn(self._monitor(server), f"monitor {address}")

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s ended", task.get_name(), exc_info=error)


def _is_refusal(error: Exception) -> bool:
    """Whether it will not pass by itself: wrong weights (a broadcast answers with 400), or a wrong token."""
    if isinstance(error, HttpError):
        return error.is_refusal or error.status in (401, 403)
    return not isinstance(error, ServerError)
