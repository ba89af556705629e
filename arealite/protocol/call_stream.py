"""`CallSplitter`: content and tool calls of a text that is still being generated.

Used by the streams of the server and the gateway. Content goes out at once, and arguments of calls as the model writes
them. What was sent is always the beginning of what `parse_tool_calls` finds in the whole text: the splitter follows
calls that begin as templates write them, and from the first deviation on it holds everything back until the end.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from arealite.protocol.call_formats import (
    CLOSE,
    MAX_CALLS,
    MAX_DEPTH,
    MISTRAL,
    MISTRAL_NAME,
    OPEN,
    PYTHON,
    Scan,
    ToolCall,
    read_head,
)
from arealite.protocol.tool_calls import END_THINK, THINK, parse_tool_calls

_STARTS = {"hermes": (OPEN,), "qwen_coder": (OPEN,), "llama": (PYTHON,), "mistral": (MISTRAL,)}
_ANY_START = (OPEN, PYTHON, MISTRAL)
# Where the arguments of a broken call may end: text behind it is sent only once the arguments are complete.
_ENDS = {"hermes": (OPEN, CLOSE), "mistral": (MISTRAL,)}
_SEPARATORS = " \t\n\r\f\v;,"  # of Llama's calls
_STRUCTURE = re.compile(r'["\\{}\[\]\x00-\x1f]')
_LONGEST_HEAD = 1024
_LONGEST_WAIT = 1 << 18  # longer texts are held back until the end


@dataclass(frozen=True)
class CallPiece:
    """The next piece of the arguments of a call; the first one is empty.

    `call` counts the calls of an answer.
    """

    call: int
    id: str
    name: str
    text: str


@dataclass
class _Sent:
    """A call of which something was sent."""

    id: str
    name: str
    text: str = ""


class CallSplitter:
    """Splits a growing text: returns content that may be sent at once, holds back what may be a call.

    The pieces of `add` and the rest from `finish` make the content of `parse_tool_calls` for the whole text; those of
    `take_calls` are the beginnings of its calls. At most `max_calls` calls are sent before the end. `thinks`: see
    `parse_tool_calls`.
    """

    def __init__(
        self, style: str | None, tools: list[dict[str, Any]] | None = None, *, thinks: bool = True, max_calls: int = 0
    ):
        self.style, self.tools, self.thinks = style, tools, thinks
        self.max_calls = 0 if style in (None, "qwen_coder") else min(max_calls, MAX_CALLS)
        self._starts = _STARTS[style] if style else _ANY_START
        self._pieces: list[str] = []
        self._tail = ""  # the end of the text that was not read
        self._content: list[str] = []  # that was read in this call of `add`
        self._space = ""  # white space at the end of the content: it is dropped at the end of the text
        self._num_sent = 0
        self._sent: list[_Sent] = []
        self._news: list[CallPiece] = []
        # Reads a part of `_tail`, and returns whether there is more to read; None: all is held back.
        self._read: Callable[[], bool] | None = self._read_start
        self._has_thoughts = False  # the text begins with <think>
        self._is_open = True  # a call may stand here without a marker
        self._in_list = False  # of Mistral's calls
        self._is_named = False  # Mistral's name[ARGS]{…}, which nothing closes

    def add(self, piece: str) -> str:
        """Append a piece of text; returns the next piece of content."""
        self._pieces.append(piece)
        if self._read is None:
            return ""
        self._tail += piece
        while self._read is not None and self._read():
            pass
        sent = "".join(self._content)
        self._content.clear()
        self._num_sent += len(sent)
        return sent

    def take_calls(self) -> list[CallPiece]:
        """Return the new pieces of calls."""
        news, self._news = self._news, []
        return news

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest of the content and the whole calls."""
        content, calls = parse_tool_calls("".join(self._pieces), self.style, self.tools, self.thinks)
        return content[self._num_sent :], self.with_ids(calls)

    def with_ids(self, calls: list[ToolCall]) -> list[ToolCall]:
        """Return calls of the whole text with the ids that were sent."""
        return [replace(c, id=s.id) for c, s in zip(calls, self._sent, strict=False)] + calls[len(self._sent) :]

    def agrees_with(self, calls: list[ToolCall]) -> bool:
        """Return whether what was sent is the beginning of these calls."""
        pairs = zip(calls, self._sent, strict=False)
        is_same = all(c.name == s.name and c.arguments_text.startswith(s.text) for c, s in pairs)
        return is_same and len(self._sent) <= len(calls)

    # ------------------------------------------------------------------------------------------------ content

    def _hold(self) -> bool:
        self._read, self._tail = None, ""
        return False

    def _emit(self, end: int) -> None:
        """Take the text up to `end` as content."""
        text = self._space + self._tail[:end]
        shown = text.rstrip()
        self._space, self._tail = text[len(shown) :], self._tail[end:]
        self._content.append(shown)

    def _read_start(self) -> bool:
        """At the start of the text: does it begin with thoughts?"""
        text = self._tail.lstrip()
        if THINK.startswith(text):
            return False
        self._has_thoughts = text.startswith(THINK)
        self._read = self._read_thoughts if self._has_thoughts or self.thinks else self._read_content
        return True

    def _read_thoughts(self) -> bool:
        if self.style == "hermes" and self._may_be_bare():
            return self._hold()  # such calls are read wherever thoughts end
        end = self._tail.find(END_THINK)
        if end >= 0:
            self._emit(end + len(END_THINK))
            # Only Llama's calls may follow without a marker.
            self._is_open, self._read = self.style in (None, "llama"), self._read_content
            return True
        if self._has_thoughts:
            self._emit(len(self._tail) - _num_pending(self._tail, (END_THINK,)))
            return False
        # There may be no thoughts at all: what looks like a call waits.
        found = [at for start in self._starts if (at := self._tail.find(start)) >= 0]
        is_bare = self._may_be_bare()
        if (found or is_bare) and (self.max_calls == 0 or len(self._tail) > _LONGEST_WAIT):
            return self._hold()
        if not is_bare:
            self._emit(min(found, default=len(self._tail) - _num_pending(self._tail, (*self._starts, END_THINK))))
        return False

    def _may_be_bare(self) -> bool:
        """Whether the text may be a call without a marker."""
        if self._num_sent == 0 and not any(self._content) and self._tail.lstrip().startswith("{"):
            return self.style in (None, "llama") or (self.style == "hermes" and bool(self.tools))
        return False

    def _read_content(self) -> bool:
        if self._is_open:
            text = self._tail.lstrip()
            if not text:
                return False
            if text.startswith("{") and self.style in (None, "llama"):
                self._emit(len(self._tail) - len(text))
                return self._begin(0)
            if self._may_be_bare():
                return self._hold()
            self._is_open = False
        found = [(at, len(start)) for start in self._starts if (at := self._tail.find(start)) >= 0]
        if not found:
            self._emit(len(self._tail) - _num_pending(self._tail, self._starts))
            return False
        at, size = min(found)
        self._emit(at)
        return self._begin(size)

    # -------------------------------------------------------------------------------------------------- calls

    def _begin(self, size: int) -> bool:
        """Begin calls behind a marker of this size."""
        self._tail = self._tail[size:]
        if len(self._sent) >= self.max_calls:
            return self._hold()
        self._in_list, self._read = False, self._read_head
        return True

    def _read_head(self) -> bool:
        """Read up to the arguments of a call."""
        text = self._tail.lstrip()
        if self.style == "mistral" and text.startswith("[") and not self._in_list:
            self._in_list, self._tail = True, text[1:]
            return True
        if not text:
            return False
        head, self._is_named = None, False
        if text.startswith("{"):
            head = read_head(text, 0)
        elif self.style == "mistral" and not self._in_list:
            named = MISTRAL_NAME.match(text)
            head, self._is_named = (named[1], named.end()) if named else None, True
        else:
            return self._hold()
        if head is None or head[1] >= len(text):
            return False if len(text) < _LONGEST_HEAD else self._hold()
        has_mark = any(mark in head[0] for mark in _ENDS.get(self.style or "", ()))
        if text[head[1]] != "{" or has_mark or len(self._sent) >= self.max_calls:
            return self._hold()
        token = secrets.token_hex(12)
        self._sent.append(_Sent(token[:9] if self.style == "mistral" else f"call_{token}", head[0]))
        self._send("")
        self._tail = text[head[1] :]
        self._arguments, self._at, self._skip, self._in_string = "", 0, 0, False
        self._depth = self._deepest = 0
        self._limit, self._read = _LONGEST_WAIT, self._read_arguments
        return True

    def _send(self, text: str) -> None:
        call = self._sent[-1]
        call.text += text
        self._news.append(CallPiece(len(self._sent) - 1, call.id, call.name, text))

    def _read_arguments(self) -> bool:
        self._arguments += self._tail
        self._tail = ""
        end = self._find_end()
        if end is None:
            return self._send_safe()
        self._tail, self._arguments = self._arguments[end:], self._arguments[:end]
        scan = Scan(self._arguments, 0, None, has_short_ids=False)
        _, error = scan.read_json()
        if error or scan.at != end or end > self._limit or self._deepest > MAX_DEPTH:
            return self._hold()
        if more := self._arguments[len(self._sent[-1].text) :]:
            self._send(more)
        self._read = self._read_content if self._is_named else self._read_brace
        return True

    def _find_end(self) -> int | None:
        """Position behind the object of arguments; None if it is not complete."""
        for found in _STRUCTURE.finditer(self._arguments, self._at):
            at, sign = found.start(), found[0]
            if at < self._skip:
                continue
            if self._in_string:
                if sign == "\\":
                    self._skip = at + 2
                elif sign == '"':
                    self._in_string = False
                elif sign not in "{}[]":
                    self._limit = min(self._limit, at)  # `parse_tool_calls` escapes it, unless the call is broken
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
                self._deepest = max(self._deepest, self._depth)
            elif sign in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        self._at = len(self._arguments)
        return None

    def _send_safe(self) -> bool:
        """Send what belongs to the arguments even if the call turns out to be broken."""
        text, sent, marks = self._arguments, len(self._sent[-1].text), _ENDS.get(self.style or "", ())
        if self._deepest > MAX_DEPTH or len(text) > _LONGEST_WAIT:
            return self._hold()
        found = [at for mark in marks if (at := text.find(mark, sent)) >= 0]
        # A broken call loses white space at its end.
        if more := text[sent : min(*found, self._limit, len(text) - _num_pending(text, marks))].rstrip():
            self._send(more)
        return False

    def _read_brace(self) -> bool:
        """Read the end of a call behind its arguments."""
        text = self._tail.lstrip()
        if not text:
            return False
        if text[0] != "}":
            return self._hold()
        self._tail, self._read = text[1:], self._read_behind
        return True

    def _read_behind(self) -> bool:
        """Read what separates calls."""
        text = self._tail.lstrip()
        if self.style == "hermes":
            return self._expect(text, CLOSE, self._read_content)
        if self.style == "llama":
            text = self._tail.lstrip(_SEPARATORS)
            if text.startswith("{"):
                self._tail, self._read = text, self._read_head
                return True
            return self._expect(text, PYTHON, self._read_head)
        if not self._in_list:
            self._read = self._read_content
            return True
        if text.startswith("]"):
            return self._expect(text, "]", self._read_content)
        return self._expect(text, ",", self._read_head)

    def _expect(self, text: str, mark: str, following: Callable[[], bool]) -> bool:
        """Read a mark at the start of `text`; anything else is held back."""
        if text.startswith(mark):
            self._tail, self._read = text[len(mark) :], following
            return True
        return False if mark.startswith(text) else self._hold()


def _num_pending(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of a text that is the beginning of a mark."""
    end = text[-max(map(len, marks), default=1) + 1 :] if marks else ""
    sizes = range(len(end), 0, -1)
    return next((size for size in sizes if any(mark.startswith(end[-size:]) for mark in marks)), 0)
