"""Text of a growing sequence, a few tokens at a time, and the search for stop strings in it.

Used only for sequences whose text someone watches (streaming, stop strings); all others are decoded once, at their end.
"""

from __future__ import annotations

from typing import Any

_CONTEXT = 5  # tokens decoded again with each new one: enough for byte-level and spacing effects
_HELD = 16  # tokens that may wait for a character to be complete: no tokenizer splits one further


class IncrementalText:
    """The text so far. Incomplete characters are held back until their last byte has come, and what may become a stop string
    until it is known not to: pieces that were given out are never taken back.
    """

    def __init__(self, tokenizer: Any, stop: list[str], skip_special_tokens: bool):
        self.tokenizer = tokenizer
        self.stop = stop
        self.skip_special_tokens = skip_special_tokens
        self.text = ""
        self.matched: str | None = None
        self._ids: list[int] = []
        self._start = 0  # first token of the window that is decoded again
        self._read = 0  # tokens whose text is in `text`
        self._given = 0  # characters that `add` has returned

    def add(self, token: int, may_stop: bool = True) -> str:
        """Append a token; returns the next piece of text. Sets `matched` and cuts the text at the first stop string."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        is_partial = after.endswith("�") and len(self._ids) - self._read < _HELD
        if len(after) <= len(before) or is_partial:
            return ""
        new = after[len(before) :]
        self._start = max(self._start, self._read - _CONTEXT)
        self._read = len(self._ids)
        seen = len(self.text)
        self.text += new
        if may_stop:
            self._find_stop(seen)
        start, self._given = self._given, len(self.text) - self._num_pending()
        return self.text[start : self._given]

    def _find_stop(self, seen: int) -> None:
        """Look for stop strings that end behind the first `seen` characters."""
        starts = {word: max(0, seen - len(word) + 1) for word in self.stop}
        found = [(at, w) for w, start in starts.items() if (at := self.text.find(w, start)) >= 0]
        if found:
            at, self.matched = min(found)
            self.text = self.text[:at]

    def _num_pending(self) -> int:
        """Length of the text's longest ending that a stop string begins with."""
        if self.matched is not None:
            return 0
        most, length = 0, len(self.text)
        for word in self.stop:
            at = self.text.find(word[0], max(self._given, length - len(word) + 1))
            while at >= 0 and not word.startswith(self.text[at:]):
                at = self.text.find(word[0], at + 1)
            most = max(most, length - at if at >= 0 else 0)
        return most

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)
