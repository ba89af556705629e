"""Text of a growing sequence, a few tokens at a time, and the search for stop strings in it.

Used only for sequences whose text someone watches (streaming, stop strings); all others are decoded once, at their end.
"""

from __future__ import annotations

from typing import Any

_CONTEXT = 5  # tokens decoded again with each new one: enough for byte-level and spacing effects


class IncrementalText:
    """The text so far. Incomplete characters are held back until their last byte has come."""

    def __init__(self, tokenizer: Any, stop: list[str], skip_special_tokens: bool):
        self.tokenizer = tokenizer
        self.stop = stop
        self.skip_special_tokens = skip_special_tokens
        self.text = ""
        self.matched: str | None = None
        self._ids: list[int] = []
        self._start = 0  # first token of the window that is decoded again
        self._read = 0  # tokens whose text is in `text`
        self._longest = max(map(len, stop), default=0)

    def add(self, token: int) -> str:
        """Append a token; returns the new text. Sets `matched` and cuts the text at the first stop string."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith("�"):
            return ""
        new = after[len(before) :]
        self._start = max(self._start, self._read - _CONTEXT)
        self._read = len(self._ids)
        seen = len(self.text)
        self.text += new
        self._find_stop(max(0, seen - self._longest + 1))
        return self.text[seen:]

    def _find_stop(self, start: int) -> None:
        found = [(at, word) for word in self.stop if (at := self.text.find(word, start)) >= 0]
        if found:
            at, self.matched = min(found)
            self.text = self.text[:at]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)
