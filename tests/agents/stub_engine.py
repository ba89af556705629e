"""An engine without a model: answers come from a function of the prompt's tokens."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import ModelRequest, ModelResponse


class StubEngine:
    """`answer(request)` returns the sampled tokens; log-probs are -1, -2, … so that mistakes show.

    Requests that want to be told tokens are told each; after all but the last, the engine waits for `gate`. It
    raises `error` then, if there is one.
    """

    def __init__(self, answer: Callable[[ModelRequest], list[int]], version: int = 3):
        self.answer, self.version = answer, version
        self.requests: list[ModelRequest] = []
        self.gate: asyncio.Event | None = None
        self.tells = True
        self.error: Exception | None = None

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        tokens = self.answer(request)
        if request.on_tokens is not None and self.tells:
            for i, token in enumerate(tokens[:-1]):
                request.on_tokens(0, i, [token], [-float(i + 1)])
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        limit = request.gconfig.max_new_tokens
        reason = "stop" if len(tokens) <= limit else "length"
        tokens = tokens[:limit]
        logprobs = [-float(i + 1) for i in range(len(tokens))]
        return ModelResponse(request.input_ids, tokens, logprobs, [self.version] * len(tokens), reason)

    async def agenerate_group(self, request: ModelRequest) -> list[ModelResponse]:
        return await InferenceEngine.agenerate_group(self, request)  # pyright: ignore[reportArgumentType]

    def get_version(self) -> int:
        return self.version


def stub_engine(answer: Callable[[ModelRequest], list[int]], **options: Any) -> InferenceEngine:
    return cast(InferenceEngine, StubEngine(answer, **options))
