"""Tool calls in a model's text, in the formats of Hermes and Qwen, Llama 3, Mistral, Qwen3-Coder.

Used by the embedded server, the gateway and workflows. Give it text that the model has sampled, never text of a prompt
or of a tool. No input raises: what cannot be read becomes a call with an `error`. Time is linear in the length.

Text before `</think>` is never read for calls. At most `MAX_CALLS` calls are read.
"""

import json
from collections.abc import Iterable, Sequence
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
from arealite.protocol.detokenizer import decode

__all__ = [
    "END_THINK",
    "MAX_CALLS",
    "STYLES",
    "THINK",
    "ToolCall",
    "decode_answer",
    "forced_prefix",
    "opens_thinking",
    "parse_tool_calls",
    "style_of",
]

# Hermes: <tool_call>{json}</tool_call>, also Qwen 2.5 and 3. Llama: {json}; {json}, after <|python_tag|> or without it.
# Mistral: [TOOL_CALLS] [{json}, ...] or [TOOL_CALLS]name[ARGS]{json}. Qwen3-Coder: tags <function=..> <parameter=..>.
STYLES = {"hermes": scan_tags, "llama": scan_llama, "mistral": scan_mistral, "qwen_coder": scan_tags}
_MARKERS = (OPEN, CLOSE, PYTHON, MISTRAL, "[ARGS]", "[CALL_ID]", "<think>", "</think>")
THINK, END_THINK = "<think>", "</think>"
_NUM_LAST = 8  # tokens of a prompt that hold a tag and white space


def parse_tool_calls(
    text: str, style: str | None = None, tools: list[dict[str, Any]] | None = None, thinks: bool = True
) -> tuple[str, list[ToolCall]]:
    """Split a sampled text into content and calls.

    Without a style the format is found by its markers. `tools` are those of the request, in OpenAI's form: a call of
    another name gets an error, and they tell the types of Qwen3-Coder's parameters. Without calls the content is the
    whole text. A call whose name cannot be read stays in the content too. `thinks`: the prompt may have opened a block
    of thinking (`opens_thinking`), so that the text before `</think>` is one even if it does not begin with `<think>`.
    """
    start = _end_of_thinking(text, thinks)
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


def decode_answer(tokenizer: Any, token_ids: Iterable[int], before: int | None = None) -> str:
    """Decode sampled tokens without special tokens, but with the markers of tool calls.

    Some vocabularies have the markers as special tokens (`<|python_tag|>`, `[TOOL_CALLS]`): decoding with
    `skip_special_tokens=True` would remove them, and the call would read as plain text.
    `before` is the token of `detokenizer.token_before`.
    """
    return decode(tokenizer, list(token_ids), False, hidden_tokens(tokenizer), before)


@lru_cache(8)
def hidden_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens that `decode_answer` leaves out."""
    added = _added_tokens(tokenizer)
    special = {i for i, is_special in added.values() if is_special} | set(getattr(tokenizer, "all_special_ids", ()))
    return frozenset(special - {added[marker][0] for marker in _MARKERS if marker in added})


def opens_thinking(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Return whether a prompt ends with `<think>`, so that the answer begins with thoughts."""
    return tokenizer.decode(list(prompt[-_NUM_LAST:])).rstrip().endswith(THINK)


def _end_of_thinking(text: str, thinks: bool) -> int:
    """Position behind the thinking."""
    begins = text.lstrip().startswith(THINK)
    end = text.find(END_THINK) if thinks or begins else -1
    if end >= 0:
        return end + len(END_THINK)
    return len(text) if begins else 0


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
