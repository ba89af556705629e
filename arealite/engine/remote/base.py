"""Generation by servers of the job: choice of server, retries, interruption, weight updates. The wire format is the subclass's.

Runs on the executor's event loop on rank 0. A request that a weight update interrupts keeps its tokens and goes on under the new weights; one
whose server dies goes on elsewhere. Long answers are asked for in segments, so that a killed server takes no more than one with it. Each token
comes with its log-prob and weight version, exactly once. `Fleet` decides which servers are fit to be asked.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError, RequestError, ServerError, WaitTimeout, WeightUpdateError
from arealite.api.io_struct import ModelRequest, ModelResponse, StopReason, WeightUpdateMeta
from arealite.core.waits import NamedWait
from arealite.core.worker_pool import WorkerPool
from arealite.engine.remote.broadcast import WeightSender
from arealite.engine.remote.collecting import CollectingEngine
from arealite.engine.remote.fleet import Fleet, Wire
from arealite.engine.remote.membership import Members
from arealite.engine.remote.router import Router, Server
from arealite.utils import distributed
from arealite.utils.http import HttpClient, HttpError, UnreachableError
from arealite.weights.process_group import get_outbox

logger = logging.getLogger("arealite.remote")

ADDRESSES_ENV = "AREALITE_SERVER_ADDRS"
NAMES_ENV = "AREALITE_NAMES"
CONTROL_TIMEOUT_S = 60.0
_INFO_TIMEOUT_S = 5.0


def read_version(told: Any, unknown: int) -> int:
    """A version as SGLang and vLLM tell it: ours are numbers; `default`, what they started with, is 0; else it is `unknown`."""
    if told == "default":
        return 0
    return int(told) if isinstance(told, int | str) and str(told).isdigit() else unknown


@dataclass(slots=True)
class Piece:
    """A run of generated tokens as one answer brings it."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: StopReason


@dataclass(slots=True)
class Progress:
    """One sample under way: what it has so far, over any number of interruptions."""

    request: ModelRequest
    seed: int | None
    sample: int = 0
    num_sends: int = 0
    num_asked: int = 0  # tokens, the last time
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason = "abort"
    num_interruptions: int = 0

    def add(self, piece: Piece) -> None:
        num_before = len(self.tokens)
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.versions += piece.versions
        self.stop_reason = piece.stop_reason
        if piece.stop_reason == "abort":
            self.num_interruptions += 1
            self._step_back(num_before)
        if self.left <= 0 and piece.stop_reason != "stop":
            self.stop_reason = "length"
        elif piece.stop_reason == "length" and len(piece.tokens) >= self.num_asked:
            self.stop_reason = "abort"  # a segment is over, the answer is not (unless the server's context is full)

    def _step_back(self, num_before: int) -> None:
        """Leave out the last new tokens that may begin a stop string: a server looks for one only in what it makes itself.

        It is found for certain where the same tokens come again, as they do with a seed and the same weights.
        """
        longest = max(map(len, self.request.gconfig.stop), default=1)
        kept = max(num_before, len(self.tokens) + 1 - longest)
        del self.tokens[kept:], self.logprobs[kept:], self.versions[kept:]

    def next_rid(self) -> str:
        """A name of its own for each attempt: a server may not have let go of the last one yet."""
        self.num_sends += 1
        return f"{self.request.rid}-{self.sample}-{self.num_sends}"

    def next_segment(self, segment_tokens: int) -> int:
        """Tokens to ask for now. Strings and penalties look back at what was generated, so they need it in one piece."""
        g = self.request.gconfig
        looks_back = g.stop or g.frequency_penalty or g.presence_penalty or g.repetition_penalty != 1
        self.num_asked = self.left if looks_back else min(self.left, segment_tokens)
        return self.num_asked

    def response(self, began: float) -> ModelResponse:
        return ModelResponse(
            self.request.input_ids,
            self.tokens,
            self.logprobs,
            self.versions,
            self.stop_reason,
            time.monotonic() - began,
            self.num_interruptions,
        )

    @property
    def left(self) -> int:
        return self.request.gconfig.max_new_tokens - len(self.tokens)


class RemoteEngine(CollectingEngine, Wire):
    """A client of inference servers. `initialize` on every rank; only rank 0 connects."""

    def __init__(self, config: InferenceEngineConfig, seed: int = 1, ledger_path: str | Path | None = None):
        super().__init__(config, seed, ledger_path)
        self._members: Members | None = None
        names = os.environ.get(NAMES_ENV)
        if distributed.rank() == 0 and (ledger_path is not None or names):
            # servers may join a job that has a run directory, which is where its ledger lies
            self._members = Members(ledger_path and Path(ledger_path).parent, names)
        self.fleet = Fleet(config, self, self._members)
        self.sender = WeightSender()
        self._begun: Future[None] | None = None
        self._http: HttpClient | None = None

    # ----------------------------------------------------------------------------------- the wire format

    @abc.abstractmethod
    async def send(self, server: Server, progress: Progress, num_samples: int) -> list[Piece]:
        """Ask for `num_samples` continuations of the prompt and the tokens so far."""

    @abc.abstractmethod
    async def join_group(self, server: Server, settings: dict[str, Any]) -> None:
        """Have the server join the process group over which weights are broadcast."""

    async def ping(self, server: Server, timeout_s: float) -> None:
        await self.http.get(f"{server.url}/health", timeout_s)

    async def begin_load(self, servers: list[Server], meta: WeightUpdateMeta) -> None:
        if meta.type == "broadcast":
            await self.sender.open(servers, meta, self.join_group)

    def not_loaded(self, server: Server, meta: WeightUpdateMeta, error: HttpError) -> ServerError | WeightUpdateError:
        """What an error status means that a server answers when it is to load weights: is it the server, or are it the weights?"""
        if meta.type == "broadcast":
            # another member may have failed: this one is asked again on its own
            self.sender.give_up()
            return error
        if error.status == 503:  # it is being stopped
            return error
        return WeightUpdateError(f"{server.address} refused version {meta.version}: {error.text}")

    async def control(
        self,
        server: Server,
        endpoint: str,
        body: dict[str, Any] | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
        *,
        is_json: bool = True,
    ) -> Any:
        url = f"{server.url}/{endpoint}"
        return await self.http.post(url, body or {}, timeout_s, is_json=is_json)

    # --------------------------------------------------------------------------------------- life cycle

    @property
    def http(self) -> HttpClient:
        if self._http is None:
            raise ConfigError(f"call {type(self).__name__}.initialize() first")
        return self._http

    def initialize(self, addrs: list[str] | None = None, train_batch_size: int | None = None) -> None:
        if distributed.rank() != 0:
            return
        addresses = addrs or [a for a in os.environ.get(ADDRESSES_ENV, "").split(",") if a] or self.config.server_addrs
        if not addresses:
            raise ConfigError(
                "no inference server is known: start the script with a launcher, set rollout.server_addrs, or pass addrs"
            )
        self.start_executor(train_batch_size)
        wait = NamedWait(
            "initialize", f"{len(addresses)} inference servers", self.config.setup_timeout_s, "rollout.setup_timeout_s"
        )
        self.executor.run_coroutine(self._connect(addresses, wait), wait)

    async def _connect(self, addresses: list[str], wait: NamedWait) -> None:
        self._http = HttpClient()
        await self.fleet.connect(addresses, wait)
        if self.config.num_workers:
            pool = WorkerPool(self.config.num_workers, type(self), self.config, self.fleet.state)
            await pool.start()
            self.fleet.router.on_change = pool.send_server_state
            self.executor.runner.pool = pool

    async def apply_server_state(self, state: dict[str, Any]) -> None:
        """In a rollout worker: use the servers that the owner's fleet has open, and believe its version."""
        if self._http is None:
            self._http = HttpClient()
        self._version = state["version"]
        self.fleet.follow(state)

    def destroy(self) -> None:
        if self._http is not None and self._executor is not None:
            self._executor.abandon()
            wait = NamedWait("destroy", "connections to close", 10.0)
            try:
                self._executor.run_coroutine(self._disconnect(self._http), wait)
            except (WaitTimeout, RuntimeError) as error:  # the loop is blocked by a workflow, or was ended by one
                logger.error("connections were not closed: %s", error)
            self._http = None
        super().destroy()

    async def _disconnect(self, http: HttpClient) -> None:
        for server in self.router.servers.values():
            for task in server.requests:
                task.cancel()
        await self.fleet.close()
        await http.close()
        pool = self.executor.runner.pool
        if pool is not None:
            pool.close()

    @property
    def router(self) -> Router:
        return self.fleet.router

    # --------------------------------------------------------------------------------------- generation

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        began = time.monotonic()
        return await self._complete(Progress(request, request.seed), began)

    async def agenerate_group(self, request: ModelRequest) -> list[ModelResponse]:
        """All samples in one request; those that are interrupted go on one by one."""
        count = request.gconfig.n_samples
        began = time.monotonic()
        seeds = [None if request.seed is None else request.seed + i for i in range(count)]
        samples = [Progress(request, seed, i) for i, seed in enumerate(seeds)]
        for sample, piece in zip(samples, await self._ask(samples[0], began, count), strict=True):
            sample.num_asked = samples[0].num_asked
            sample.add(piece)
        if all(s.stop_reason != "abort" for s in samples):
            return [s.response(began) for s in samples]
        return list(await asyncio.gather(*(self._complete(s, began) for s in samples)))

    async def _complete(self, progress: Progress, began: float) -> ModelResponse:
        while progress.stop_reason == "abort":
            num_before = len(progress.tokens)
            try:
                progress.add((await self._ask(progress, began, 1))[0])
            except RequestError:
                if not num_before:
                    raise
                # its beginning was taken, so it is too long now: it filled the server's context exactly
                progress.stop_reason = "length"
            if len(progress.tokens) == num_before and progress.stop_reason == "abort":
                await asyncio.sleep(0.01)  # interrupted before its first token: no busy loop
        return progress.response(began)

    async def _ask(self, progress: Progress, began: float, count: int) -> list[Piece]:
        """One answer from some server, tried elsewhere when one fails."""
        rid = progress.request.rid
        wait = NamedWait(f"request {rid}", "a server", self.config.request_timeout_s, "rollout.request_timeout_s")
        wait.began = began
        errors: list[str] = []
        last: Server | None = None
        while len(errors) < self.config.request_retries:
            server = await self.router.acquire(wait, count, affinity=rid, avoid=last)
            adapter = server.adapter
            try:
                async with asyncio.timeout(wait.left_s):
                    return await self._send(server, progress, count)
            except TimeoutError:
                state = f"{server.describe()}; {len(errors)} other attempts failed before"
                raise wait.error(state, "its answer is very long, or the server very slow") from None
            except ServerError as error:
                # started anew, a server does not know the adapter that the request names
                is_refused = (
                    isinstance(error, HttpError) and error.is_refusal and not (adapter and adapter in error.text)
                )
                if is_refused:
                    raise RequestError(f"request {rid} was refused: {error}") from error
                self.fleet.suspect(server, error)
                # whoever was not reached was not asked, and is not soon again
                if not isinstance(error, UnreachableError):
                    errors.append(str(error))
                last = server
            finally:
                self.router.release(server, count)
        raise ServerError(f"request {rid} failed {len(errors)} times (rollout.request_retries): {'; '.join(errors)}")

    async def _send(self, server: Server, progress: Progress, count: int) -> list[Piece]:
        """As `send`; an answer by older weights than the server held is a `ServerError`."""
        held = server.version
        with server.asked():
            pieces = await self.send(server, progress, count)
        oldest = min((version for piece in pieces for version in piece.versions), default=held)
        if oldest < held:  # restarted so quickly that no request failed
            raise ServerError(f"{server.address} held version {held}, and answers with {oldest}")
        return pieces

    # ------------------------------------------------------------------------------------ weight updates

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """All servers in parallel: pause, load, compare, continue. Rank 0 acts, the others return at once."""
        if distributed.rank() == 0:
            wait = self._update_wait(meta)
            self.executor.run_coroutine(self._update(meta, wait), wait)
        self.set_version(meta.version)

    def begin_update(self, meta: WeightUpdateMeta) -> None:
        """Before the actor gathers the weights: have what `update_weights` will wait for begin, where nothing stands still meanwhile.

        Broadcast to servers that receive beside generating: each bucket is on its way while the next one is gathered.
        """
        if distributed.rank() != 0 or meta.type != "broadcast":
            return
        servers, box = list(self.router.servers.values()), get_outbox(meta.path)
        # what a model's tensors are called, the last update tells
        if box and all(s.is_open and self.can_swap(s) for s in servers):
            box.expect()
            update = self.fleet.update(meta, self._update_wait(meta))
            self._begun = asyncio.run_coroutine_threadsafe(update, self.executor.runner.loop)

    async def _update(self, meta: WeightUpdateMeta, wait: NamedWait) -> None:
        begun, self._begun = self._begun, None
        await (self.fleet.update(meta, wait) if begun is None else asyncio.wrap_future(begun))

    def _update_wait(self, meta: WeightUpdateMeta) -> NamedWait:
        what = f"{len(self.router.servers)} servers to load version {meta.version}"
        limit, option = self.config.setup_timeout_s, "rollout.setup_timeout_s"
        return NamedWait("update_weights", what, limit, option)

    def offload(self) -> None:
        """Have all servers free the memory of their caches, for a trainer on the same device. Requests wait until `onload`."""
        self._of_fleet("offload", self.fleet.release_memory)

    def onload(self) -> None:
        self._of_fleet("onload", self.fleet.resume_memory)

    def _of_fleet(self, name: str, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if distributed.rank() == 0:
            limit, option = self.config.setup_timeout_s, "rollout.setup_timeout_s"
            wait = NamedWait(name, f"{len(self.router.servers)} servers", limit, option)
            self.executor.run_coroutine(act(), wait)

    # ----------------------------------------------------------------------------------------- inspection

    def holds_others(self) -> bool:
        """Whether a server brings weights of another run: it tells another version than this one is at (rank 0)."""
        return any(server.version != self._version for server in self.router.servers.values())

    def server_info(self, probe: str = "") -> list[dict[str, Any]]:
        """What each open server that can be reached says of itself (rank 0; empty elsewhere); with the path of a probe
        (`device_weights.make_probe`) every one, and also what it reads there.
        """
        if distributed.rank() != 0:
            return []
        wait = NamedWait("server_info", f"{len(self.router.servers)} servers", _INFO_TIMEOUT_S)
        return self.executor.run_coroutine(self._server_info(probe), wait)

    async def _server_info(self, probe: str) -> list[dict[str, Any]]:
        path = f"/server_info?probe={quote(probe)}" if probe else "/server_info"
        asked = [
            self.http.get(f"{server.url}{path}", timeout_s=_INFO_TIMEOUT_S)
            for server in self.router.servers.values()
            if server.is_open or probe
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ServerError):
                raise answer
        return [answer for answer in answers if isinstance(answer, dict)]
