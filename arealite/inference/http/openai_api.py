"""OpenAI's `/v1/completions`, `/v1/chat/completions` and `/v1/models`, for agents and tools.

Only the sampled token's log-prob is known, so `top_logprobs` is rejected. Fields beyond OpenAI's: `top_k`, `min_p`,
`repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids`, and `return_token_ids`, which adds the token ids of
prompt and output, so that a trainer need not tokenize the text again.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator
from functools import lru_cache
from typing import Any

from aiohttp import web
from jinja2 import TemplateError
from orjson import dumps

from arealite.api.errors import RequestError
from arealite.inference.engine import Engine
from arealite.inference.http import common
from arealite.inference.http.generate_api import SHORT_TEXT, encode, tokenize
from arealite.inference.sequence import MAX_SAMPLES, Request, SampleOutput, SamplingParams

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "skip_special_tokens",
)  # fmt: skip
# OpenAI's names of sampling parameters, and ours.
_SAMPLING = {name: name for name in _SAME_NAME} | {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
_OTHER = {
    "model", "prompt", "messages", "tools", "chat_template_kwargs", "stream", "user", "metadata", "stream_options",
}  # fmt: skip
# Fields that are accepted with these values only; most of them change nothing.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "logprobs": (True, False, 0, 1),  # /v1/completions counts alternatives here
    "return_token_ids": (True, False),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "echo": (False,),
    "best_of": (1,),
    "top_logprobs": (0,),
}


async def models(http_request: web.Request) -> web.Response:
    """Handle `/v1/models`: the one model, in a list or by its name."""
    engine, name = http_request.app[common.ENGINE], http_request.match_info.get("name")
    own = engine.config.model_path
    entry = {"id": own, "object": "model", "created": int(time.time()), "owned_by": "arealite"}
    entry["max_model_len"] = engine.max_len
    if name is None:
        return common.json_response({"object": "list", "data": [entry]})
    if name != own:
        raise web.HTTPNotFound(reason=f"model {name!r} is not served here, {own!r} is")
    return common.json_response(entry)


async def completions(http_request: web.Request) -> web.StreamResponse:
    """Handle `/v1/completions`."""
    engine, body = http_request.app[common.ENGINE], await common.read_object(http_request)
    params = _sampling(body, default_max_tokens=16)
    prompts = await _prompts(engine, body.get("prompt"), params.n)
    requests = [Request(ids, params, want_text=engine.tokenizer is not None) for ids in prompts]
    if common.flag(body, "stream"):
        if len(requests) > 1:
            raise RequestError("stream takes one prompt")
        return await common.event_stream(http_request, _stream(engine, requests[0], body, chat=False))
    for request in requests:
        engine.check(request)  # before any of them is submitted
    tasks = [asyncio.create_task(common.finish(http_request.app, request)) for request in requests]
    try:
        groups = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # if one has failed, abort the others
    return common.json_response(_result(engine, requests, groups, body, chat=False))


async def chat_completions(http_request: web.Request) -> web.StreamResponse:
    """Handle `/v1/chat/completions`."""
    engine, body = http_request.app[common.ENGINE], await common.read_object(http_request)
    if http_request.content_length is not None and http_request.content_length <= SHORT_TEXT:
        ids = _chat_prompt(engine, body)
    else:
        ids = await common.run_beside(lambda: _chat_prompt(engine, body))
    params = _sampling(body, default_max_tokens=max(1, engine.max_len - len(ids)))
    request = Request(ids, params, want_text=True)
    if common.flag(body, "stream"):
        return await common.event_stream(http_request, _stream(engine, request, body, chat=True))
    outputs = await common.finish(http_request.app, request)
    return common.json_response(_result(engine, [request], [outputs], body, chat=True))


def _sampling(body: dict[str, Any], default_max_tokens: int) -> SamplingParams:
    for name, value in body.items():
        if value is None or name in _SAMPLING or name in _OTHER:
            continue
        if name not in _CHOICES:
            raise RequestError(f"unknown or unsupported field {name!r}")
        if value not in _CHOICES[name]:
            known = " or ".join(map(str, _CHOICES[name]))
            raise RequestError(f"{name}={value!r} is not supported; use {known}, or leave it out")
    values = {"max_new_tokens": default_max_tokens}
    values |= {_SAMPLING[k]: v for k, v in body.items() if k in _SAMPLING and v is not None}
    return SamplingParams.from_json(values)


async def _prompts(engine: Engine, prompt: Any, num_samples: int) -> list[list[int]]:
    """Token ids of each prompt: a text, a list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return [await encode(engine, prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt must be a text, a list of token ids, or a list of those")
    if all(type(token) is int for token in prompt):
        return [common.check_token_ids(prompt, "prompt")]
    if len(prompt) * num_samples > MAX_SAMPLES:
        raise RequestError(f"{len(prompt)} prompts with n={num_samples}: a request may have {MAX_SAMPLES} answers")
    for part in prompt:
        if not isinstance(part, str):
            common.check_token_ids(part, "prompt")

    def tokenize_all() -> list[list[int]]:
        return [tokenize(engine, part) if isinstance(part, str) else part for part in prompt]

    # Many short texts take as long as a long one.
    is_short = sum(len(part) for part in prompt if isinstance(part, str)) <= SHORT_TEXT
    return tokenize_all() if is_short else await common.run_beside(tokenize_all)


def _chat_prompt(engine: Engine, body: dict[str, Any]) -> list[int]:
    tokenizer = engine.tokenizer
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise RequestError("messages must be a non-empty list")
    messages = [_message(message) for message in body["messages"]]
    num_characters = sum(len(message.get("content") or "") for message in messages)
    if num_characters > SHORT_TEXT and num_characters > engine.max_characters:
        raise RequestError(f"the messages have more characters than {engine.max_len} tokens can hold: shorten them")
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise RequestError("the model's tokenizer has no chat template: use /v1/completions")
    variables = body.get("chat_template_kwargs") or {}
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    if not isinstance(variables, dict) or variables.keys() & own.keys():
        raise RequestError(f"chat_template_kwargs must map variables of the template to values, got {variables!r}")
    settings = {"tools": body.get("tools"), "add_generation_prompt": True, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(messages, **settings, **variables)
    except (TypeError, ValueError, LookupError, AttributeError, TemplateError) as error:
        raise RequestError(f"the chat template rejects these messages: {error}") from error
    return tokenize(engine, text, add_special_tokens=False)


def _message(message: Any) -> dict[str, Any]:
    """Check a message and join text parts: most chat templates take text only."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError("every message must be an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, dict) else 0 for part in content]
        if not all(isinstance(text, str) for text in parts):
            raise RequestError("the embedded engine reads text only: every part of content must be a text")
        return {**message, "content": "".join(parts)}
    if not isinstance(content, str | None):
        raise RequestError(f"content must be a text or a list of parts, got {content!r:.60}")
    return message


def _result(
    engine: Engine, requests: list[Request], groups: list[list[SampleOutput]], body: dict[str, Any], chat: bool
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
    usage = _usage(prompt_tokens, [output for outputs in groups for output in outputs])
    return {**_envelope(engine, requests[0], body, chat), "choices": choices, "usage": usage}


def _usage(prompt_tokens: int, outputs: list[SampleOutput]) -> dict[str, int]:
    sampled = sum(len(output.token_ids) for output in outputs)
    total = prompt_tokens + sampled
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": total}


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


def _content(engine: Engine, output: SampleOutput, body: dict[str, Any], chat: bool) -> dict[str, Any]:
    text = output.text or ""
    content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    if _wants_logprobs(body):
        content["logprobs"] = _logprobs(engine, output.token_ids, output.logprobs, chat)
    return {**content, "finish_reason": output.finish_reason["type"]}


def _wants_logprobs(body: dict[str, Any]) -> bool:
    """Whether log-probs are wanted: in `/v1/completions` 0 means the sampled token's only."""
    return body.get("logprobs") is not None and body["logprobs"] is not False


def _logprobs(engine: Engine, ids: list[int], logprobs: list[float], chat: bool) -> dict[str, Any]:
    texts = [_token_text(engine.tokenizer, token) for token in ids]
    if not chat:
        return {"tokens": texts, "token_logprobs": logprobs}
    content = [
        {
            "token": text,
            # None for a token that is a part of a character
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "logprob": logprob,
            "top_logprobs": [],
        }
        for text, logprob in zip(texts, logprobs, strict=True)
    ]
    return {"content": content}


@lru_cache(1 << 17)
def _token_text(tokenizer: Any | None, token: int) -> str:
    """The text of a token in the middle of a text, with its leading blank."""
    if tokenizer is None:
        return f"token_id:{token}"
    text = tokenizer.decode([token])
    is_word = (tokenizer.convert_ids_to_tokens(token) or "").startswith("\u2581")
    return f" {text}" if is_word and not text.startswith(" ") else text


async def _stream(engine: Engine, request: Request, body: dict[str, Any], chat: bool) -> AsyncGenerator[bytes, None]:
    """Yield a chunk per piece of text (per token with log-probs or ids), and a last one per choice."""
    envelope = _envelope(engine, request, body, chat)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError(f"stream_options must be an object, got {options!r}")
    num_sent = [0] * request.params.n  # characters
    async for event in common.progress(engine, request):
        if isinstance(event, list):
            for i, output in enumerate(event):
                rest = (output.text or "")[num_sent[i] :]
                piece = _piece(i, rest, output.finish_reason["type"], chat)
                if body.get("return_token_ids"):
                    piece["prompt_token_ids"] = request.prompt.tolist()
                yield dumps({**envelope, "choices": [piece]})
            if options.get("include_usage"):
                usage = _usage(len(request.prompt), event)
                yield dumps({**envelope, "choices": [], "usage": usage})
            return
        index, token, logprob, text = event
        num_sent[index] += len(text)
        piece = _piece(index, text, None, chat)
        if _wants_logprobs(body):
            piece["logprobs"] = _logprobs(engine, [token], [logprob], chat)
        if body.get("return_token_ids"):
            piece["token_ids"] = [token]
        if text or piece.keys() & {"logprobs", "token_ids"}:
            yield dumps({**envelope, "choices": [piece]})


def _piece(index: int, text: str, reason: str | None, chat: bool) -> dict[str, Any]:
    content = {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": index, **content, "finish_reason": reason}
