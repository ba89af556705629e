"""`/v1/chat/completions`: reads requests, writes results and streams.

`ChatRequest` is what `responses` and `messages` read their requests into too, so that a server generates for all three
in one way.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from arealite.protocol.answer import Answer, Event, Head, TokenLogprob, Usage
from arealite.protocol.call_stream import CallPiece, CallSplitter
from arealite.protocol.fields import FieldError, Fields, check_tools, json_format, objects, tool, tool_name, typed
from arealite.protocol.tool_calls import MAX_CALLS, ToolCall, parse_tool_calls

# Accepted, and without effect on what is generated here.
_WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "prediction",
    "reasoning_effort", "verbosity",
)  # fmt: skip

# Characters of a call's arguments in one chunk of a stream.
_ARGUMENTS_PIECE = 1024


@dataclass
class ChatRequest:
    """A conversation to continue.

    `messages` have the form that chat templates read: text parts are joined, and arguments of tool calls are objects.
    Content with images stays a list of parts. `sampling` has the names of the engine's sampling parameters.
    """

    messages: list[dict[str, Any]]
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tool_choice: str = "auto"  # auto, none, required or named
    tool_name: str | None = None  # with named
    parallel_tool_calls: bool = True
    json_schema: dict[str, Any] | None = None  # None: text
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    template_variables: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def reads_calls(self) -> bool:
        """Whether tool calls in the answer are parsed."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def has_images(self) -> bool:
        return any(isinstance(message.get("content"), list) for message in self.messages)

    def split(self, text: str, style: str | None, thinks: bool) -> tuple[str, list[ToolCall]]:
        """Split a sampled text into content and the calls that this request asks for; see `parse_tool_calls`."""
        if not self.reads_calls:
            return text, []
        content, calls = parse_tool_calls(text, style, self.tools, thinks)
        return content, self.limit(calls)

    def splitter(self, style: str | None, thinks: bool, takes_pieces: bool) -> CallSplitter | None:
        """Return what splits a growing text as `split` does; None if there is nothing to split."""
        if not self.reads_calls:
            return None
        most = MAX_CALLS if self.parallel_tool_calls else 1
        return CallSplitter(style, self.tools, thinks=thinks, max_calls=most if takes_pieces else 0)

    def limit(self, calls: list[ToolCall]) -> list[ToolCall]:
        """Return the first call only, if the client has asked for no parallel calls."""
        return calls if self.parallel_tool_calls else calls[:1]


def parse(body: dict[str, Any]) -> ChatRequest:
    """Read a body; raises `FieldError`."""
    fields = Fields(body)
    options = fields.get("stream_options", dict) or {}
    request = ChatRequest(
        messages=[read_message(message) for message in objects("messages", fields.get("messages"))],
        sampling=fields.sampling("max_tokens", "max_completion_tokens"),
        tools=check_tools([_tool(one) for one in objects("tools", fields.get("tools"))]),
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        json_schema=json_format("response_format", fields.get("response_format")),
        logprobs=fields.flag("logprobs"),
        top_logprobs=fields.top_logprobs(),
        stream=fields.flag("stream"),
        include_usage=bool(options.get("include_usage")),
        return_token_ids=fields.flag("return_token_ids"),
        template_variables=fields.get("chat_template_kwargs", dict) or {},
    )
    set_tool_choice(request, fields.get("tool_choice"))
    fields.ignore(*_WITHOUT_EFFECT)
    fields.only("modalities", ["text"])
    fields.finish()
    if request.top_logprobs and not request.logprobs:
        raise FieldError("top_logprobs", "top_logprobs needs logprobs: true")
    return check(request)


def check(request: ChatRequest) -> ChatRequest:
    """Raise for combinations that cannot work."""
    if not request.messages:
        raise FieldError("messages", "messages must be a non-empty list")
    if request.json_schema is not None and request.reads_calls:
        message = "a JSON response_format leaves no room for tool calls: drop the tools, or set tool_choice to none"
        raise FieldError("response_format", message)
    return request


def set_tool_choice(request: ChatRequest, given: Any) -> None:
    """Read a `tool_choice`: auto, none, required, or an object that names a tool or the allowed tools."""
    if given is None:
        return
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "allowed_tools":
        given = _allow_tools(request, given)
    elif kind == "function":
        request.tool_name = _name_in(given)
        _check_known([request.tool_name], request.tools)
        given = "named"
    elif given not in ("auto", "none", "required"):
        raise FieldError(
            "tool_choice",
            f"tool_choice must be auto, none, required, name a function or list allowed_tools, got {given!r:.100}",
        )
    request.tool_choice = given
    if given == "required" and not request.tools:
        raise FieldError("tool_choice", "tool_choice demands a call, but there are no tools")


def _allow_tools(request: ChatRequest, given: dict[str, Any]) -> str:
    """Keep the tools that a `tool_choice` allows, so that the model sees no others; returns its mode."""
    # Chat completions nest it, responses do not.
    inner = typed("tool_choice", given.get("allowed_tools", given), dict)
    mode, allowed = inner.get("mode"), objects("tool_choice", inner.get("tools"))
    if mode not in ("auto", "required"):
        raise FieldError("tool_choice", f"the mode of allowed_tools must be auto or required, got {mode!r:.100}")
    if not allowed:
        raise FieldError("tool_choice", "allowed_tools has no tools: list some, or set tool_choice to none")
    names = [_name_in(one) for one in allowed]
    _check_known(names, request.tools)
    request.tools = [one for one in request.tools if one["function"]["name"] in names]
    return mode


def _name_in(given: dict[str, Any]) -> str:
    """Return the name in `{"type": "function", "function": {"name": …}}`, or in the form of responses."""
    if given.get("type") != "function":
        raise FieldError("tool_choice", f"a tool must have the type function, got {given.get('type')!r:.100}")
    inner = given.get("function", given)
    return tool_name(inner.get("name") if isinstance(inner, dict) else None, "tool_choice")


def _check_known(names: list[str], tools: list[dict[str, Any]]) -> None:
    known = [one["function"]["name"] for one in tools]
    for name in names:
        if name not in known:
            shown = f"the tools are {', '.join(known):.500}" if known else "there are no tools"
            raise FieldError("tool_choice", f"tool_choice names {name!r}; {shown}")


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    function = given.get("function")
    if given.get("type") != "function":
        raise FieldError("tools", f"tools must have the type function, got {given.get('type')!r:.100}")
    if not isinstance(function, dict):
        form = '{"type": "function", "function": {"name": …, "parameters": …}}'
        raise FieldError("tools", f"a tool must have the form {form}, got {given!r:.300}")
    return tool(function.get("name"), function.get("description"), function.get("parameters"))


def read_message(given: dict[str, Any]) -> dict[str, Any]:
    """Check a message and bring it into the form that chat templates read."""
    role = given.get("role")
    if not isinstance(role, str):
        raise FieldError("messages", "every message must be an object with a role")
    # Templates know no developer, and some leave out what they do not know.
    message: dict[str, Any] = {**given, "role": "system" if role == "developer" else role}
    message["content"] = read_content(given.get("content"))
    calls = objects("tool_calls", given.get("tool_calls"))
    if calls:
        message["tool_calls"] = [_read_call(call) for call in calls]
    else:
        message.pop("tool_calls", None)
    if message["content"] is None and not calls:
        message["content"] = ""
    return message


def read_content(content: Any) -> Any:
    """Check content: a text, or parts. Parts that are all texts are joined."""
    if isinstance(content, str | None):
        return content
    if not isinstance(content, list):
        raise FieldError("messages", f"content must be a text or a list of parts, got {content!r:.60}")
    parts = [_read_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _read_part(part: Any) -> dict[str, Any]:
    kind = part.get("type", "text") if isinstance(part, dict) else part
    if kind in ("text", "refusal") and isinstance(part.get(kind), str):
        return {"type": "text", "text": part[kind]}
    if kind == "image_url":
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        return image_part(url)
    raise FieldError("messages", f"a part of content must be a text or an image_url, got {part!r:.100}")


def image_part(url: Any) -> dict[str, Any]:
    """Return an image part; `url` may be a data URL."""
    if not isinstance(url, str) or not url:
        raise FieldError("messages", f"an image must have a url, got {url!r:.100}")
    return {"type": "image_url", "image_url": {"url": url}}


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise FieldError("messages", f"a tool call of a message must have a function, got {call!r:.100}")
    return history_call(call.get("id"), function.get("name"), function.get("arguments"))


def history_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return an earlier call of the assistant as templates read it: with an object as arguments."""
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            found = None
        arguments = found if isinstance(found, dict) else arguments
    elif not isinstance(arguments, dict):
        raise FieldError("messages", f"arguments of a tool call must be JSON text, got {arguments!r:.100}")
    function = {"name": typed("name", name, str), "arguments": arguments}
    return {"id": typed("id", call_id, str), "type": "function", "function": function}


# -------------------------------------------------------------------------------------------------- writing


def result(head: Head, answers: list[Answer], usage: Usage) -> dict[str, Any]:
    """Return the body of a response."""
    choices = [
        {
            "index": index,
            "message": _message(answer),
            "logprobs": logprobs_json(answer.logprobs),
            "finish_reason": finish_reason(answer),
            **answer.extra,
        }
        for index, answer in enumerate(answers)
    ]
    return {**_envelope(head, "chat.completion"), "choices": choices, "usage": usage.to_json()}


def finish_reason(answer: Answer) -> str:
    """Return OpenAI's finish reason: tool_calls if the answer ended with them."""
    return "tool_calls" if answer.named_calls and answer.finish_reason == "stop" else answer.openai_reason


def _message(answer: Answer) -> dict[str, Any]:
    calls = [_call_json(call) for call in answer.named_calls]
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if calls else ""), "refusal": None}
    return {**message, "tool_calls": calls} if calls else message


def _call_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text}}


def _envelope(head: Head, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model, **head.extra}


def logprobs_json(logprobs: list[TokenLogprob] | None) -> dict[str, Any] | None:
    """Return the `logprobs` of a choice."""
    if logprobs is None:
        return None
    content = [
        {
            **token_json(entry.text, entry.logprob),
            "top_logprobs": [token_json(text, logprob) for text, _, logprob in entry.top],
        }
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def token_json(text: str, logprob: float) -> dict[str, Any]:
    """Return a token with its bytes; they are null for a part of a character."""
    return {"token": text, "bytes": None if "\ufffd" in text else list(text.encode()), "logprob": logprob}


class ChatStream:
    """Writes the chunks of a stream with any number of choices."""

    has_named_events = False
    takes_pieces = True

    def __init__(self, head: Head, request: ChatRequest):
        self._envelope = _envelope(head, "chat.completion.chunk")
        self._with_usage = request.include_usage
        # Characters of the arguments that were sent, by choice and call.
        self._sent: dict[tuple[int, int], int] = {}

    def begin(self, num_choices: int) -> list[Event]:
        """Start every choice."""
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(num_choices)]

    def add(
        self, index: int, text: str, logprobs: list[TokenLogprob] | None = None, extra: dict[str, Any] | None = None
    ) -> list[Event]:
        """Add text or tokens to a choice."""
        if not (text or logprobs or extra):
            return []
        return [self._chunk(index, {"content": text} if text else {}, logprobs, None, extra)]

    def add_call(self, index: int, piece: CallPiece) -> list[Event]:
        """Add a piece of a call: as OpenAI does, id and name first, then the arguments."""
        at = index, piece.call
        delta: dict[str, Any] = {"index": piece.call}
        if at not in self._sent:
            delta |= {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.text}}
        else:
            delta["function"] = {"arguments": piece.text}
        self._sent[at] = self._sent.get(at, 0) + len(piece.text)
        return [self._chunk(index, {"tool_calls": [delta]})]

    def finish(self, index: int, answer: Answer) -> list[Event]:
        """End a choice with the rest of its text and of its calls."""
        events = self.add(index, answer.text, answer.logprobs)
        for i, call in enumerate(answer.named_calls):
            if (index, i) not in self._sent:
                events += self.add_call(index, CallPiece(i, call.id, call.name, ""))
            text = call.arguments_text
            for at in range(self._sent[index, i], len(text), _ARGUMENTS_PIECE):
                events += self.add_call(index, CallPiece(i, call.id, call.name, text[at : at + _ARGUMENTS_PIECE]))
        events.append(self._chunk(index, {}, None, finish_reason(answer), answer.extra))
        return events

    def close(self, usage: Usage) -> list[Event]:
        """End the stream."""
        return [("", {**self._envelope, "choices": [], "usage": usage.to_json()})] if self._with_usage else []

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: list[TokenLogprob] | None = None,
        reason: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": logprobs_json(logprobs), "finish_reason": reason}
        usage = {"usage": None} if self._with_usage else {}
        return "", {**self._envelope, "choices": [{**choice, **(extra or {})}], **usage}
