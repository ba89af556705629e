"""`POST /generate`: SGLang's native endpoint, token ids (or text) in, token ids with log-probs and weight versions out.

Differences from SGLang, on purpose: log-probs are always returned; `text` is only made when the prompt was text, or `stop`, `stream` or
`return_text` ask for it (decoding costs more than sampling on small models); `return_raw_logprob` adds the log-probs at temperature 1.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from arealite.api.errors import RequestError
from arealite.inference.engine import Engine
from arealite.inference.http.common import ENGINE, event_stream, finish, flag, progress, read_object, token_ids
from arealite.inference.http.json_arrays import encode_tokens
from arealite.inference.sequence import Request, SampleOutput, SamplingParams

_KNOWN = {
    "text",
    "input_ids",
    "sampling_params",
    "rid",
    "stream",
    "return_text",
    "return_raw_logprob",
    "return_logprob",
    "logprob_start_len",
    "priority",
}
_UNSUPPORTED = ("image_data", "lora_path", "top_logprobs_num", "return_routed_experts")


async def generate(http_request: web.Request) -> web.StreamResponse:
    engine, body = http_request.app[ENGINE], await read_object(http_request)
    request = parse(engine, body)
    if flag(body, "stream"):
        request.want_text |= engine.tokenizer is not None
        return await event_stream(http_request, _stream(engine, request))
    outputs = await finish(http_request.app, request)
    parts = [encode_output(engine, request, i, output) for i, output in enumerate(outputs)]
    body = f"[{','.join(parts)}]" if request.params.n > 1 else parts[0]
    return web.Response(body=body.encode(), content_type="application/json")


def parse(engine: Engine, body: dict[str, Any]) -> Request:
    for name in _UNSUPPORTED:
        if body.pop(name, None):
            raise RequestError(f"{name} is not supported by the embedded engine")
    unknown = sorted(set(body) - _KNOWN)
    if unknown:
        raise RequestError(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(_KNOWN))}")
    text, ids, params = body.get("text"), body.get("input_ids"), body.get("sampling_params")
    if (text is None) == (ids is None):
        raise RequestError("give either text or input_ids")
    if ids is None:
        ids = encode(engine, text)
    rid = body.get("rid")
    if rid is not None and not isinstance(rid, str):
        raise RequestError(f"rid must be a string, got {rid!r}")
    return Request(
        token_ids(ids, "input_ids"),
        SamplingParams.from_json({} if params is None else params),
        rid,
        want_text=text is not None or flag(body, "return_text"),
        want_raw_logprobs=flag(body, "return_raw_logprob"),
    )


def check_text(text: str) -> None:
    """JSON can write halves of characters, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is not valid Unicode: {error}") from error


def encode(engine: Engine, text: Any) -> list[int]:
    if not isinstance(text, str):
        raise RequestError(f"text must be a string, got {type(text).__name__}")
    if engine.tokenizer is None:
        raise RequestError("the model has no tokenizer: send input_ids")
    check_text(text)
    return engine.tokenizer.encode(text)


def describe(engine: Engine, request: Request, index: int, output: SampleOutput) -> dict[str, Any]:
    """All of an output's meta_info but the log-probs, as SGLang words it."""
    spans = output.version_spans
    version = spans[-1][0] if spans else engine.version
    meta = {
        "id": request.rid if request.params.n == 1 else f"{request.rid}_{index}",
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.cached_tokens,
        "weight_version": str(version),
        "weight_versions": [{"version": str(version), "start": start, "end": end} for version, start, end in spans],
        "e2e_latency": time.monotonic() - request.arrived_s,
        "finish_reason": output.finish_reason,
    }
    if output.raw_logprobs is not None:
        meta["output_token_raw_logprobs"] = output.raw_logprobs
    return meta


def encode_output(engine: Engine, request: Request, index: int, output: SampleOutput) -> str:
    """One output as JSON. Tokens and log-probs are most of it, and are not left to the encoder."""
    ids, logprobs = encode_tokens(output.token_ids, output.logprobs, engine.shape.vocab_size)
    meta = json.dumps(describe(engine, request, index, output), separators=(",", ":"))
    return (
        f'{{"text":{json.dumps(output.text or "")},"index":{index},"output_ids":[{ids}],'
        f'"meta_info":{{"output_token_logprobs":[{logprobs}],{meta[1:]}}}'
    )


async def _stream(engine: Engine, request: Request) -> AsyncIterator[str]:
    """Cumulative chunks, as SGLang sends them; the last one of each sample carries its finish_reason."""
    texts = [""] * request.params.n
    tokens: list[list[int]] = [[] for _ in texts]
    logprobs: list[list[float]] = [[] for _ in texts]
    async for event in progress(engine, request):
        if isinstance(event, list):
            for i, output in enumerate(event):
                yield encode_output(engine, request, i, output)
            return
        index, token, logprob, text = event
        texts[index] += text
        tokens[index].append(token)
        logprobs[index].append(logprob)
        partial = SampleOutput(tokens[index], logprobs[index], None, [], None, 0, text=texts[index])
        yield encode_output(engine, request, index, partial)
