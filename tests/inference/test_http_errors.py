"""What clients are told when a request cannot be answered: by the status, or inside a stream that has begun."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from arealite.api.cli_args import ServerConfig
from arealite.inference.engine import Engine
from arealite.inference.server import make_app
from tests.inference.conftest import make_model


def call(engine: Engine, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Status and JSON of one request; of a stream, the list of its events."""

    async def ask() -> tuple[int, Any]:
        async with TestClient(TestServer(make_app(engine, ServerConfig()))) as client:
            method = "GET" if body is None else "POST"
            answer = await client.request(method, path, json=body)
            text = await answer.text()
        if answer.content_type == "text/event-stream":
            events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            assert events.pop() == "[DONE]"
            return answer.status, [strict(event) for event in events]
        return answer.status, strict(text)

    return asyncio.run(asyncio.wait_for(ask(), 60))


def strict(text: str) -> Any:
    """JSON as everybody reads it: without NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON: {text}")

    return json.loads(text, parse_constant=refuse)


def message(answer: Any) -> str:
    return answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_stop_strings_of_a_model_without_tokenizer_are_refused(stream, make_engine):
    engine = make_engine(make_model())
    body = {"input_ids": [1, 2], "stream": stream}
    for more in ({"sampling_params": {"stop": "x"}}, {"return_text": True}):
        status, answer = call(engine, "/generate", body | more)
        assert status == 400 and "tokenizer" in message(answer)
    assert call(engine, "/generate", body)[0] == 200
