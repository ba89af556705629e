"""`/v1/responses`, the basics: reads requests, writes results and streams.

Nothing is stored: send the whole conversation as `input`. Built-in tools and reasoning items do not exist here.
"""

from typing import Any

from arealite.protocol.answer import Answer, Event, Head, TokenLogprob, Usage
from arealite.protocol.call_stream import CallPiece
from arealite.protocol.chat import (
    ChatRequest,
    check,
    history_call,
    image_part,
    logprobs_json,
    read_content,
    set_tool_choice,
)
from arealite.protocol.fields import FieldError, Fields, check_tools, json_format, objects, tool, typed
from arealite.protocol.tool_calls import ToolCall

# Accepted, and without effect on what is generated here.
_WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "reasoning",
    "stream_options", "max_tool_calls",
)  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"
_ECHOED = ("instructions", "metadata", "temperature", "top_p", "max_output_tokens", "tools", "tool_choice", "text")


def parse(body: dict[str, Any]) -> ChatRequest:
    """Read a body; raises `FieldError`."""
    fields = Fields(body)
    messages = _messages(fields.get("instructions", str), fields.get("input"))
    text = fields.get("text", dict) or {}
    include = fields.get("include", list) or []
    request = ChatRequest(
        messages=messages,
        sampling=fields.sampling("max_output_tokens"),
        tools=check_tools([_tool(one) for one in objects("tools", fields.get("tools"))]),
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        json_schema=json_format("text", text.get("format")),
        logprobs=_LOGPROBS in include,
        top_logprobs=fields.top_logprobs(),
        stream=fields.flag("stream"),
        include_usage=True,
        return_token_ids=fields.flag("return_token_ids"),
        template_variables=fields.get("chat_template_kwargs", dict) or {},
    )
    set_tool_choice(request, fields.get("tool_choice"))
    if request.sampling.pop("n", 1) != 1:
        raise FieldError("n", "a response has one answer: leave n out")
    fields.ignore(*_WITHOUT_EFFECT)
    fields.only("truncation", "disabled")
    fields.only("background", False)
    fields.finish()
    return check(request)


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "function":
        raise FieldError("tools", f"tools must have the type function, got {given.get('type')!r:.100}")
    return tool(given.get("name"), given.get("description"), given.get("parameters"))


def _messages(instructions: str | None, given: Any) -> list[dict[str, Any]]:
    """Turn `instructions` and `input` into messages."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in objects("input", given):
        _add_item(messages, item)
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise FieldError("input", f"a message must have a role, got {role!r:.100}")
        content = item.get("content")
        content = [_part(part) for part in content] if isinstance(content, list) else content
        role = "system" if role == "developer" else role
        text = read_content(content) or ""
        last = messages[-1] if messages else {}
        if role == last.get("role") == "assistant" and last.get("tool_calls") and not last["content"]:
            last["content"] = text  # a stream writes the text of an answer that begins with calls behind them
        else:
            messages.append({"role": role, "content": text})
    elif kind == "function_call":
        call = history_call(item.get("call_id"), item.get("name"), item.get("arguments"))
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        output = [_part(part) for part in output] if isinstance(output, list) else output
        call_id = typed("call_id", item.get("call_id"), str)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": read_content(output) or ""})
    elif kind != "reasoning":  # which another model has written
        raise FieldError("input", f"items of type {kind!r:.100} are not supported")


def _part(part: Any) -> Any:
    """Turn a part of an item into one of chat completions, whose reader checks it."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    return image_part(part.get("image_url")) if kind == "input_image" else part


# -------------------------------------------------------------------------------------------------- writing


def result(head: Head, body: dict[str, Any], answer: Answer, usage: Usage) -> dict[str, Any]:
    """Return the body of a response. It repeats some fields of the request's `body`."""
    of_text, of_calls = _statuses(answer)
    output = [_text_item(head, answer.text, answer.logprobs, of_text)] if answer.text or not answer.named_calls else []
    output += [_call_item(call, status) for call, status in zip(answer.named_calls, of_calls, strict=True)]
    return _response(head, body, output, answer, usage)


def _statuses(answer: Answer) -> tuple[str, list[str]]:
    """Return the statuses of the text and of each call: the item that was cut off is incomplete."""
    calls = answer.named_calls
    found = ["completed"] * (1 + len(calls))
    if answer.finish_reason != "stop":
        found[-1 if calls and calls[-1].raw else 0] = "incomplete"
    return found[0], found[1:]


def _response(
    head: Head, body: dict[str, Any], output: list[dict[str, Any]], answer: Answer | None, usage: Usage | None
) -> dict[str, Any]:
    """Return a response; without an answer, one in progress."""
    is_cut = answer is not None and answer.finish_reason != "stop"
    status = "in_progress" if answer is None else "incomplete" if is_cut else "completed"
    defaults = {"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}, "metadata": {}}
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "model": head.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "usage": None if usage is None else _usage(usage),
        **{name: defaults.get(name) if body.get(name) is None else body[name] for name in _ECHOED},
        **head.extra,
        **(answer.extra if answer else {}),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        # OpenAI's client has no default for either of the two.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text_item(head: Head, text: str, logprobs: list[TokenLogprob] | None, status: str = "completed") -> dict[str, Any]:
    content = [] if status == "in_progress" else [_text_part(text, logprobs)]
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str, logprobs: list[TokenLogprob] | None = None) -> dict[str, Any]:
    entries = logprobs_json(logprobs)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries["content"] if entries else []}


def _call_item(call: ToolCall, status: str = "completed") -> dict[str, Any]:
    arguments = "" if status == "in_progress" else call.arguments_text
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
        "status": status,
    }


class ResponseStream:
    """Writes the events of a stream."""

    has_named_events = True
    takes_pieces = True

    def __init__(self, head: Head, body: dict[str, Any]):
        self._head, self._body = head, body
        self._count = 0
        # Items in the order in which they were begun; None until they end.
        self._output: list[dict[str, Any] | None] = []
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._message_at: int | None = None
        # Of each call, the position of its item and the characters of the arguments that were sent.
        self._calls: list[list[int]] = []
        self._answer: Answer | None = None

    def begin(self, num_choices: int) -> list[Event]:
        """Announce the response."""
        response = _response(self._head, self._body, [], None, None)
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def add(
        self, index: int, text: str, logprobs: list[TokenLogprob] | None = None, extra: dict[str, Any] | None = None
    ) -> list[Event]:
        """Add text to the message."""
        self._pieces.append(text)
        self._logprobs += logprobs or []
        if not (text or logprobs):
            return []
        entries, opened = logprobs_json(logprobs), self._open_message()
        delta = self._in_part("response.output_text.delta", delta=text, logprobs=entries["content"] if entries else [])
        return [*opened, delta]

    def add_call(self, index: int, piece: CallPiece) -> list[Event]:
        """Add a piece of a call."""
        events: list[Event] = []
        if piece.call == len(self._calls):
            self._calls.append([len(self._output), 0])
            item = _call_item(ToolCall(piece.id, piece.name, {}), "in_progress")
            events.append(self._begin_item(item))
        call = self._calls[piece.call]
        call[1] += len(piece.text)
        if piece.text:
            where = {"item_id": f"fc_{piece.id}", "output_index": call[0]}
            events.append(self._event("response.function_call_arguments.delta", **where, delta=piece.text))
        return events

    def finish(self, index: int, answer: Answer) -> list[Event]:
        """End the message and the calls."""
        events = self.add(index, answer.text, answer.logprobs)
        self._answer, (of_text, of_calls) = answer, _statuses(answer)
        if self._message_at is None and not answer.named_calls:
            events += self._open_message()
        if self._message_at is not None:
            whole = "".join(self._pieces)
            part = _text_part(whole, self._logprobs)
            events += [
                self._in_part("response.output_text.done", text=whole, logprobs=part["logprobs"]),
                self._in_part("response.content_part.done", part=part),
                self._end_item(self._message_at, _text_item(self._head, whole, self._logprobs, of_text)),
            ]
        for i, call in enumerate(answer.named_calls):
            text, num_sent = call.arguments_text, self._calls[i][1] if i < len(self._calls) else 0
            if i == len(self._calls) or num_sent < len(text):
                events += self.add_call(index, CallPiece(i, call.id, call.name, text[num_sent:]))
            at, item = self._calls[i][0], _call_item(call, of_calls[i])
            where = {"item_id": item["id"], "output_index": at}
            events.append(self._event("response.function_call_arguments.done", **where, arguments=text, name=call.name))
            events.append(self._end_item(at, item))
        return events

    def close(self, usage: Usage) -> list[Event]:
        """End the stream with the whole response."""
        output = [item for item in self._output if item is not None]
        response = _response(self._head, self._body, output, self._answer, usage)
        return [self._event(f"response.{response['status']}", response=response)]

    def _open_message(self) -> list[Event]:
        if self._message_at is not None:
            return []
        self._message_at = len(self._output)
        added = self._begin_item(_text_item(self._head, "", None, "in_progress"))
        return [added, self._in_part("response.content_part.added", part=_text_part(""))]

    def _in_part(self, kind: str, **fields: Any) -> Event:
        at = self._message_at
        return self._event(kind, item_id=f"msg_{self._head.id}", output_index=at, content_index=0, **fields)

    def _begin_item(self, item: dict[str, Any]) -> Event:
        self._output.append(None)
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _end_item(self, at: int, item: dict[str, Any]) -> Event:
        self._output[at] = item
        return self._event("response.output_item.done", output_index=at, item=item)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._count += 1
        return kind, {"type": kind, "sequence_number": self._count - 1, **fields}
