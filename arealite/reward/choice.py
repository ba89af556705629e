"""Reward for multiple choice: the letter that an answer chooses, or the text of that choice."""

import re
import string
from collections.abc import Sequence
from typing import Any

from arealite.api.errors import DatasetError
from arealite.reward.extraction import last_boxed, last_tagged
from arealite.reward.qa import TYPESETTING, normalize

_LETTER = re.compile(
    r"[\s({\[*\"'`]*(?:option|choice|answer)?[\s({\[*:]*([A-Z])(?![A-Za-z'])[\s)}\].:*\"'`,，。]*", re.I
)
# `不是`, `并不应该选`, `而非`: what stands behind it is ruled out.
_NOT_ZH = r"(?:而|并)?(?:不(?:可能|应该|应|会|能)?(?:是|为|选择?)|非)\s*"
# Behind it stands a letter or the text of a choice.
_STATED = re.compile(
    r"(?:\banswers?\b\W{0,5}(?:(?:must|should|would|will)\s+be\b|is\b|are\b|be\b)?"
    r"(?:\s+(?:clearly|therefore|thus|then|indeed)\b)?|\b(?:correct|right|best)\s+(?:option|choice)\s*(?:is\b|:)"
    rf"|答案(?:(?:应该|应)?(?:[是为]|选择?(?!项))|[:：])+|答案(?={_NOT_ZH})"
    r"|(?<!不)(?:故|因此|所以|应该?|只能)选择?(?!项)|(?:(?<=[，。,：:])|^)\s*选择?(?!项))"
    r"\W{0,5}(?:(?:option|choice) |选项)?",
    re.I | re.M,
)
# `so option B is the correct answer`, but not `neither A nor B is correct` or `if B is right`.
_CALLED_RIGHT = re.compile(
    r"\b(nor |and |or |if |whether )?(?:(?:option|choice|answer) )?[({\[*]*(?-i:\b([A-Z]))(?![A-Za-z'])[)}\]*]*"
    r" (?:is|must be) (?:(?:clearly|therefore|thus|indeed) )?(?:the )?(?:only )?(?:correct|right|best)\b",
    re.I,
)
# Not the article in `a village`.
_STATED_LETTER = re.compile(r"([A-Za-z])(?![A-Za-z'])(?<!\ba(?=\s[a-z]))")
# Choices that a text rules out (`not B`, `neither A nor B`, `B is wrong`), and the words before the chosen one.
_ONE = r"[({\[*\"'`]*(?:(?:option|choice|answer)\s+|选项\s*)?[({\[*\"'`]*[A-Z](?![A-Za-z'])[)}\]*\"'`]*"
_NOT_RIGHT = r"not\s+(?:right|correct|(?:the\s+)?(?:\w+\s+)?(?:answer|one))"
_WRONG = rf"(?:wrong|incorrect|false|impossible|(?:ruled\s+)?out|{_NOT_RIGHT})\b"
_RULED_OUT = re.compile(
    r"[\s*_]*(?:"
    r"(?:(?:it|this|that)\s+)?(?:(?:is|was)?\s*\b(?:not|neither)|(?:is|was)n['’]t|(?:can|could)(?:\s*not|['’]?n?['’]t)\s+be)"
    rf"\s+{_ONE}(?:(?:\s*,)?\s*(?:and|or|nor)\s+{_ONE}|\s*,\s*{_ONE})*"
    rf"|{_ONE}(?:\s+and\s+{_ONE})?(?:\s*:\s*|\s+(?:is|are|was|were|must\s+be)\s+)(?:both\s+)?{_WRONG}"
    rf"|{_ONE}\s+(?:is|was)n['’]t\s+(?:right|correct)\b"
    rf"|{_NOT_ZH}{_ONE}(?:\s*(?:[、和与]|或者?|[,，]?\s*也?{_NOT_ZH})\s*{_ONE})*"
    rf"|{_ONE}\s*(?:选项)?是?(?:不对|不正确|错误?)的?"
    r")",
    re.I,
)
_INSTEAD = re.compile(
    r"[\s,.;:*_，。；：—–-]*(?:(?:\b(?:but|so|thus|hence|therefore|rather|instead|and|then|it|this|that|is|must|be|the|answer"
    r"|correct|right|choose|i)\b(?:['’]s\b)?[\s,:]*)+(?:(?:option|choice)\s+)?"
    r"|(?:(?:而|所以|因此|故|应该?|正确|的|答案|是|为|选择?(?!项))[\s,:，：]*)+(?:选项\s*)?)[({\[*\"'`]*",
    re.I,
)
_SENTENCE = re.compile(r"[^\n.;]{0,300}")
# Characters at the end of an answer that are searched.
_TAIL = 2_000


def choice_reward(
    prompt: str = "", completion: str = "", *ids: Any, answer: str, choices: Sequence[str] = (), **data: Any
) -> float:
    """Return 1.0 if the completion chooses `answer`: a letter, or the text of one of `choices`.

    The chosen letter is that in the last `<answer>`, in the last box, behind `answer is` (`故选`), alone in the last
    line, or called right there (`option B is correct`).
    Choices that the text rules out (`not B, but C`; `B is wrong, so C`; `不是B，而是C`) are skipped. With `choices`,
    their text counts as their letter.
    """
    letters = string.ascii_uppercase[: len(choices)] if choices else string.ascii_uppercase
    texts = [normalize(str(choice)) for choice in choices]
    wanted = _letter_of(str(answer), letters, texts)
    if wanted is None:
        raise DatasetError(f"the answer {str(answer)[:100]!r} of a row is neither a letter nor one of its choices")
    return float(find_choice(completion, letters, texts) == wanted)


def find_choice(completion: str, letters: str = string.ascii_uppercase, texts: Sequence[str] = ()) -> str | None:
    """Return the letter that a completion chooses, or None; `texts` are the normalized choices."""
    tail = TYPESETTING.sub(r"\1", completion[-_TAIL:])
    tagged = last_tagged(tail)
    if tagged is not None:
        return _letter_of(tagged, letters, texts)
    if boxed := last_boxed(tail):
        return _letter_of(boxed, letters, texts)
    stated = [_stated_letter(tail, marker.end(), letters, texts) for marker in _STATED.finditer(tail)]
    if chosen := [letter for letter in stated if letter]:
        return chosen[-1]
    line = (tail.strip().splitlines() or [""])[-1]
    called_right = [found[2] for found in _CALLED_RIGHT.finditer(line) if not found[1] and found[2] in letters]
    return _letter_of(line, letters, texts) or (called_right[-1] if called_right else None)


def _stated_letter(text: str, start: int, letters: str, texts: Sequence[str]) -> str | None:
    """Return the letter at `start`, or of the choice that the rest of the sentence repeats."""
    sentence = _SENTENCE.match(text, start)
    words = normalize(sentence[0]) if sentence else ""
    if words in texts:
        return letters[list(texts).index(words)]
    if ruled_out := _RULED_OUT.match(text, start):
        instead = _INSTEAD.match(text, ruled_out.end())
        return _stated_letter(text, instead.end(), letters, texts) if instead else None
    found = _STATED_LETTER.match(text, start)
    return found[1].upper() if found and found[1].upper() in letters else None


def _letter_of(text: str, letters: str, texts: Sequence[str]) -> str | None:
    """Return the letter that a short text is or begins with, or of the choice that it repeats."""
    words = normalize(text)
    if words in texts:
        return letters[list(texts).index(words)]
    if ruled_out := _RULED_OUT.match(text):
        instead = _INSTEAD.match(text, ruled_out.end())
        return _letter_of(text[instead.end() :], letters, texts) if instead else None
    found = _LETTER.match(text)
    if found is None or found[1].upper() not in letters:
        return None
    rest = normalize(text[found.end() :])
    # `A`, `(A) its text` or `A, not B`, but not `A cat sat`.
    is_choice = not rest or rest in texts or found.group().rstrip()[-1:] in ").]:"
    is_stressed = any(comma in found.group() for comma in ",，") and _RULED_OUT.match(text, found.end())
    return found[1].upper() if is_choice or is_stressed else None
