"""`EmbeddedEngine`: the inference engine inside the trainer's process, for runs without any server.

The same engine as behind `python -m arealite.cli.serve`, on a thread of its own, without HTTP. Weights are swapped
between two decode steps; requests in flight keep their tokens, and their KV cache is kept
(`rollout.pause_mode=in_place`) or computed again (`abort`). One rank only.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from arealite.api.cli_args import InferenceEngineConfig, ServerConfig
from arealite.api.errors import ConfigError, ServerError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.core.ledger.store import ServerSample
from arealite.core.waits import NamedWait
from arealite.engine.remote.collecting import CollectingEngine
from arealite.engine.remote.progress import Piece, Progress
from arealite.engine.remote.sampling import server_sample
from arealite.engine.sglang_remote import sampling_params
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SampleOutput, SamplingParams
from arealite.inference.weights import WeightSource
from arealite.utils import distributed
from arealite.utils.startup import startup_phase
from arealite.utils.trace import tracing
from arealite.weights.sync import make_transport, read_probe


class EmbeddedEngine(CollectingEngine):
    """Generation in process. `server` configures the engine as it would a server."""

    def __init__(
        self, config: InferenceEngineConfig, server: ServerConfig, seed: int = 1, ledger_path: str | Path | None = None
    ):
        super().__init__(config, seed, ledger_path)
        if distributed.world_size() > 1:
            raise ConfigError(
                f"EmbeddedEngine serves one rank, there are {distributed.world_size()}: use embedded servers "
                f"(embedded.d1+d{distributed.world_size()})"
            )
        self.server = replace(server, record_routing=server.record_routing or config.routing_replay)
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ConfigError("call EmbeddedEngine.initialize() first")
        return self._engine

    def initialize(self, addrs: list[str] | None = None, train_batch_size: int | None = None) -> None:
        with startup_phase("servers", "starting the inference engine"):
            self._engine = Engine(self.server).start(with_trial=self.server.device != "cpu")
        self.start_executor(train_batch_size)

    def destroy(self) -> None:
        if self._executor is not None:
            self._executor.abandon()
        super().destroy()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    async def ask(self, progress: Progress, count: int) -> list[Piece]:
        asked = progress.next_segment(progress.num_left)
        params = SamplingParams.from_json(sampling_params(progress, count, asked))
        asking = progress.request
        images = None
        if asking.images:
            _, images = await asyncio.wrap_future(self.engine.read_prompt(asking.input_ids, asking.images))
        settings = {"images": images, "want_routing": self.config.routing_replay}
        request = Request(asking.input_ids + progress.tokens, params, progress.next_rid(), **settings)
        if params.stop:
            request.continue_prompt(self.engine.tokenizer)
        if asking.on_tokens is not None:
            request.on_progress = _progress_reporter(progress, asyncio.get_running_loop())
        try:
            with tracing.part_of_episode("generate", samples=count):
                outputs = await asyncio.wrap_future(self.engine.submit(request))
        except asyncio.CancelledError:
            self.engine.abort_request(request)
            raise
        return [_piece(output) for output in outputs]

    def server_info(self) -> list[dict[str, Any]]:
        return [self.engine.stats()]

    async def take_samples(self) -> list[ServerSample]:
        info = self.engine.stats()
        # The CPU seconds are those of the trainer, too.
        thread_s = sum(row[4] for row in info["step_times"])
        info["cpu_s"] = thread_s if info["cpu_s"] is not None else None
        return [server_sample("embedded", self._version, True, info)]

    def read_probe(self, path: str) -> list[str]:
        return [read_probe(path)]

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        limit, flush = self.config.setup_timeout_s, self.config.pause_mode == "abort"
        what = f"version {meta.version} to be in use"
        wait = NamedWait("update_weights", what, limit, "rollout.setup_timeout_s")
        transport = make_transport(meta)
        source = WeightSource.published(meta)
        if transport.is_in_process:
            source = WeightSource.received(transport.open(meta), meta.version)
        try:
            with tracing.span("weights", "embedded", f"load v{meta.version}"):
                self.engine.update(source, flush).result(limit)
        except TimeoutError:
            raise wait.error("the engine has not swapped its weights", "one of its steps hangs") from None
        self.set_version(meta.version)


def _progress_reporter(progress: Progress, loop: asyncio.AbstractEventLoop) -> Callable[..., None]:
    """Return what the engine's thread calls with each token of a request."""
    counts = Counter[int]()

    def report(index: int, token: int, logprob: float, *_: Any) -> None:
        loop.call_soon_threadsafe(progress.report, index, counts[index], [token], [logprob])
        counts[index] += 1

    return report


def _piece(output: SampleOutput) -> Piece:
    if output.finish_reason.get("status_code"):
        raise ServerError(f"the engine gave up on a request: {output.finish_reason['message']}")
    versions = [version for version, start, end in output.version_spans for _ in range(start, end)]
    return Piece(output.token_ids, output.logprobs, versions, output.finish_reason["type"], output.routed_experts)
