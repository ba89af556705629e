"""Tests of HTTP errors: the status, or the last event of a stream that has begun."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch
from aiohttp import ClientError, web
from aiohttp.test_utils import TestClient, TestServer

from arealite.api.cli_args import ServerConfig
from arealite.inference.engine import Engine
from arealite.inference.http import common
from arealite.inference.http.server import make_app
from tests.inference.conftest import generate, make_model


def call(engine: Engine, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Return status and JSON of one request; of a stream, the list of its events."""

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
    """Parse JSON that may not contain NaN or infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON: {text}")

    return json.loads(text, parse_constant=refuse)


def message(answer: Any) -> str:
    return answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_stop_strings_need_a_tokenizer(stream, make_engine):
    engine = make_engine(make_model())
    body = {"input_ids": [1, 2], "stream": stream}
    for more in ({"sampling_params": {"stop": "x"}}, {"return_text": True}):
        status, answer = call(engine, "/generate", body | more)
        assert status == 400 and "tokenizer" in message(answer)
    assert call(engine, "/generate", body)[0] == 200


@pytest.mark.parametrize("more", [{"priority": 3}, {"lora_path": "a"}, {"top_logprobs_num": 2}])
def test_fields_of_sglang_that_would_have_no_effect_are_refused(more, make_engine):
    status, answer = call(make_engine(make_model()), "/generate", {"input_ids": [1, 2], **more})
    assert status == 400 and f"{next(iter(more))} is not supported" in message(answer)


def broken_engine(make_engine, num_good: int) -> Engine:
    """Make an engine whose logits are NaN after `num_good` greedy tokens of the prompt [1, 2, 3]."""
    model = make_model()
    tokens = generate(model, [1, 2, 3], num_good + 1, None)
    spoilt = [1, 2, 3, *tokens][num_good + 2]
    assert spoilt not in [1, 2, 3, *tokens][: num_good + 2]
    with torch.no_grad():
        model.get_input_embeddings().weight[spoilt] = torch.nan
    return make_engine(model)


GENERATE = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 99, "temperature": 0}}
COMPLETE = {"prompt": [1, 2, 3], "max_tokens": 99, "temperature": 0, "logprobs": 0}


def test_logprobs_of_the_prompt_are_refused(make_engine):
    engine, asked = make_engine(make_model()), GENERATE | {"return_logprob": True}
    for start in (0, 1, -2, 1.0, [0]):
        status, answer = call(engine, "/generate", asked | {"logprob_start_len": start})
        assert status == 400 and "logprob_start_len" in message(answer), start
    short = {"sampling_params": {"max_new_tokens": 2}}
    for start in (-1, None, 2, 3):  # of the output only
        assert call(engine, "/generate", asked | short | {"logprob_start_len": start})[0] == 200
    assert call(engine, "/generate", GENERATE | short | {"logprob_start_len": 0})[0] == 200
    assert call(engine, "/generate", asked | {"input_ids": 5, "logprob_start_len": 0})[0] == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/generate", GENERATE), ("/v1/completions", COMPLETE)])
def test_non_finite_logits_are_an_error(path, body, stream, make_engine):
    engine = broken_engine(make_engine, num_good=0)
    status, answer = call(engine, path, body | {"stream": stream})
    assert status == 500 and "weights are broken" in message(answer)


@pytest.mark.parametrize(("path", "body"), [("/generate", GENERATE), ("/v1/completions", COMPLETE)])
def test_error_in_a_running_stream_is_its_last_event(path, body, make_engine):
    engine = broken_engine(make_engine, num_good=3)
    status, (*chunks, last) = call(engine, path, body | {"stream": True})
    assert status == 200 and len(chunks) == 3
    assert last["error"]["code"] == 500 and "weights are broken" in message(last)
    assert not any("error" in chunk for chunk in chunks)


def test_server_with_broken_weights_is_unhealthy(make_engine):
    model = make_model()
    engine = make_engine(model)
    assert call(engine, "/health_generate") == (200, {"status": "ok"})
    for parameter in engine.model.parameters():
        parameter.fill_(torch.nan)
    status, answer = call(engine, "/health_generate")
    assert status == 500 and "weights are broken" in message(answer)


def test_unexpected_exception_is_logged_and_answered_with_500(make_engine, monkeypatch, caplog):
    engine = make_engine(make_model())
    monkeypatch.setattr(engine, "stats", lambda: {}["nothing"])
    status, answer = call(engine, "/server_info")
    assert status == 500 and "bug" in message(answer) and "KeyError" in message(answer)
    assert "/server_info" in caplog.text and "Traceback" in caplog.text


def test_a_client_that_leaves_before_the_first_event_is_no_error(caplog):
    """The generation is closed, so that its request is aborted."""
    was_closed = asyncio.Event()

    async def chunks():
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            was_closed.set()

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return await common.event_stream(request, chunks())

    async def ask() -> None:
        app = web.Application()
        app.add_routes([web.get("/", handle)])
        async with TestClient(TestServer(app)) as client:
            with pytest.raises(ClientError):
                await client.get("/")
            await was_closed.wait()

    asyncio.run(asyncio.wait_for(ask(), 60))
    assert not caplog.records
