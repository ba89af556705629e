"""`POST /generate`, SGLang's native endpoint: returns token ids, log-probs and weight versions.

Differences from SGLang: log-probs of the output are always returned, those of the prompt never. `text` is made only
if the prompt is text, or if `stop`, `stream` or `return_text` ask for it, because decoding costs more than sampling
on small models. `return_raw_logprob` adds the log-probs at temperature 1. `return_routed_experts` (with
`record_routing`) adds the experts of each token but the last as base64, in the type `routed_experts_dtype`, where
SGLang has int32 and all layers. `image_data` goes with a text that has one placeholder for each image, or with ids in
which the placeholders are expanded already.
"""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from arealite.api.errors import RequestError
from arealite.inference.engine import Engine
from arealite.inference.http import common
from arealite.inference.http.images import read_images
from arealite.inference.sequence import Request, SampleOutput, SamplingParams
from arealite.protocol.answer import event_bytes

_KNOWN = {
    "text", "input_ids", "sampling_params", "rid", "stream", "return_text", "return_raw_logprob", "return_logprob",
    "logprob_start_len", "image_data", "return_routed_experts", "flat_logprobs",
}  # fmt: skip
# Characters that are tokenized on the event loop: a thread would take longer.
SHORT_TEXT = 4096
_UNSUPPORTED = ("lora_path", "top_logprobs_num", "priority")


async def generate(http_request: web.Request) -> web.StreamResponse:
    """Handle `/generate`."""
    engine, body = http_request.app[common.ENGINE], await common.read_object(http_request)
    request = await parse(engine, body)
    is_flat = common.flag(body, "flat_logprobs")
    is_stream = common.flag(body, "stream")
    if is_stream:
        if is_flat:
            raise RequestError("flat_logprobs works without stream only: chunks of a stream have SGLang's form")
        request.want_text |= engine.tokenizer is not None
    if request.want_text:
        request.continue_prompt(engine.tokenizer)
    if is_stream:
        return await common.event_stream(http_request, _stream(engine, request))
    outputs = await common.finish(http_request.app, request)
    answers = [describe(engine, request, i, output, is_flat) for i, output in enumerate(outputs)]
    return common.json_response(answers if request.params.n > 1 else answers[0])


async def parse(engine: Engine, body: dict[str, Any]) -> Request:
    """Make a request from a JSON body; `RequestError` says what is wrong with it."""
    for name in _UNSUPPORTED:
        if body.pop(name, None):
            raise RequestError(f"{name} is not supported by the embedded engine")
    unknown = sorted(set(body) - _KNOWN)
    if unknown:
        raise RequestError(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(_KNOWN))}")
    text, ids, params = body.get("text"), body.get("input_ids"), body.get("sampling_params")
    if (text is None) == (ids is None):
        raise RequestError("give either text or input_ids")
    images = None
    if body.get("image_data") is not None:
        data = await common.run_beside(lambda: read_images(body["image_data"], engine.config.image_folder))
        if text is None:
            prompt: Any = common.check_token_ids(ids, "input_ids")
        else:
            prompt = check_prompt_text(engine, text)
        ids, images = await asyncio.wrap_future(engine.read_prompt(prompt, data))
    elif ids is None:
        ids = await encode(engine, text)
    ids = common.check_token_ids(ids, "input_ids")
    check_start(body, len(ids))
    rid = body.get("rid")
    if rid is not None and not isinstance(rid, str):
        raise RequestError(f"rid must be a string, got {rid!r}")
    check_text(rid or "")
    return Request(
        ids,
        SamplingParams.from_json({} if params is None else params),
        rid,
        want_text=text is not None or common.flag(body, "return_text"),
        want_raw_logprobs=common.flag(body, "return_raw_logprob"),
        want_routing=common.flag(body, "return_routed_experts"),
        images=images,
    )


def check_start(body: dict[str, Any], num_prompt: int) -> None:
    """Reject a request for log-probs of the prompt, which are not computed. SGLang's default is -1."""
    start = body.get("logprob_start_len")
    if start is None or not common.flag(body, "return_logprob"):
        return
    if type(start) is not int or (start != -1 and start < num_prompt - 1):
        raise RequestError(f"logprob_start_len={start!r:.60} is not supported: use -1, for the output's log-probs only")


def check_text(text: str) -> None:
    """Reject lone surrogates, which JSON can contain and tokenizers cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is not valid Unicode: {error}") from error


async def encode(engine: Engine, text: Any) -> list[int]:
    """Tokenize a prompt; a long one beside the event loop."""
    if not isinstance(text, str):
        raise RequestError(f"text must be a string, got {type(text).__name__}")
    if len(text) <= SHORT_TEXT:
        return tokenize(engine, text)
    return await common.run_beside(lambda: tokenize(engine, text))


def tokenize(engine: Engine, text: str, **settings: Any) -> list[int]:
    """Tokenize a text that may fit into the context; raises `RequestError` for others."""
    check_prompt_text(engine, text)
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text, **settings)


def check_prompt_text(engine: Engine, text: Any) -> str:
    """Raise `RequestError` for a text that is no valid prompt or cannot fit into the context."""
    if not isinstance(text, str):
        raise RequestError(f"text must be a string, got {type(text).__name__}")
    if engine.tokenizer is None:
        raise RequestError("the model has no tokenizer: send input_ids")
    if len(text) > SHORT_TEXT and len(text) > engine.max_characters:
        raise RequestError(
            f"the text has {len(text)} characters; prompt and continuation together may have {engine.max_len} tokens, "
            f"at most {engine.max_characters} characters: shorten it"
        )
    check_text(text)
    return text


def describe(
    engine: Engine, request: Request, index: int, output: SampleOutput, is_flat: bool = False
) -> dict[str, Any]:
    """Describe an output with SGLang's field names; `is_flat`: log-probs as one list, read faster."""
    spans = output.version_spans
    version = spans[-1][0] if spans else engine.version
    ids = output.token_ids
    entries = output.logprobs if is_flat else list(zip(output.logprobs, ids, [None] * len(ids), strict=True))
    meta = {
        "output_logprobs" if is_flat else "output_token_logprobs": entries,
        "id": request.rid if request.params.n == 1 else f"{request.rid}_{index}",
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(ids),
        "cached_tokens": output.cached_tokens,
        "weight_version": str(version),
        "weight_versions": [{"version": str(version), "start": start, "end": end} for version, start, end in spans],
        "e2e_latency": time.monotonic() - request.arrived_s,
        "finish_reason": output.finish_reason,
    }
    if output.raw_logprobs is not None:
        meta["output_token_raw_logprobs"] = output.raw_logprobs
    if output.routed_experts is not None:
        meta["routed_experts"] = base64.b64encode(output.routed_experts.tobytes()).decode()
        meta["routed_experts_dtype"] = output.routed_experts.dtype.name
    return {"text": output.text or "", "index": index, "output_ids": ids, "meta_info": meta}


async def _stream(engine: Engine, request: Request) -> AsyncGenerator[bytes, None]:
    """Yield cumulative chunks as SGLang does; the last one of each sample has its finish_reason."""
    texts = [""] * request.params.n
    tokens: list[list[int]] = [[] for _ in texts]
    logprobs: list[list[float]] = [[] for _ in texts]
    async for event in common.progress(engine, request):
        if isinstance(event, list):
            for i, output in enumerate(event):
                yield event_bytes(("", describe(engine, request, i, output)))
            return
        index, token, logprob, text, _ = event
        texts[index] += text
        tokens[index].append(token)
        logprobs[index].append(logprob)
        partial = SampleOutput(tokens[index], logprobs[index], None, [], None, 0, text=texts[index])
        yield event_bytes(("", describe(engine, request, index, partial)))
