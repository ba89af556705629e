"""`LiveStream`: sends the answers of one request while they are generated.

Text and arguments of tool calls go out as soon as they cannot change any more: incomplete characters, beginnings of
stop strings and what may become a tool call are held back. The end of the stream brings the rest, from the complete
answers. Engines that tell nothing before the end are streamed all at once.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from arealite.agents.answers import token_logprobs
from arealite.api.errors import ServerError
from arealite.api.io_struct import count_possible_stop
from arealite.protocol.answer import Answer, Event, Stream, Usage, event_bytes
from arealite.protocol.call_stream import CallPiece, CallSplitter
from arealite.protocol.chat import ChatRequest
from arealite.protocol.completions import CompletionRequest
from arealite.protocol.detokenizer import IncrementalText, token_before
from arealite.protocol.tool_calls import hidden_tokens, opens_thinking, style_of

# A sample, the position of the first token in its answer, tokens, log-probs.
_News = tuple[int, int, list[int], list[float]]


@dataclass
class _Choice:
    """What is known of one answer, and what was sent of it."""

    text: IncrementalText
    splitter: CallSplitter | None
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    num_read: int = 0
    sent: str = ""

    def add(self, piece: str) -> str:
        """Append text; returns the content that may be sent."""
        shown = piece if self.splitter is None else self.splitter.add(piece)
        self.sent += shown
        return shown

    def take_calls(self) -> list[CallPiece]:
        """Return the pieces of calls that may be sent."""
        return [] if self.splitter is None else self.splitter.take_calls()

    def agrees_with(self, answer: Answer) -> bool:
        """Return whether what was sent is the beginning of the complete answer."""
        has_calls = self.splitter is None or self.splitter.agrees_with(answer.calls)
        return has_calls and answer.text.startswith(self.sent)


class LiveStream:
    """Answers one request with server-sent events."""

    def __init__(
        self,
        http: web.Request,
        stream: Stream,
        tokenizer: Any,
        wanted: ChatRequest | CompletionRequest,
        num_choices: int,
        prefix: str = "",
        prompt: Sequence[int] = (),
    ):
        self.http, self.stream, self.tokenizer, self.wanted = http, stream, tokenizer, wanted
        self.stop = wanted.sampling.get("stop") or []
        # An interrupted answer loses its last tokens if they may begin a stop string.
        self._num_held = count_possible_stop(self.stop)
        self._with_logprobs = wanted.logprobs is not None and wanted.logprobs is not False
        self._thinks = opens_thinking(tokenizer, prompt)
        is_chat = isinstance(wanted, ChatRequest)
        self._token_before = None if is_chat else token_before(tokenizer, prompt)
        self._choices = [self._new_choice() for _ in range(num_choices)]
        # Text that was not sampled; it is sent with the first tokens.
        self._begin = [choice.add(prefix) for choice in self._choices]
        self._news: asyncio.Queue[_News | None] = asyncio.Queue()
        self._response: web.StreamResponse | None = None
        # Whether the last event was written.
        self._has_ended = False

    @property
    def has_begun(self) -> bool:
        """Whether the status was sent, so that an error can only be an event."""
        return self._response is not None

    @property
    def response(self) -> web.StreamResponse:
        """The response that has begun."""
        assert self._response is not None
        return self._response

    def tell(self, sample: int, at: int, tokens: list[int], logprobs: list[float]) -> None:
        """Take tokens from the engine."""
        self._news.put_nowait((sample, at, tokens, logprobs))

    async def follow(self, generation: asyncio.Task[Any]) -> Any:
        """Send what arrives until the generation ends; returns its result. It ends with this call."""
        generation.add_done_callback(self._end_news)
        try:
            while (news := await self._news.get()) is not None:
                events = self._read(*news)
                if events:
                    await self._send(events)
            return generation.result()
        finally:
            generation.cancel()

    def _end_news(self, generation: asyncio.Task[Any]) -> None:
        self._news.put_nowait(None)
        if not generation.cancelled():
            # Nobody may ask for the error later, if the client has gone: asyncio would log that.
            generation.exception()

    def check(self, answers: list[Answer]) -> None:
        """Raise `ServerError` if an answer is not what was sent: its server died, and another began anew."""
        if not all(choice.agrees_with(a) for a, choice in zip(answers, self._choices, strict=True)):
            raise ServerError("a part of the answer was generated anew after it had been sent: ask again")

    async def finish(self, answers: list[Answer], usage: Usage) -> web.StreamResponse:
        """Send the rest of the complete answers."""
        events: list[Event] = []
        for index, (choice, answer) in enumerate(zip(self._choices, answers, strict=True)):
            rest = replace(answer, text=answer.text[len(choice.sent) :])
            if choice.splitter is not None:
                rest.calls = choice.splitter.with_ids(answer.calls)
            if answer.logprobs is not None:
                rest.logprobs = answer.logprobs[choice.num_read :]
            events += self._call_events(index) + self.stream.finish(index, rest)
        return await self._end(events + self.stream.close(usage))

    async def fail(
        self, error: Exception, describe: Callable[[Exception], tuple[int, dict[str, Any]]]
    ) -> web.StreamResponse:
        """End a stream that has begun with an error, if it has not ended; `describe` returns status and body."""
        # Nobody is told that the client has gone: aiohttp would log that error with a traceback. If the error has
        # cancelled a write to a slow client, aiohttp cancels the next ones too, after it has taken their data.
        with contextlib.suppress(ConnectionResetError, asyncio.CancelledError):
            if not (isinstance(error, ConnectionResetError) or self._has_ended):
                await self._end([("error" if self.stream.has_named_events else "", describe(error)[1])])
        return self.response

    def _new_choice(self) -> _Choice:
        text = IncrementalText(self.tokenizer, self.stop, False, hidden_tokens(self.tokenizer), self._token_before)
        splitter = None
        if isinstance(self.wanted, ChatRequest):
            splitter = self.wanted.splitter(style_of(self.tokenizer), self._thinks, self.stream.takes_pieces)
        return _Choice(text, splitter)

    def _read(self, sample: int, at: int, tokens: list[int], logprobs: list[float]) -> list[Event]:
        """Return the events that the tokens allow."""
        choice = self._choices[sample]
        choice.tokens[at:], choice.logprobs[at:] = tokens, logprobs
        start, end = choice.num_read, max(choice.num_read, len(choice.tokens) - self._num_held)
        text = "".join(choice.text.add(token) for token in choice.tokens[start:end] if choice.text.matched is None)
        choice.num_read = end
        known = None
        if self._with_logprobs:
            known = token_logprobs(self.tokenizer, choice.tokens[start:end], choice.logprobs[start:end])
        return self.stream.add(sample, choice.add(text), known) + self._call_events(sample)

    def _call_events(self, sample: int) -> list[Event]:
        pieces = self._choices[sample].take_calls()
        return [event for piece in pieces for event in self.stream.add_call(sample, piece)]

    async def _send(self, events: list[Event], end: bytes = b"") -> None:
        if self._response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            response = web.StreamResponse(headers=headers)
            await response.prepare(self.http)
            self._response = response
            begin = self.stream.begin(len(self._choices))
            for index, text in enumerate(self._begin):
                begin += self.stream.add(index, text)
            events = begin + events
        await self._response.write(b"".join([*map(event_bytes, events), end]))

    async def _end(self, events: list[Event]) -> web.StreamResponse:
        """Write the last events; aiohttp ends the body."""
        self._has_ended = True
        await self._send(events, b"" if self.stream.has_named_events else b"data: [DONE]\n\n")
        return self.response
