"""The inference engine of a simulation: the real engine, fleet and router, with modelled servers.

`SimulatedClient` is a client as those of SGLang and vLLM are, but its servers are `DecodingServer`s on the same virtual
event loop. A generated token has no content: an answer consists of one placeholder for each version of the weights that
made a part of it, and `Answers` in the request's metadata holds the lengths.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ServerError
from arealite.api.io_struct import ModelResponse, WeightUpdateMeta
from arealite.core.ledger.store import Ledger, ServerSample
from arealite.core.waits import NamedWait
from arealite.core.workflow_executor import WorkflowExecutor
from arealite.engine.remote.base import RemoteEngine
from arealite.engine.remote.client import ServerClient
from arealite.engine.remote.progress import Piece, Progress
from arealite.engine.remote.sampling import sample_servers, server_sample
from arealite.engine.remote.server import Server, ServerInfo
from arealite.plan.costs import UpdateCost
from arealite.plan.server_model import DecodingServer, Sample
from arealite.plan.virtual_time import VirtualCondition, VirtualLoop

T = TypeVar("T")
# The key of a request's metadata that holds its `Answers`.
ANSWERS = "answers"


@dataclass(slots=True)
class Answers:
    """The lengths of the answers to one request, and what was made of them so far."""

    lengths: list[float]
    # Tokens before the answer, and how many of them no server has computed yet.
    prompt_tokens: float
    new_tokens: float
    made: list[list[tuple[int, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made = [[] for _ in self.lengths]

    def num_made(self, sample: int) -> float:
        return sum(tokens for _, tokens in self.made[sample])


class SimulatedClient(ServerClient):
    """Speaks to modelled servers by direct calls."""

    def __init__(self, config: InferenceEngineConfig):
        super().__init__(config)
        self.models: dict[str, DecodingServer] = {}
        self.update = UpdateCost()
        # Addresses of servers that are down at present.
        self.down: set[str] = set()

    def connect(self) -> None:
        return None

    def _model(self, server: Server) -> DecodingServer:
        if server.address in self.down:
            raise ServerError(f"{server.address} is down")
        return self.models[server.address]

    async def probe(self, server: Server) -> ServerInfo:
        return ServerInfo(kind="arealite", version=self._model(server).version)

    async def check_health(self, server: Server, timeout_s: float) -> None:
        self._model(server)

    async def fingerprints(self, server: Server) -> None:
        return None

    async def generate(self, server: Server, progress: Progress, num_samples: int) -> list[Piece]:
        answers: Answers = progress.request.metadata[ANSWERS]
        numbers = range(progress.sample, progress.sample + num_samples)
        made = [answers.num_made(i) for i in numbers]
        # An interrupted answer is computed again, with its prompt; samples that start together share the prompt.
        prompt = answers.prompt_tokens + made[0] if progress.num_sends else answers.new_tokens
        progress.num_sends += 1
        lengths = [answers.lengths[i] - done for i, done in zip(numbers, made, strict=True)]
        contexts = [answers.prompt_tokens + done for done in made]
        samples = await self._model(server).submit(lengths, contexts, prompt)
        for number, sample in zip(numbers, samples, strict=True):
            answers.made[number] += sample.made
        return [_piece(sample) for sample in samples]

    async def pause(self, server: Server, mode: str) -> None:
        self._model(server).pause(interrupt=mode == "abort")

    async def resume(self, server: Server) -> None:
        self._model(server).resume()

    async def load_folder(self, server: Server, meta: WeightUpdateMeta) -> None:
        await asyncio.sleep(self.update.load_s)
        self._model(server).set_version(meta.version, self.update.pause_s if self.update.is_swap else 0.0)

    async def load_adapter(self, server: Server, meta: WeightUpdateMeta) -> None:
        await self.load_folder(server, meta)

    async def load_segment(self, server: Server, meta: WeightUpdateMeta) -> None:
        await self.load_folder(server, meta)

    async def join_group(self, server: Server, settings: dict[str, Any]) -> None:
        return None

    async def receive(self, server: Server, meta: WeightUpdateMeta, group: str, portions: Any) -> None:
        await self.load_folder(server, meta)

    async def release_memory(self, server: Server) -> None:
        return None

    async def resume_memory(self, server: Server) -> None:
        return None

    def can_swap(self, server: Server) -> bool:
        return self.update.is_swap


def _piece(sample: Sample) -> Piece:
    versions = [version for version, _ in sample.made]
    count = len(versions)
    return Piece([0] * count, [0.0] * count, versions, "stop" if sample.left <= 0 else "abort")


class SimulatedExecutor(WorkflowExecutor):
    """The executor on a virtual loop: the trainer's thread runs the loop whenever it waits."""

    def __init__(self, loop: VirtualLoop, *args: Any):
        super().__init__(*args)
        self.loop = loop
        self.runner.loop.close()
        self.runner.loop = loop
        self._lock = cast(Any, VirtualCondition(loop))

    def start(self) -> None:
        return None

    def run_coroutine(self, coroutine: Coroutine[Any, Any, T], wait: NamedWait) -> T:
        return self.loop.run_coroutine(coroutine)


class SimulatedEngine(RemoteEngine):
    """Generates with modelled servers, given by address."""

    client_class = SimulatedClient
    client: SimulatedClient

    def __init__(
        self,
        config: InferenceEngineConfig,
        loop: VirtualLoop,
        models: Mapping[str, DecodingServer],
        update: UpdateCost,
        ledger: Ledger | None = None,
        seed: int = 1,
        may_fail: bool = True,
    ):
        # The ledger is not passed on by its path: there is no run directory that servers could join.
        super().__init__(replace(config, num_workers=0), seed)
        self.loop, self.ledger = loop, ledger
        # Whether servers may fail: then requests need what `RemoteEngine.ask` does for retries.
        self.may_fail = may_fail
        self.client.models, self.client.update = dict(models), update

    def start_executor(self, train_batch_size: int | None) -> None:
        self._executor = SimulatedExecutor(self.loop, self.config, self, train_batch_size, self.seed, self.ledger)
        if self.ledger is not None:
            self.loop.create_task(sample_servers(self.take_samples, self.ledger), name="samples of servers")

    def initialize(self, addrs: list[str] | None = None, train_batch_size: int | None = None) -> None:
        self.start_executor(train_batch_size)
        addresses = addrs or list(self.client.models)
        wait = self._setup_wait("initialize", f"{len(addresses)} inference servers")
        self.executor.run_coroutine(self._connect(addresses, wait), wait)

    def count_tokens(self, responses: list[ModelResponse]) -> None:
        """Count nothing: a placeholder stands for many tokens."""

    async def ask(self, progress: Progress, count: int) -> list[Piece]:
        """Get one answer; without retries and without the times of episodes, if nobody needs them."""
        if self.may_fail or self.ledger is not None:
            return await super().ask(progress, count)
        request, timeout_s = progress.request, self.config.request_timeout_s
        affinity = request.metadata.get("session", request.rid)
        server = self.router.try_acquire(count, affinity)
        if server is None:
            server = await self.router.acquire(NamedWait(request.rid, "a server", None), count, affinity)
        try:
            pieces = await self.client.generate(server, progress, count)
        finally:
            self.router.release(server, count)
        if self.loop.time() - progress.began >= timeout_s:
            # A timer for each request would cost more than all else. A late answer is an error later, but for sure.
            wait = NamedWait(f"request {request.rid}", "a server", timeout_s, "rollout.request_timeout_s")
            wait.began = progress.began
            raise wait.error(server.describe(), "its answer is very long, or the server very slow")
        return pieces

    async def take_samples(self) -> list[ServerSample]:
        return [
            server_sample(s.address, s.version, s.is_open, self.client.models[s.address].info())
            for s in self.router.servers.values()
        ]

    def crash(self, address: str, restart_s: float | None) -> None:
        """Kill a server; after `restart_s` an empty one answers under the same address."""
        self.client.down.add(address)
        self.client.models[address].fail(ServerError(f"{address} has died"))
        if restart_s is not None:
            self.loop.call_later(restart_s, self._restart, address)

    def _restart(self, address: str) -> None:
        self.client.models[address].set_version(0)
        self.client.models[address].resume()
        self.client.down.discard(address)
