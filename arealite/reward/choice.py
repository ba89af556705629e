"""Reward for multiple choice: the letter that an answer chooses, or the text of that choice."""

import re
import string
from collections.abc import Sequence
from typing import Any

from arealite.api.errors import DatasetError
from arealite.reward.extraction import last_boxed, last_tagged
from arealite.reward.qa import normalize

_LETTER = re.compile(r"[\s({\[*\"'`]*(?:option|choice|answer)?[\s({\[*:]*([A-Z])(?![A-Za-z'])[\s)}\].:*\"'`,]*", re.I)
_STATED = re.compile(r"\banswers?\b\W{0,5}(?:is|are|be)?\W{0,5}(?:option |choice )?([A-Za-z])(?![A-Za-z'])", re.I)
# Characters at the end of an answer that are searched.
_TAIL = 2_000


def choice_reward(
    prompt: str = "", completion: str = "", *ids: Any, answer: str = "", choices: Sequence[str] = (), **data: Any
) -> float:
    """Return 1.0 if the completion chooses `answer`: a letter, or the text of one of `choices`.

    The chosen letter is that in the last `<answer>`, in the last box, behind `answer is`, or alone in the last line.
    With `choices`, their text counts as their letter.
    """
    letters = string.ascii_uppercase[: len(choices)] if choices else string.ascii_uppercase
    texts = [normalize(str(choice)) for choice in choices]
    wanted = _letter_of(str(answer), letters, texts)
    if wanted is None:
        raise DatasetError(f"the answer {str(answer)[:100]!r} of a row is neither a letter nor one of its choices")
    return float(find_choice(completion, letters, texts) == wanted)


def find_choice(completion: str, letters: str = string.ascii_uppercase, texts: Sequence[str] = ()) -> str | None:
    """Return the letter that a completion chooses, or None; `texts` are the normalized choices."""
    tail = completion[-_TAIL:]
    tagged = last_tagged(tail)
    if tagged is not None:
        return _letter_of(tagged, letters, texts)
    if boxed := last_boxed(tail):
        return _letter_of(boxed, letters, texts)
    stated = [letter.upper() for letter in _STATED.findall(tail) if letter.upper() in letters]
    if stated:
        return stated[-1]
    lines = tail.strip().splitlines()
    return _letter_of(lines[-1], letters, texts) if lines else None


def _letter_of(text: str, letters: str, texts: Sequence[str]) -> str | None:
    """Return the letter that a short text is or begins with, or of the choice that it repeats."""
    words = normalize(text)
    if words in texts:
        return letters[list(texts).index(words)]
    found = _LETTER.match(text)
    if found is None or found[1].upper() not in letters:
        return None
    rest = normalize(text[found.end() :])
    # `A` or `(A) its text`, but not `A cat sat`.
    is_choice = not rest or rest in texts or found.group().rstrip()[-1:] in ").]:"
    return found[1].upper() if is_choice else None
