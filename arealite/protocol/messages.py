"""Anthropic's `/v1/messages`: reads requests, writes results and streams."""

from typing import Any

from arealite.protocol.answer import Answer, Event, Head, TokenLogprob, Usage
from arealite.protocol.call_stream import CallPiece
from arealite.protocol.chat import ChatRequest, check, history_call, image_part, read_content, set_tool_choice
from arealite.protocol.fields import FieldError, Fields, check_tools, objects, tool, typed
from arealite.protocol.tool_calls import ToolCall

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "max_tokens"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Accepted, and without effect on what is generated here.
_WITHOUT_EFFECT = ("model", "metadata", "service_tier", "inference_geo")


def parse(body: dict[str, Any]) -> ChatRequest:
    """Read a body; raises `FieldError`."""
    fields = Fields(body)
    messages: list[dict[str, Any]] = []
    system = fields.get("system")
    if system is not None:
        messages.append({"role": "system", "content": _text(system, "system")})
    for message in objects("messages", fields.get("messages")):
        _add_message(messages, message)
    sampling = fields.sampling("max_tokens", stop="stop_sequences")
    if "max_new_tokens" not in sampling:
        raise FieldError("max_tokens", "max_tokens is required")
    choice = fields.get("tool_choice", dict) or {}
    request = ChatRequest(
        messages=messages,
        sampling=sampling,
        tools=check_tools([_tool(one) for one in objects("tools", fields.get("tools"))]),
        parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
        stream=fields.flag("stream"),
        include_usage=True,
        return_token_ids=fields.flag("return_token_ids"),
        template_variables=fields.get("chat_template_kwargs", dict) or {},
    )
    _set_choice(request, choice)
    if sampling.pop("n", 1) != 1:
        raise FieldError("n", "a message has one answer: leave n out")
    fields.ignore(*_WITHOUT_EFFECT)
    fields.only("thinking", {"type": "disabled"})
    fields.finish()
    if messages and messages[-1]["role"] == "assistant":
        raise FieldError("messages", "the last message is the assistant's: continuing it is not supported")
    return check(request)


def _set_choice(request: ChatRequest, choice: dict[str, Any]) -> None:
    kind = choice.get("type")
    if kind == "tool":
        set_tool_choice(request, {"type": "function", "name": choice.get("name")})
    elif kind is not None:
        if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
            raise FieldError("tool_choice", f"tool_choice must be auto, any, tool or none, got {kind!r:.100}")
        set_tool_choice(request, _TOOL_CHOICES[kind])


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type", "custom") not in ("custom", None):
        raise FieldError("tools", f"tools must have the type custom, got {given['type']!r:.100}")
    return tool(given.get("name"), given.get("description"), given.get("input_schema"))


def _text(given: Any, where: str) -> str:
    """Join a text that may be given as blocks."""
    if isinstance(given, str):
        return given
    texts = [block.get("text") for block in objects(where, given)]
    if not all(isinstance(text, str) for text in texts):
        raise FieldError(where, f"{where} must be a text or a list of text blocks")
    return "".join(map(str, texts))


def _add_message(messages: list[dict[str, Any]], given: dict[str, Any]) -> None:
    """Add a message; results of tools become messages of their own, before the rest."""
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant"):
        raise FieldError("messages", f"every message must have the role user or assistant, got {role!r:.100}")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in objects("messages", content):
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            call_id = typed("tool_use_id", block.get("tool_use_id"), str)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _result_content(block)})
        elif kind == "tool_use" and role == "assistant":
            calls.append(history_call(block.get("id"), block.get("name"), block.get("input")))
        elif kind not in ("thinking", "redacted_thinking"):  # which another model has written
            parts.append(_part(block))
    if parts or calls or role == "assistant":
        message = {"role": role, "content": read_content(parts)}
        messages.append({**message, "tool_calls": calls} if calls else message)


def _result_content(block: dict[str, Any]) -> Any:
    content = block.get("content")
    if isinstance(content, str | None):
        return content or ""
    return read_content([_part(part) for part in objects("messages", content)])


def _part(block: dict[str, Any]) -> dict[str, Any]:
    """Turn a block into a part of chat completions, whose reader checks it."""
    if block.get("type") != "image":
        return block
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") not in ("base64", "url"):
        raise FieldError("messages", f"an image must have a source of type base64 or url, got {source!r:.100}")
    if source["type"] == "url":
        return image_part(source.get("url"))
    kind, data = (typed(name, source.get(name), str) for name in ("media_type", "data"))
    return image_part(f"data:{kind};base64,{data}")


# -------------------------------------------------------------------------------------------------- writing


def result(head: Head, answer: Answer, usage: Usage) -> dict[str, Any]:
    """Return the body of a response."""
    text = _whole_text(answer)
    content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    content += [{**_tool_use(call), "input": call.arguments} for call in _good_calls(answer)]
    message = {**_message(head), "content": content, **_stop(answer), "usage": _usage(usage)}
    return {**message, **head.extra, **answer.extra}


def _good_calls(answer: Answer) -> list[ToolCall]:
    """The calls whose arguments are an object: Anthropic's form cannot express others."""
    return [call for call in answer.named_calls if not call.raw]


def _whole_text(answer: Answer) -> str:
    """The text, and the calls that are not in `_good_calls` as the model has written them."""
    return "\n".join([answer.text] * bool(answer.text) + [f"{c.name} {c.raw}" for c in answer.named_calls if c.raw])


def _message(head: Head) -> dict[str, Any]:
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": head.model}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _stop(answer: Answer) -> dict[str, Any]:
    reason = _STOP_REASONS[answer.finish_reason]
    if reason == "end_turn":
        reason = "tool_use" if _good_calls(answer) else "stop_sequence" if answer.stop_sequence else reason
    return {"stop_reason": reason, "stop_sequence": answer.stop_sequence}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


class MessageStream:
    """Writes the events of a stream. The numbers of tokens of the prompt come with its last events."""

    has_named_events = True
    takes_pieces = False  # a call that turns out to be broken becomes text

    def __init__(self, head: Head, prompt_tokens: int):
        self._head, self._prompt_tokens = head, prompt_tokens
        self._num_blocks = 0
        self._in_text = False
        self._answer: Answer | None = None

    def begin(self, num_choices: int) -> list[Event]:
        """Announce the message."""
        message = {**_message(self._head), "content": [], "stop_reason": None, "stop_sequence": None}
        return [_event("message_start", message={**message, "usage": _usage(Usage(self._prompt_tokens, 0))})]

    def add(
        self, index: int, text: str, logprobs: list[TokenLogprob] | None = None, extra: dict[str, Any] | None = None
    ) -> list[Event]:
        """Add text to the text block."""
        if not text:
            return []
        events = [] if self._in_text else [self._start({"type": "text", "text": ""})]
        self._in_text = True
        return [*events, self._delta({"type": "text_delta", "text": text})]

    def add_call(self, index: int, piece: CallPiece) -> list[Event]:
        """Not called: `takes_pieces` is false."""
        raise NotImplementedError

    def finish(self, index: int, answer: Answer) -> list[Event]:
        """End the text and write the calls."""
        self._answer = answer
        text = _whole_text(answer)
        # The line break that `_whole_text` puts between the text, which was sent, and a broken call.
        is_call_first = self._in_text and bool(text) and not answer.text
        events = self.add(index, f"\n{text}" if is_call_first else text)
        if self._in_text:
            events.append(self._stop_block())
        for call in _good_calls(answer):
            events.append(self._start({**_tool_use(call), "input": {}}))
            events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments_text}))
            events.append(self._stop_block())
        return events

    def close(self, usage: Usage) -> list[Event]:
        """End the stream."""
        assert self._answer is not None
        delta = {**_stop(self._answer), **self._answer.extra}
        return [_event("message_delta", delta=delta, usage=_usage(usage)), _event("message_stop")]

    def _start(self, block: dict[str, Any]) -> Event:
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _stop_block(self) -> Event:
        return _event("content_block_stop", index=self._num_blocks - 1)


def _event(kind: str, **fields: Any) -> Event:
    return kind, {"type": kind, **fields}
