"""Rewards for short answers: the letter of a choice, and words in common with an accepted answer."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from arealite.api.errors import DatasetError
from arealite.reward.extraction import last_boxed

_LETTER = re.compile(r"[\s({\[*\"'`]*(?:option|choice|answer)?[\s({\[*:]*([A-Z])(?![A-Za-z'])[\s)}\].:*\"'`,]*", re.I)
_STATED = re.compile(r"\banswers?\b\W{0,5}(?:is|are|be)?\W{0,5}(?:option |choice )?([A-Za-z])(?![A-Za-z'])", re.I)
_TAG = re.compile(r"<answer>([^<]{0,2000})</answer>", re.I)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Of an answer: what follows is not searched.
_TAIL = 2_000


def choice_reward(
    prompt: str = "",
    completion: str = "",
    prompt_ids: Sequence[int] = (),
    completion_ids: Sequence[int] = (),
    answer: str = "",
    choices: Sequence[str] = (),
    **data: Any,
) -> float:
    """Return 1.0 if the completion chooses `answer`: a letter, or the text of one of `choices`.

    The chosen letter is that in the last `<answer>`, in the last box, behind `answer is`, or alone in the last line.
    With `choices`, their text counts as their letter.
    """
    letters = string.ascii_uppercase[: len(choices)] if choices else string.ascii_uppercase
    texts = [normalize_answer(str(choice)) for choice in choices]
    wanted = _letter_of(str(answer), letters, texts)
    if wanted is None:
        raise DatasetError(f"the answer {str(answer)[:100]!r} of a row is neither a letter nor one of its choices")
    return float(find_choice(completion, letters, texts) == wanted)


def find_choice(completion: str, letters: str = string.ascii_uppercase, texts: Sequence[str] = ()) -> str | None:
    """Return the letter that a completion chooses, or None; `texts` are the normalized choices."""
    tail = completion[-_TAIL:]
    tagged = _TAG.findall(tail)
    if tagged:
        return _letter_of(tagged[-1], letters, texts)
    if boxed := last_boxed(tail):
        return _letter_of(boxed, letters, texts)
    stated = [letter.upper() for letter in _STATED.findall(tail) if letter.upper() in letters]
    if stated:
        return stated[-1]
    lines = tail.strip().splitlines()
    return _letter_of(lines[-1], letters, texts) if lines else None


def _letter_of(text: str, letters: str, texts: Sequence[str]) -> str | None:
    """Return the letter that a short text is or begins with, or of the choice that it repeats."""
    words = normalize_answer(text)
    if words in texts:
        return letters[list(texts).index(words)]
    found = _LETTER.match(text)
    if found is None or found[1].upper() not in letters:
        return None
    rest = normalize_answer(text[found.end() :])
    # `A` or `(A) its text`, but not `A cat sat`.
    is_choice = not rest or rest in texts or found.group().rstrip()[-1:] in ").]:"
    return found[1].upper() if is_choice else None


def f1_reward(
    prompt: str = "",
    completion: str = "",
    prompt_ids: Sequence[int] = (),
    completion_ids: Sequence[int] = (),
    answer: str | Sequence[str] = "",
    **data: Any,
) -> float:
    """Return the F1 of words in common with the best of the accepted answers, after SQuAD's normalization.

    Compared is the last `<answer>`, else the last box, else the last line.
    """
    accepted = [answer] if isinstance(answer, str) else [str(each) for each in answer]
    if not any(accepted):
        raise DatasetError("f1_reward needs the column `answer`: text, or a list of accepted texts")
    tagged = _TAG.findall(completion[-_TAIL:])
    lines = completion[-_TAIL:].strip().splitlines()
    given = tagged[-1] if tagged else last_boxed(completion[-_TAIL:]) or (lines[-1] if lines else "")
    return max(_f1(normalize_answer(given).split(), normalize_answer(each).split()) for each in accepted)


def _f1(given: list[str], wanted: list[str]) -> float:
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted)) if common else float(given == wanted)


def normalize_answer(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated spaces."""
    words = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
    # An answer that is all article or punctuation is compared as it is.
    return " ".join(words) or text.strip().lower()
