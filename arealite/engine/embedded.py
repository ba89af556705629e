"""`EmbeddedEngine`: the inference engine inside the trainer's own process, for runs on one device without any server.

The same engine as behind `python -m arealite.cli.serve`, on a thread of its own; requests reach it without HTTP. Weights are swapped between two decode
steps; what is in flight goes on with the tokens it has, with its cache kept (`rollout.pause_mode=in_place`) or computed anew (`abort`). One rank only.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from arealite.api.cli_args import InferenceEngineConfig, ServerConfig
from arealite.api.errors import ConfigError, RequestError, ServerError
from arealite.api.io_struct import ModelRequest, ModelResponse, WeightUpdateMeta
from arealite.core.waits import NamedWait
from arealite.engine.remote.base import Piece, Progress
from arealite.engine.remote.collecting import CollectingEngine
from arealite.engine.sglang_remote import sampling_params
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SampleOutput, SamplingParams
from arealite.inference.weights import WeightSource
from arealite.utils import distributed
from arealite.weights.device_memory import read_probe
from arealite.weights.process_group import get_outbox


class EmbeddedEngine(CollectingEngine):
    """Generation in process. `server` configures the engine as it would a server."""

    def __init__(
        self, config: InferenceEngineConfig, server: ServerConfig, seed: int = 1, ledger_path: str | Path | None = None
    ):
        super().__init__(config, seed, ledger_path)
        if distributed.world_size() > 1:
            raise ConfigError(
                f"EmbeddedEngine serves one rank, there are {distributed.world_size()}: use embedded servers (embedded.d1+d{distributed.world_size()})"
            )
        self.server = server
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ConfigError("call EmbeddedEngine.initialize() first")
        return self._engine

    def initialize(self, addrs: list[str] | None = None, train_batch_size: int | None = None) -> None:
        self._engine = Engine(self.server).start()
        self.start_executor(train_batch_size)

    def destroy(self) -> None:
        if self._executor is not None:
            self._executor.abandon()
        super().destroy()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return await self._complete(Progress(request, request.seed), time.monotonic())

    async def agenerate_group(self, request: ModelRequest) -> list[ModelResponse]:
        count, began = request.gconfig.n_samples, time.monotonic()
        seeds = [None if request.seed is None else request.seed + i for i in range(count)]
        samples = [Progress(request, seed, i) for i, seed in enumerate(seeds)]
        for sample, piece in zip(samples, await self._ask(samples[0], count), strict=True):
            sample.num_asked = samples[0].num_asked
            sample.add(piece)
        return list(await asyncio.gather(*(self._complete(s, began) for s in samples)))

    async def _complete(self, progress: Progress, began: float) -> ModelResponse:
        while progress.stop_reason == "abort":
            try:
                progress.add((await self._ask(progress, 1))[0])
            except RequestError:
                if not progress.tokens:
                    raise
                progress.stop_reason = "length"  # interrupted where the context was full
        return progress.response(began)

    async def _ask(self, progress: Progress, count: int) -> list[Piece]:
        asked = progress.next_segment(progress.left)
        params = SamplingParams.from_json(sampling_params(progress, count, asked))
        prompt = progress.request.input_ids + progress.tokens
        request = Request(prompt, params, progress.next_rid())
        try:
            outputs = await asyncio.wrap_future(self.engine.submit(request))
        except asyncio.CancelledError:
            self.engine.abort(request.rid)
            raise
        return [_piece(output) for output in outputs]

    def server_info(self, probe: str = "") -> list[dict[str, Any]]:
        """What the engine says of itself; with the path of a probe, also what it reads there."""
        return [self.engine.stats() | ({"probe": read_probe(probe)} if probe else {})]

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        limit, flush = self.config.setup_timeout_s, self.config.pause_mode == "abort"
        what = f"version {meta.version} to be in use"
        wait = NamedWait("update_weights", what, limit, "rollout.setup_timeout_s")
        source = WeightSource.published(meta)
        if meta.type == "broadcast":
            source = WeightSource.received(get_outbox(meta.path), meta.version)
        try:
            self.engine.update(source, flush).result(limit)
        except TimeoutError:
            raise wait.error("the engine has not swapped", "one of its steps hangs") from None
        self.set_version(meta.version)


def _piece(output: SampleOutput) -> Piece:
    if output.finish_reason.get("status_code"):
        raise ServerError(f"the engine gave a request up: {output.finish_reason['message']}")
    versions: list[int] = []
    for version, start, end in output.version_spans:
        versions += [version] * (end - start)
    return Piece(output.token_ids, output.logprobs, versions, output.finish_reason["type"])
