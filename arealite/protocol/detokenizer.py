"""Incremental detokenization: the text of a growing sequence, and the search for stop strings in it.

Used only for requests that stream or have stop strings; all others are decoded once, at their end.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_INCOMPLETE = "\ufffd"  # what tokenizers write for bytes that are not (yet) a character
# Tokens decoded again with each new one: enough for byte-level and spacing effects.
_CONTEXT = 5
# Tokens that may wait for a character to be complete: no tokenizer splits one further.
_HELD = 16
_LONGEST_RUN = 256  # of byte tokens


class IncrementalText:
    """The text of one sequence so far.

    Holds back incomplete characters, and text that may become a stop string: a returned piece never changes later.

    Some tokenizers (Llama 2, Gemma) have tokens for single bytes, and one wrong byte makes a whole run of them
    unreadable. Such a run is searched for stop strings at once, but returned only when it has ended.

    `before` is the token of `token_before`.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: list[str],
        skip_special_tokens: bool,
        hidden: frozenset[int] | None = None,
        before: int | None = None,
    ):
        self.tokenizer = tokenizer
        self.stop = stop
        self.skip_special_tokens = skip_special_tokens
        self.hidden = hidden
        self.text = ""
        self.matched: str | None = None
        self._ids: list[int] = [] if before is None else [before]
        self._start = 0  # first token of the window that is decoded again
        self._read = len(self._ids)  # tokens whose text is in `text`
        self._closed = 0  # characters of `text` that are final: all but those of a run of bytes
        self._num_returned = 0  # characters that `add` has returned
        self._bytes = _byte_tokens(tokenizer, skip_special_tokens)

    def add(self, token: int, may_stop: bool = True) -> str:
        """Append a token; returns the next piece of text. A stop string sets `matched` and ends `text`."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        num_new = len(self._ids) - self._read
        in_run = token in self._bytes and num_new < _LONGEST_RUN
        is_partial = after.endswith(_INCOMPLETE) and (in_run or num_new < _HELD)
        if len(after) <= len(before):
            return ""
        new, run = after[len(before) :], self.text[self._closed :]
        if is_partial:
            # Only search: a stop string may end right before the first bytes of this character.
            new = new.rstrip(_INCOMPLETE)
        seen = len(self.text) if new.startswith(run) else self._closed
        text = (self.text[: self._closed] if run else self.text) + new
        end = self._find_stop(text, seen) if may_stop else None
        if is_partial and end is None:
            return ""
        self.text = text[:end]
        if not in_run or self.matched is not None:
            self._start = max(self._start, self._read - _CONTEXT)
            self._read, self._closed = len(self._ids), len(self.text)
        start, self._num_returned = self._num_returned, self._closed - self._num_pending()
        return self.text[start : self._num_returned]

    def _find_stop(self, text: str, seen: int) -> int | None:
        """Find the first stop string that ends after `seen` characters; sets `matched`, returns its start."""
        starts = {word: max(0, seen - len(word) + 1) for word in self.stop}
        found = [(at, word) for word, start in starts.items() if (at := text.find(word, start)) >= 0]
        if not found:
            return None
        at, self.matched = min(found)
        return at

    def _num_pending(self) -> int:
        """Length of the longest end of the final text that is the beginning of a stop string."""
        if self.matched is not None:
            return 0
        most, length = 0, self._closed
        for word in self.stop:
            at = self.text.find(word[0], max(self._num_returned, length - len(word) + 1), length)
            while at >= 0 and not word.startswith(self.text[at:length]):
                at = self.text.find(word[0], at + 1, length)
            most = max(most, length - at if at >= 0 else 0)
        return most

    def _decode(self, ids: list[int]) -> str:
        return decode(self.tokenizer, ids, self.skip_special_tokens, self.hidden)


def decode(
    tokenizer: Any, ids: list[int], skip_special_tokens: bool, hidden: frozenset[int] | None, before: int | None = None
) -> str:
    """Decode tokens; `hidden` are the tokens to leave out where not all or no special tokens are."""
    if before is not None:
        whole = decode(tokenizer, [before, *ids], skip_special_tokens, hidden)
        return whole[len(tokenizer.decode([before])) :]
    if hidden is None:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return tokenizer.decode([token for token in ids if token not in hidden], skip_special_tokens=False)


def token_before(tokenizer: Any | None, prompt: Sequence[int]) -> int | None:
    """Return a token to decode before the continuation of a text; None if it makes no difference.

    Some tokenizers (Llama 2) drop the blank before the first word that they decode. At the beginning of a text it is
    none of the text's, but behind a prompt it is.
    """
    if tokenizer is None or not prompt or prompt[-1] in tokenizer.all_special_ids:
        return None
    return inner_token(tokenizer)


@lru_cache(8)
def inner_token(tokenizer: Any) -> int | None:
    """Return an ordinary token before which no blank is dropped; None if the tokenizer drops none."""
    candidates = ["a", "e", "s", "1", "."], ["\u2581", "\u2581a", "\u2581the", "\u25811"]
    known = [[i for i in tokenizer.convert_tokens_to_ids(names) if i not in (None, tokenizer.unk_token_id)]
             for names in candidates]  # fmt: skip
    if not all(known):
        return None
    letter, word = known[0][0], known[1][0]
    is_dropped = tokenizer.decode([letter, word, letter]) != tokenizer.decode([letter]) + tokenizer.decode(
        [word, letter]
    )
    return letter if is_dropped else None


@lru_cache(8)
def _byte_tokens(tokenizer: Any, skip_special_tokens: bool) -> frozenset[int]:
    """Tokens for single bytes, and special tokens that are skipped and so do not end a run of them."""
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    found = frozenset(ids) - {None, tokenizer.unk_token_id}
    return found.union(tokenizer.all_special_ids if found and skip_special_tokens else ())
