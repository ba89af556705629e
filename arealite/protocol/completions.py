"""`/v1/completions`: reads requests, writes results and streams."""

from dataclasses import dataclass
from typing import Any

from arealite.protocol.answer import Answer, Event, Head, TokenLogprob, Usage
from arealite.protocol.call_stream import CallPiece
from arealite.protocol.fields import MAX_TOP_LOGPROBS, FieldError, Fields, json_format

_WITHOUT_EFFECT = ("model", "user", "metadata")
_DEFAULT_MAX_TOKENS = 16


@dataclass
class CompletionRequest:
    """Prompts to continue: a text, a list of token ids, or a list of either. `prompt` is not checked."""

    prompt: Any
    sampling: dict[str, Any]
    logprobs: int | None  # number of alternatives; None: no log-probs
    echo: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    json_schema: dict[str, Any] | None = None


def parse(body: dict[str, Any]) -> CompletionRequest:
    """Read a body; raises `FieldError`."""
    fields = Fields(body)
    options = fields.get("stream_options", dict) or {}
    logprobs = fields.get("logprobs")
    # OpenAI counts alternatives here; true and false are accepted as in chat completions.
    logprobs = (0 if logprobs else None) if isinstance(logprobs, bool) else fields.get("logprobs", int)
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise FieldError("logprobs", f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {logprobs}")
    request = CompletionRequest(
        prompt=fields.get("prompt"),
        sampling=fields.sampling("max_tokens", usual_max=_DEFAULT_MAX_TOKENS),
        logprobs=logprobs,
        echo=fields.flag("echo"),
        stream=fields.flag("stream"),
        include_usage=bool(options.get("include_usage")),
        return_token_ids=fields.flag("return_token_ids"),
        json_schema=json_format("response_format", fields.get("response_format")),
    )
    fields.ignore(*_WITHOUT_EFFECT)
    fields.only("best_of", 1)
    fields.only("suffix", "")
    fields.finish()
    if request.echo and request.logprobs is not None:
        raise FieldError("echo", "echo with logprobs is not supported: log-probs of the prompt are not computed")
    return request


def result(head: Head, answers: list[Answer], usage: Usage) -> dict[str, Any]:
    """Return the body of a response."""
    choices = [_choice(index, answer, answer.openai_reason) for index, answer in enumerate(answers)]
    return {**_envelope(head), "choices": choices, "usage": usage.to_json()}


def _envelope(head: Head) -> dict[str, Any]:
    return {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model, **head.extra}


def _choice(index: int, answer: Answer, reason: str | None, offset: int = 0) -> dict[str, Any]:
    logprobs = _logprobs(answer.logprobs, offset)
    return {"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": reason, **answer.extra}


def _logprobs(logprobs: list[TokenLogprob] | None, offset: int) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    offsets = [offset]
    for entry in logprobs:
        offsets.append(offsets[-1] + len(entry.text))
    return {
        "tokens": [entry.text for entry in logprobs],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [_by_text(entry) for entry in logprobs],
        "text_offset": offsets[:-1],
    }


def _by_text(entry: TokenLogprob) -> dict[str, float]:
    """Return alternatives by their text: of several tokens with the same text the likeliest."""
    found: dict[str, float] = {}
    for text, _, logprob in entry.top:
        found.setdefault(text, logprob)
    return found


class CompletionStream:
    """Writes the chunks of a stream with any number of choices."""

    has_named_events = False
    takes_pieces = False

    def __init__(self, head: Head, request: CompletionRequest):
        self._envelope = _envelope(head)
        self._with_usage = request.include_usage
        self._lengths: dict[int, int] = {}  # characters sent of each choice

    def begin(self, num_choices: int) -> list[Event]:
        """Start every choice: nothing is sent."""
        return []

    def add(
        self, index: int, text: str, logprobs: list[TokenLogprob] | None = None, extra: dict[str, Any] | None = None
    ) -> list[Event]:
        """Add text or tokens to a choice."""
        if not (text or logprobs or extra):
            return []
        return [self._chunk(index, Answer(text, "", logprobs=logprobs, extra=extra or {}), None)]

    def add_call(self, index: int, piece: CallPiece) -> list[Event]:
        """Not called: `takes_pieces` is false."""
        raise NotImplementedError

    def finish(self, index: int, answer: Answer) -> list[Event]:
        """End a choice with the rest of its answer."""
        return [self._chunk(index, answer, answer.openai_reason)]

    def close(self, usage: Usage) -> list[Event]:
        """End the stream."""
        return [("", {**self._envelope, "choices": [], "usage": usage.to_json()})] if self._with_usage else []

    def _chunk(self, index: int, answer: Answer, reason: str | None) -> Event:
        offset = self._lengths.get(index, 0)
        self._lengths[index] = offset + sum(len(entry.text) for entry in answer.logprobs or ())
        usage = {"usage": None} if self._with_usage else {}
        return "", {**self._envelope, "choices": [_choice(index, answer, reason, offset)], **usage}
