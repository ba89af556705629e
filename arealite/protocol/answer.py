"""What the protocols share: an answer of the model, usage, the head of a response, events, errors.

The server and the gateway make `Answer`s; `chat`, `completions`, `responses` and `messages` write them in the form of
their API. All functions are pure.
"""

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import orjson

from arealite.protocol.call_stream import CallPiece
from arealite.protocol.detokenizer import decode, inner_token
from arealite.protocol.tool_calls import ToolCall

# The name of a server-sent event (empty: none) and its data.
Event = tuple[str, dict[str, Any]]
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass
class TokenLogprob:
    """A sampled token with its log-prob, and the likeliest tokens as (text, id, log-prob)."""

    text: str
    id: int
    logprob: float
    top: list[tuple[str, int, float]] = field(default_factory=list[tuple[str, int, float]])


@lru_cache(1 << 17)
def token_text(tokenizer: Any | None, token: int) -> str:
    """Return the text of a token in the middle of a text, with its leading blank."""
    if tokenizer is None:
        return f"token_id:{token}"
    return decode(tokenizer, [token], False, None, inner_token(tokenizer))


@dataclass
class Answer:
    """One continuation, as far as a protocol shows it: in a stream, the rest that was not sent before.

    `finish_reason` is stop, length or abort. `extra` holds fields of the choice beyond the protocol (`token_ids`).
    """

    text: str
    finish_reason: str
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    stop_sequence: str | None = None
    logprobs: list[TokenLogprob] | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def openai_reason(self) -> str:
        """The finish reason in OpenAI's words, which have none for an answer that was aborted."""
        return "length" if self.finish_reason == "abort" else self.finish_reason

    @property
    def named_calls(self) -> list[ToolCall]:
        """The calls with a name; the others are in the text."""
        return [call for call in self.calls if call.name]


@dataclass
class Usage:
    """Numbers of tokens. `cached_tokens` of the prompt were in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it in the form of chat and text completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class Head:
    """What every response starts with. `extra` holds fields beyond the protocol (`weight_version`)."""

    id: str
    model: str
    created: int
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


class Stream(Protocol):
    """Writes the events of answers while they are generated.

    Call `begin`, then `add` and at last `finish` for each choice, then `close`.
    """

    # Events have names, there is no [DONE] at the end, and token ids come with `finish` only.
    has_named_events: bool
    # Calls may be sent before they are complete, by `add_call`.
    takes_pieces: bool

    def begin(self, num_choices: int) -> list[Event]:
        """Start the stream."""
        ...

    def add(
        self, index: int, text: str, logprobs: list[TokenLogprob] | None = None, extra: dict[str, Any] | None = None
    ) -> list[Event]:
        """Add text or tokens to a choice."""
        ...

    def add_call(self, index: int, piece: CallPiece) -> list[Event]:
        """Add a piece of a call to a choice."""
        ...

    def finish(self, index: int, answer: Answer) -> list[Event]:
        """End a choice with the rest of its text and all of its calls."""
        ...

    def close(self, usage: Usage) -> list[Event]:
        """End the stream."""
        ...


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error, in a form that clients of OpenAI and of Anthropic understand."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"message": message, "type": kind, "param": param, "code": status}
    return {"type": "error", "error": error}


def to_json(body: Any) -> bytes:
    """Encode a body. Numbers of more than 64 bits, which models may write, need Python's encoder."""
    try:
        return orjson.dumps(body)
    except TypeError:
        return json.dumps(body, ensure_ascii=True).encode()


def event_bytes(event: Event) -> bytes:
    """Encode a server-sent event."""
    name, data = event
    head = b"event: %b\n" % name.encode() if name else b""
    return b"%bdata: %b\n\n" % (head, to_json(data))
