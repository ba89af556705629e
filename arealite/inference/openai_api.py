"""OpenAI's `/v1/completions`, `/v1/chat/completions` and `/v1/models`, for agents and tools that speak them.

Beyond OpenAI's fields: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids`, and `return_token_ids` (adds the prompt's and
the output's token ids, so that a trainer need not tokenise again).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from arealite.api.errors import RequestError
from arealite.inference.engine import Engine
from arealite.inference.generate_api import encode
from arealite.inference.http import (
    ENGINE,
    event_stream,
    finish,
    json_response,
    progress,
    read_object,
    token_ids,
)
from arealite.inference.sequence import Request, SampleOutput, SamplingParams

_SAMPLING = {
    "n": "n",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "logit_bias",
            "skip_special_tokens",
        )
    },
}
_OTHER = {
    "model",
    "prompt",
    "messages",
    "tools",
    "chat_template_kwargs",
    "stream",
    "logprobs",
    "top_logprobs",
    "user",
    "return_token_ids",
    "stream_options",
}


async def models(http_request: web.Request) -> web.Response:
    engine = http_request.app[ENGINE]
    entry = {"id": engine.config.model_path, "object": "model", "owned_by": "arealite"}
    return json_response({"object": "list", "data": [{**entry, "max_model_len": engine.max_len}]})


async def completions(http_request: web.Request) -> web.StreamResponse:
    engine, body = http_request.app[ENGINE], await read_object(http_request)
    params = _sampling(body, default_max_tokens=16)
    prompts = _prompts(engine, body.get("prompt"))
    requests = [Request(ids, params, want_text=engine.tokenizer is not None) for ids in prompts]
    if body.get("stream"):
        if len(requests) > 1:
            raise RequestError("stream takes one prompt")
        return await event_stream(http_request, _stream(engine, requests[0], body, chat=False))
    groups = await asyncio.gather(*(finish(http_request.app, request) for request in requests))
    return json_response(_result(engine, requests, groups, body, chat=False))


async def chat_completions(http_request: web.Request) -> web.StreamResponse:
    engine, body = http_request.app[ENGINE], await read_object(http_request)
    ids = _chat_prompt(engine, body)
    params = _sampling(body, default_max_tokens=max(1, engine.max_len - len(ids)))
    request = Request(ids, params, want_text=True)
    if body.get("stream"):
        return await event_stream(http_request, _stream(engine, request, body, chat=True))
    outputs = await finish(http_request.app, request)
    return json_response(_result(engine, [request], [outputs], body, chat=True))


def _sampling(body: dict[str, Any], default_max_tokens: int) -> SamplingParams:
    unknown = sorted(set(body) - set(_SAMPLING) - _OTHER)
    if unknown:
        raise RequestError(f"unknown or unsupported field {unknown[0]!r}")
    values = {"max_new_tokens": default_max_tokens}
    values |= {_SAMPLING[k]: v for k, v in body.items() if k in _SAMPLING and v is not None}
    return SamplingParams.from_json(values)


def _prompts(engine: Engine, prompt: Any) -> list[list[int]]:
    """A prompt is a text, a list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return [encode(engine, prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt must be a text, a list of token ids, or a list of those")
    if all(type(token) is int for token in prompt):
        return [token_ids(prompt, "prompt")]
    return [
        encode(engine, part) if isinstance(part, str) else token_ids(part, "prompt")
        for part in prompt
    ]


def _chat_prompt(engine: Engine, body: dict[str, Any]) -> list[int]:
    messages, tokenizer = body.get("messages"), engine.tokenizer
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a non-empty list")
    if any(not isinstance(message, dict) or "role" not in message for message in messages):
        raise RequestError("every message must be an object with a role")
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise RequestError("the model's tokenizer has no chat template: use /v1/completions")
    try:
        encoded = tokenizer.apply_chat_template(
            messages,
            tools=body.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
            **(body.get("chat_template_kwargs") or {}),
        )
    except (TypeError, ValueError, KeyError) as error:
        raise RequestError(f"the chat template refuses these messages: {error}") from error
    return list(encoded)


def _result(
    engine: Engine,
    requests: list[Request],
    groups: list[list[SampleOutput]],
    body: dict[str, Any],
    chat: bool,
) -> dict[str, Any]:
    choices = []
    for request, outputs in zip(requests, groups, strict=True):
        for output in outputs:
            choice = {"index": len(choices), **_content(engine, output, body, chat)}
            if body.get("return_token_ids"):
                choice["token_ids"] = output.token_ids
                choice["prompt_token_ids"] = request.prompt.tolist()
            choices.append(choice)
    prompt_tokens = sum(len(request.prompt) for request in requests)
    completion_tokens = sum(len(output.token_ids) for outputs in groups for output in outputs)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return {**_envelope(engine, requests[0], body, chat), "choices": choices, "usage": usage}


def _envelope(engine: Engine, request: Request, body: dict[str, Any], chat: bool) -> dict[str, Any]:
    kind = "chat.completion" if chat else "text_completion"
    if body.get("stream"):
        kind = "chat.completion.chunk" if chat else kind
    return {
        "id": request.rid,
        "object": kind,
        "created": int(time.time()),
        "model": engine.config.model_path,
        "weight_version": str(engine.version),
    }


def _content(
    engine: Engine, output: SampleOutput, body: dict[str, Any], chat: bool
) -> dict[str, Any]:
    text = output.text or ""
    content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    # `false` asks for none; OpenAI's completions endpoint counts alternatives, of which 0 still means the token itself.
    if body.get("logprobs") is not None and body["logprobs"] is not False:
        content["logprobs"] = _logprobs(engine, output, chat)
    return {**content, "finish_reason": output.finish_reason["type"]}


def _logprobs(engine: Engine, output: SampleOutput, chat: bool) -> dict[str, Any]:
    ids, logprobs = output.token_ids, output.logprobs
    names = (
        [f"token_id:{token}" for token in ids]
        if engine.tokenizer is None
        else engine.tokenizer.convert_ids_to_tokens(ids)
    )
    if not chat:
        return {"tokens": names, "token_logprobs": logprobs}
    rows = zip(names, logprobs, strict=True)
    return {"content": [{"token": name, "logprob": value} for name, value in rows]}


async def _stream(
    engine: Engine, request: Request, body: dict[str, Any], chat: bool
) -> AsyncIterator[str]:
    """One chunk per piece of text, and a last one per choice with its finish_reason."""
    envelope = _envelope(engine, request, body, chat)
    async for event in progress(engine, request):
        if isinstance(event, list):
            for i, output in enumerate(event):
                piece = _piece(i, "", output.finish_reason["type"], chat)
                yield json.dumps({**envelope, "choices": [piece]})
            return
        index, _, _, text = event
        if text:
            yield json.dumps({**envelope, "choices": [_piece(index, text, None, chat)]})


def _piece(index: int, text: str, reason: str | None, chat: bool) -> dict[str, Any]:
    content = {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": index, **content, "finish_reason": reason}
