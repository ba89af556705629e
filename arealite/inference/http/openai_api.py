"""OpenAI's completions, chat completions and responses, `/v1/models`, and Anthropic's messages.

The room `protocol` reads the requests and writes the answers; here they are generated. Fields beyond the APIs: `top_k`,
`min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids`, `chat_template_kwargs`, and
`return_token_ids`, which adds the token ids of prompt and output, so that a trainer need not tokenize the text again.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from arealite.api.errors import RequestError
from arealite.inference.engine import Engine
from arealite.inference.grammar import Grammar
from arealite.inference.http import common
from arealite.inference.http.generate_api import SHORT_TEXT
from arealite.inference.http.prompts import chat_prompt, read_prompts
from arealite.inference.sequence import Request, SampleOutput, SamplingParams
from arealite.protocol import chat
from arealite.protocol import completions as text_completions
from arealite.protocol.answer import Answer, Event, Head, Stream, TokenLogprob, Usage, event_bytes, to_json, token_text
from arealite.protocol.call_stream import CallPiece
from arealite.protocol.chat_apis import ApiRequest
from arealite.protocol.fields import FieldError
from arealite.protocol.tool_calls import ToolCall, hidden_tokens, opens_thinking, style_of


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


@dataclass
class Wanted:
    """What a client wants to see of the outputs."""

    logprobs: bool
    token_ids: bool
    conversation: chat.ChatRequest | None = None  # None: a text completion
    prefix: str = ""  # text before every answer that was not sampled
    thinks: bool = False  # the prompt ends with <think>


async def converse(read: Callable[[dict[str, Any]], ApiRequest], http_request: web.Request) -> web.StreamResponse:
    """Continue a conversation, in the form of any of the three chat APIs."""
    engine, api = http_request.app[common.ENGINE], read(await common.read_object(http_request))
    request = api.request
    is_short = http_request.content_length is not None and http_request.content_length <= SHORT_TEXT
    prompt = await chat_prompt(engine, request, is_short)
    longest = max(1, engine.max_len - len(prompt.ids))
    params = SamplingParams.from_json({"max_new_tokens": longest, **request.sampling})
    if params.min_new_tokens > params.max_new_tokens:
        raise FieldError("min_tokens", f"min_tokens must be at most {longest}, got {params.min_new_tokens}")
    generation = Request(
        prompt.ids,
        params,
        want_text=True,
        num_top_logprobs=request.top_logprobs,
        images=prompt.images,
        grammar=await _grammar(engine, params, request.json_schema),
    )
    if request.reads_calls and params.skip_special_tokens:
        generation.hidden_tokens = hidden_tokens(engine.tokenizer)
    engine.check(generation)
    thinks = request.reads_calls and opens_thinking(engine.tokenizer, prompt.ids)
    wanted = Wanted(request.logprobs, request.return_token_ids, request, prompt.prefix, thinks=thinks)
    head = _head(engine, generation)
    if request.stream:
        stream = api.stream(head, len(prompt.ids))
        return await common.event_stream(
            http_request, _stream(engine, generation, wanted, stream), stream.has_named_events
        )
    outputs = await common.finish(http_request.app, generation)
    answers = _answers(engine, generation, outputs, wanted)
    return _respond(api.write(head, answers, _usage([generation], [outputs])))


async def completions(http_request: web.Request) -> web.StreamResponse:
    """Handle `/v1/completions`."""
    engine, body = http_request.app[common.ENGINE], await common.read_object(http_request)
    request = text_completions.parse(body)
    params = SamplingParams.from_json(request.sampling)
    grammar = await _grammar(engine, params, request.json_schema)
    prompts = await read_prompts(engine, request.prompt, params.n)
    want: dict[str, Any] = {"want_text": engine.tokenizer is not None, "num_top_logprobs": request.logprobs or 0}
    generations = [Request(ids, params, **want, grammar=grammar) for ids in prompts]
    for generation in generations:
        engine.check(generation)  # before any of them is submitted
        generation.continue_prompt(engine.tokenizer)
    prefixes = _echoes(engine, request.prompt, prompts) if request.echo else [""] * len(prompts)
    views = [Wanted(request.logprobs is not None, request.return_token_ids, prefix=prefix) for prefix in prefixes]
    head = _head(engine, generations[0])
    if request.stream:
        if len(generations) > 1:
            raise RequestError("stream takes one prompt")
        stream = text_completions.CompletionStream(head, request)
        return await common.event_stream(http_request, _stream(engine, generations[0], views[0], stream))
    tasks = [asyncio.create_task(common.finish(http_request.app, generation)) for generation in generations]
    try:
        groups = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # if one has failed, abort the others
    parts = zip(generations, groups, views, strict=True)
    answers = [answer for part in parts for answer in _answers(engine, *part)]
    return _respond(text_completions.result(head, answers, _usage(generations, groups)))


async def _grammar(engine: Engine, params: SamplingParams, schema: dict[str, Any] | None) -> Grammar | None:
    """Make the grammar of a JSON schema; a large one takes a while. None: the answer is any text."""
    if schema is None:
        return None
    engine.check_grammar(params)
    if engine.tokenizer is None:
        raise RequestError("response_format needs a tokenizer, and the model has none")
    shape = engine.shape
    return await common.run_beside(lambda: Grammar(engine.tokenizer, schema, shape.vocab_size, shape.eos_ids))


def _respond(body: dict[str, Any]) -> web.Response:
    return web.Response(body=to_json(body), content_type="application/json")


def _head(engine: Engine, generation: Request) -> Head:
    extra = {"weight_version": str(engine.version)}
    return Head(generation.rid, engine.config.model_path, int(time.time()), extra)


def _usage(generations: list[Request], groups: list[list[SampleOutput]]) -> Usage:
    """Count tokens; a prompt counts once, whatever the number of its samples."""
    return Usage(
        prompt_tokens=sum(len(generation.prompt) for generation in generations),
        completion_tokens=sum(len(output.token_ids) for outputs in groups for output in outputs),
        cached_tokens=sum(outputs[0].cached_tokens for outputs in groups),
    )


def _echoes(engine: Engine, prompt: Any, prompts: list[list[int]]) -> list[str]:
    """Return the text of each prompt: what the client has sent, or the decoded tokens."""
    if engine.tokenizer is None:
        raise RequestError("echo needs a tokenizer, and the model has none")
    given = [prompt] if len(prompts) == 1 and (isinstance(prompt, str) or type(prompt[0]) is int) else prompt
    pairs = zip(given, prompts, strict=True)
    return [text if isinstance(text, str) else engine.tokenizer.decode(ids) for text, ids in pairs]


def _answers(engine: Engine, generation: Request, outputs: list[SampleOutput], wanted: Wanted) -> list[Answer]:
    answers = []
    for output in outputs:
        answer = _rest(generation, output, wanted)
        answer.text = wanted.prefix + (output.text or "")
        if wanted.conversation is not None:
            style = style_of(engine.tokenizer)
            answer.text, answer.calls = wanted.conversation.split(answer.text, style, wanted.thinks)
        answer.logprobs = _logprobs(engine, output) if wanted.logprobs else None
        answers.append(answer)
    return answers


def _rest(generation: Request, output: SampleOutput, wanted: Wanted) -> Answer:
    """Make an answer without text and log-probs."""
    matched = output.finish_reason.get("matched")
    answer = Answer("", output.finish_reason["type"], stop_sequence=matched if isinstance(matched, str) else None)
    if wanted.token_ids:
        answer.extra = {"token_ids": output.token_ids, "prompt_token_ids": generation.prompt.tolist()}
    return answer


def _logprobs(engine: Engine, output: SampleOutput) -> list[TokenLogprob]:
    tops = output.top_logprobs or [[]] * len(output.token_ids)
    entries = zip(output.token_ids, output.logprobs, tops, strict=True)
    return [_logprob(engine, token, logprob, top) for token, logprob, top in entries]


def _logprob(engine: Engine, token: int, logprob: float, top: list[tuple[int, float]]) -> TokenLogprob:
    others = [(token_text(engine.tokenizer, one), one, value) for one, value in top]
    return TokenLogprob(token_text(engine.tokenizer, token), token, logprob, others)


async def _stream(engine: Engine, generation: Request, wanted: Wanted, stream: Stream) -> AsyncGenerator[bytes, None]:
    """Yield events while the answers are generated."""
    prefix = wanted.prefix
    parts = [_Part(engine, wanted, stream.takes_pieces) for _ in range(generation.params.n)]
    has_begun = False
    async for event in common.progress(engine, generation):
        if not has_begun:  # an error before the first token sets the status
            has_begun = True
            events = stream.begin(len(parts))
            for index, part in enumerate(parts):
                events += stream.add(index, part.add(prefix))
                events += _call_events(stream, index, part)
            yield b"".join(map(event_bytes, events))
        if isinstance(event, list):
            events = []
            for index, (part, output) in enumerate(zip(parts, event, strict=True)):
                answer = _rest(generation, output, wanted)
                answer.text, answer.calls = part.finish((output.text or "")[part.num_added - len(prefix) :])
                events += _call_events(stream, index, part)
                if not stream.has_named_events:
                    answer.extra.pop("token_ids", None)
                events += stream.finish(index, answer)
            events += stream.close(_usage([generation], [event]))
            yield b"".join(map(event_bytes, events))
            return
        index, token, logprob, text, top = event
        logprobs = [_logprob(engine, token, logprob, top)] if wanted.logprobs else None
        extra = {"token_ids": [token]} if wanted.token_ids and not stream.has_named_events else None
        events = stream.add(index, parts[index].add(text), logprobs, extra)
        events += _call_events(stream, index, parts[index])
        yield b"".join(map(event_bytes, events))


def _call_events(stream: Stream, index: int, part: "_Part") -> list[Event]:
    return [event for piece in part.take_calls() for event in stream.add_call(index, piece)]


class _Part:
    """The text of one choice in a stream: content and pieces of tool calls."""

    def __init__(self, engine: Engine, wanted: Wanted, takes_pieces: bool):
        self.num_added = 0  # characters
        self._conversation, self._splitter = wanted.conversation, None
        if wanted.conversation is not None and wanted.conversation.reads_calls:
            style = style_of(engine.tokenizer)
            self._splitter = wanted.conversation.splitter(style, wanted.thinks, takes_pieces)

    def add(self, text: str) -> str:
        """Append text; returns what may be sent."""
        self.num_added += len(text)
        return text if self._splitter is None else self._splitter.add(text)

    def take_calls(self) -> list[CallPiece]:
        """Return the new pieces of calls."""
        return [] if self._splitter is None else self._splitter.take_calls()

    def finish(self, rest: str) -> tuple[str, list[ToolCall]]:
        """Append the last text; returns the rest of the content, and the calls."""
        rest = self.add(rest)
        if self._splitter is None:
            return rest, []
        assert self._conversation is not None
        more, calls = self._splitter.finish()
        return rest + more, self._conversation.limit(calls)
