"""Tool calls in a model's text, in the formats of Hermes and Qwen, Llama 3, Mistral, Qwen3-Coder.

Used by the embedded server, the gateway and workflows. Give it text that the model has sampled, never text of a prompt
or of a tool. No input raises: what cannot be read becomes a call with an `error`. Time is linear in the length.

Text before `</think>` is never read for calls. At most `MAX_CALLS` calls are read.
"""

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from arealite.protocol.call_formats import (
    CLOSE,
    MAX_CALLS,
    MISTRAL,
    OPEN,
    PYTHON,
    Scan,
    ToolCall,
    scan_llama,
    scan_mistral,
    scan_tags,
)

__all__ = [
    "MAX_CALLS",
    "STYLES",
    "CallSplitter",
    "ToolCall",
    "decode_answer",
    "forced_prefix",
    "parse_tool_calls",
    "style_of",
]

# Hermes: <tool_call>{json}</tool_call>, also Qwen 2.5 and 3. Llama: {json}; {json}, after <|python_tag|> or without it.
# Mistral: [TOOL_CALLS] [{json}, ...] or [TOOL_CALLS]name[ARGS]{json}. Qwen3-Coder: tags <function=..> <parameter=..>.
STYLES = {"hermes": scan_tags, "llama": scan_llama, "mistral": scan_mistral, "qwen_coder": scan_tags}
_MARKERS = (OPEN, CLOSE, PYTHON, MISTRAL, "[ARGS]", "[CALL_ID]", "<think>", "</think>")
_THINK, _END_THINK = "<think>", "</think>"
_STARTS = {"hermes": (OPEN,), "qwen_coder": (OPEN,), "llama": (PYTHON, _END_THINK), "mistral": (MISTRAL,)}
_ANY_START = (OPEN, PYTHON, MISTRAL, _END_THINK)


def parse_tool_calls(
    text: str, style: str | None = None, tools: list[dict[str, Any]] | None = None
) -> tuple[str, list[ToolCall]]:
    """Split a sampled text into content and calls.

    Without a style the format is found by its markers. `tools` are those of the request, in OpenAI's form: a call of
    another name gets an error, and they tell the types of Qwen3-Coder's parameters. Without calls the content is the
    whole text. A call whose name cannot be read stays in the content too.
    """
    start = _end_of_thinking(text)
    if style is None:
        is_mistral, is_tagged = (text.find(marker, start) >= 0 for marker in (MISTRAL, OPEN))
        style = "mistral" if is_mistral else "hermes" if is_tagged else "llama"
    scan = Scan(text, start, _schemas(tools), has_short_ids=style == "mistral")
    STYLES[style](scan)
    if not scan.calls and style == "hermes" and tools:
        scan = _without_tags(text, tools) or scan
    if not scan.calls:
        return text, []
    scan.keep(len(text))
    return "".join(scan.content).rstrip(), scan.calls


def _without_tags(text: str, tools: list[dict[str, Any]]) -> Scan | None:
    """Read a text that begins with calls of known tools; small Qwen models leave the tags out."""
    if not text.lstrip().startswith("{"):
        return None
    scan = Scan(text, 0, _schemas(tools), has_short_ids=False)
    scan_llama(scan)
    return scan if scan.calls and all(call.name and call.error is None for call in scan.calls) else None


@lru_cache(8)
def style_of(tokenizer: Any) -> str:
    """Return the style in which the tokenizer's model calls tools: by its template, then its vocabulary."""
    template = getattr(tokenizer, "chat_template", None) or ""
    template = "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)
    if "<function=" in template:
        return "qwen_coder"
    signs = (("hermes", OPEN), ("mistral", MISTRAL), ("llama", PYTHON))
    found = next((style for style, sign in signs if sign in template), None)
    added = _added_tokens(tokenizer)
    return found or next((style for style, sign in signs if sign in added), "hermes")


def forced_prefix(style: str, name: str | None = None) -> str:
    """Return the text with which an answer starts that has to call a tool: the tool `name`, or any.

    The answer is this prefix and what the model continues it with. The model has not sampled the prefix: its tokens
    have no log-probs, and belong to the prompt when the answer is trained on.
    """
    if style == "qwen_coder":
        return f"{OPEN}\n<function=" + (f"{name}>\n" if name else "")
    head = {"hermes": f"{OPEN}\n", "llama": "", "mistral": f"{MISTRAL} ["}[style]
    key = "parameters" if style == "llama" else "arguments"
    # Ends before a space, with which the next token starts in most vocabularies.
    return f'{head}{{"name":' + (f' {json.dumps(name)}, "{key}":' if name else "")


def decode_answer(tokenizer: Any, token_ids: Iterable[int]) -> str:
    """Decode sampled tokens without special tokens, but with the markers of tool calls.

    Some vocabularies have the markers as special tokens (`<|python_tag|>`, `[TOOL_CALLS]`): decoding with
    `skip_special_tokens=True` would remove them, and the call would read as plain text.
    """
    hidden = hidden_tokens(tokenizer)
    return tokenizer.decode([token for token in token_ids if token not in hidden], skip_special_tokens=False)


@lru_cache(8)
def hidden_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens that `decode_answer` leaves out."""
    added = _added_tokens(tokenizer)
    special = {i for i, is_special in added.values() if is_special} | set(getattr(tokenizer, "all_special_ids", ()))
    return frozenset(special - {added[marker][0] for marker in _MARKERS if marker in added})


class CallSplitter:
    """Splits a growing text: returns content that may be sent at once, holds back what may be a call.

    The pieces of `add` and the rest from `finish` make the content of `parse_tool_calls` for the whole text.
    """

    def __init__(self, style: str | None, tools: list[dict[str, Any]] | None = None):
        self.style, self.tools = style, tools
        self._starts = _STARTS[style] if style else _ANY_START
        self._longest = max(map(len, self._starts)) - 1
        self._pieces: list[str] = []
        self._tail = ""  # the end of the text that `add` has not returned
        self._num_sent = 0
        self._holds_all = False
        self._may_be_bare = style in (None, "llama") or (style == "hermes" and bool(tools))

    def add(self, piece: str) -> str:
        """Append a piece of text; returns the next piece of content."""
        self._pieces.append(piece)
        if self._holds_all:
            return ""
        self._tail += piece
        found = [at for start in self._starts if (at := self._tail.find(start)) >= 0]
        end = min(found, default=len(self._tail) - self._num_pending())
        # The content before a call ends without white space. Some calls start the text without a marker.
        end = len(self._tail[:end].rstrip())
        if not self._num_sent and self._may_be_bare and self._tail.lstrip().startswith("{"):
            found, end = [0], 0
        self._holds_all = bool(found)
        sent, self._tail = self._tail[:end], self._tail[end:]
        self._num_sent += end
        return sent

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest of the content and the calls."""
        content, calls = parse_tool_calls("".join(self._pieces), self.style, self.tools)
        return content[self._num_sent :], calls

    def _num_pending(self) -> int:
        """Length of the longest end of the text that is the beginning of a marker."""
        end = self._tail[-self._longest :]
        sizes = range(len(end), 0, -1)
        return next((size for size in sizes if any(start.startswith(end[-size:]) for start in self._starts)), 0)


def _end_of_thinking(text: str) -> int:
    """Position behind `</think>`: a chat template may have opened the block in the prompt."""
    end = text.find(_END_THINK)
    if end >= 0:
        return end + len(_END_THINK)
    return len(text) if text.lstrip().startswith(_THINK) else 0


def _schemas(tools: list[dict[str, Any]] | None) -> dict[str, dict[str, Any]] | None:
    """Parameters of each tool by its name."""
    if tools is None:
        return None
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _added_tokens(tokenizer: Any) -> dict[str, tuple[int, bool]]:
    """Id of each added token by its text, and whether it is special."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {token.content: (i, token.special) for i, token in added.items()}
