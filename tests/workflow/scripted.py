"""An engine that answers with given texts, and tools, environments and agents that misbehave."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from arealite.api.errors import RequestError
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.api.rollout_api import Environment


class ScriptedEngine:
    """Answers the turns of each sample with `script`: texts, or a function of the prompt's text."""

    def __init__(self, tokenizer: Any, script: Any, end: str | None = None, max_tokens: int = 100_000):
        self.tokenizer, self.script, self.max_tokens = tokenizer, script, max_tokens
        self.end = tokenizer.eos_token_id if end is None else tokenizer.convert_tokens_to_ids(end)
        self.requests: list[ModelRequest] = []
        self.prompts: list[str] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        if len(request.input_ids) > self.max_tokens:
            raise RequestError("the prompt is too long")
        self.requests.append(request)
        prompt = self.tokenizer.decode(request.input_ids)
        self.prompts.append(prompt)
        text = self.script(prompt) if callable(self.script) else self.script[len(self.requests) - 1]
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), self.end]
        return ModelResponse(request.input_ids, tokens, [-0.5] * len(tokens), [2] * len(tokens), "stop")

    async def agenerate_group(self, request: ModelRequest) -> list[ModelResponse]:
        return [await self.agenerate(request) for _ in range(request.gconfig.n_samples)]


def run(workflow: Any, engine: Any, row: dict[str, Any]) -> Any:
    """Play one episode and end the workers of the workflow."""

    async def play() -> Any:
        try:
            async with asyncio.timeout(100):
                return await workflow.arun_episode(engine, row)
        finally:
            for name in ("reward_pool", "tool_pool", "pool"):
                if hasattr(workflow, name):
                    getattr(workflow, name).close()

    return asyncio.run(play())


# Tools.


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def double(x: float, times: int = 1) -> float:
    """Double a number."""
    return x * 2**times


def hang(a: int = 0) -> None:
    """Never return."""
    while True:
        time.sleep(60)


async def hang_politely() -> None:
    """Never return."""
    await asyncio.Event().wait()


async def give_up() -> None:
    """Wait for something, with a deadline of its own."""
    raise TimeoutError("no answer of the service")


async def lose_connection() -> None:
    """Wait for something that a client of its own cancels, as that of MCP does when its server ends."""
    answer = asyncio.get_running_loop().create_future()
    answer.cancel("connection lost")
    await answer


def crash() -> None:
    """End the process."""
    os._exit(7)


def fail(reason: str) -> None:
    """Raise."""
    raise ValueError(reason)


async def fail_here(reason: str) -> None:
    """Raise."""
    raise ValueError(reason)


async def leave() -> None:
    """Exit, as a program does that was made a tool."""
    raise SystemExit(2)


def flood(size: int) -> str:
    """Return a lot."""
    return "x" * size


# Environments.


class Count(Environment):
    """Wants the numbers from one up to `limit`, one each step."""

    def __init__(self) -> None:
        self.at = self.limit = 0
        self.num_resets = 0

    def reset(self, *, seed=None, options=None):
        options = options or {}
        self.at, self.limit = 0, options.get("limit", 3)
        self.num_resets += 1
        if options.get("fault") == "hang in reset":
            time.sleep(600)
        return f"count to {self.limit}", {"seed": seed}

    def step(self, action):
        if action == "crash":
            os._exit(9)
        if action == "raise":
            raise KeyError("no such state")
        if action == "nothing":
            return None
        is_right = action == str(self.at + 1)
        self.at += is_right
        return f"at {self.at}", float(is_right), self.at == self.limit, action == "stop", {"large": b"x" * 100}


class AsyncCount(Environment):
    """The same with coroutines."""

    def __init__(self) -> None:
        self.inner, self.is_closed = Count(), False

    async def reset(self, *, seed=None, options=None):
        return self.inner.reset(seed=seed, options=options)

    async def step(self, action):
        if action == "hang":
            await asyncio.Event().wait()
        return self.inner.step(action)
