"""Reward for multiple choice: the letter that an answer chooses, or the text of that choice."""

import re
import string
from collections.abc import Sequence
from typing import Any

from arealite.api.errors import DatasetError
from arealite.reward.extraction import behind_thinking, last_boxed, last_tagged
from arealite.reward.qa import TYPESETTING, normalize

# No letter of a word: `D'oh`, `A's`.
_ALONE = r"(?![A-Za-z]|['’][A-Za-z])"
_RIGHT_ZH = re.compile(r"(?:选项\s*)?[(\[]?(?<![A-Za-z和与或、])([A-Z])[)\]]?(?:选项)?是?正确")
_LETTER = re.compile(
    rf"[\s({{\[*\"'`#<>=→-]*(?:option|choice|answer)?[\s({{\[*:]*([A-Z]){_ALONE}[\s)}}\].:*\"'`,，。!;>]*", re.I
)
# Full-width letters and brackets, and the delimiters of formulas.
_WIDE = str.maketrans({chr(0xFEE0 + ord(c)): c for c in string.ascii_letters + "()[]{}"} | {"【": "[", "】": "]"})
_DELIMITER = re.compile(r"\$|\\[()\[\]]")
# `不是`, `并不应该选`, `而非`: what stands behind it is ruled out.
_NOT_ZH = r"(?:而|并)?(?:不(?:可能|应该|应|会|能)?(?:是|为|选择?)|非)\s*"
# Behind it stands a letter or the text of a choice.
_STATED = re.compile(
    r"(?:\b(?:answers?(?:\s+to\s+(?:the|this|that)?\s*question(?:\s+\d{1,4})?\s+(?=is\b))?|ans)\b"
    r"\W{0,5}(?:(?:must|should|would|will|has\s+to|seems\s+to)\s+be\b|is\b|are\b|be\b)?"
    r"(?:\s+(?:clearly|therefore|thus|then|indeed|likely|probably|most\s+likely)\b)?"
    r"|\b(?:(?:correct|right|best)\s+(?:option|choice)|my\s+choice)\s*(?:is\b|:)"
    r"|\bI(?:['’](?:d|ll|m)|\s+(?:would|will|must|am))?\s+(?:choose|chose|pick(?:ed)?|select(?:ed)?|go(?:ing)?\s+with)\b"
    rf"|答案\s*\]|答案(?:(?:应该|应|就)?(?:[是为即]|选择?(?!项))|[:：])+|答案(?={_NOT_ZH})|正确的?(?:选项)?[是为:：]+"
    r"|(?<!不)(?:故|因此|所以|应该?|只能|我|本题|此题)选择?(?!项)|(?:(?<=[，。,：:])|^)\s*选择?(?!项))"
    r"\W{0,5}(?:(?:the )?(?:option|choice|letter) |选项)?\W{0,3}",
    re.I | re.M,
)
# `so option B is the correct answer`, but not `neither A nor B is correct` or `if B is right`.
_CALLED_RIGHT = re.compile(
    r"\b(nor |and |or |if |whether )?(?:(?:option|choice|answer) )?[({\[*]*(?-i:\b([A-Z]))(?![A-Za-z'])[)}\]*]*"
    r" (?:is|must be) (?:(?:clearly|therefore|thus|indeed) )?"
    r"(?:(?:the )?(?:only )?(?:correct|right|best)|the answer)\b",
    re.I,
)
# Not the article in `a village`.
_STATED_LETTER = re.compile(rf"([A-Za-z]){_ALONE}(?<!\ba(?=\s[a-z]))(?!\W{{0,3}}\?)")
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
# Another letter, which may be a further choice, or the subject of a clause (`A is wrong`, `A and C are not`).
_LABEL = re.compile(
    r"(?<![A-Za-z\\])(?:(?:option|choice) )?([A-Z])(?=\s*(?:[^\w\s'’]|$|(?:or|and|to)\b|[A-Z](?![A-Za-z])"
    r"|[\u4e00-\u9fff]))"
)
_SUBJECT = re.compile(
    rf"{_ONE}(?:\s*(?:,|and|or|nor)+\s*{_ONE})*[)\]*]*(?:\s*:?\s+(?:is|are|was|were|has|have|does|do|did|would|can|could|cannot"
    r"|gives?|seems?|looks?|fails?)\b|\s*(?:选项)?(?:是|不|错|都|均))"
)
_JOINED = re.compile(
    r"^(?:maybe|perhaps|或者?|和|与|及|还是)+$|(?:^|(?<=\s))(?:(?:or|and|to|either|maybe|perhaps|option|choice)\s*)+$"
)
_PUNCTUATION = string.punctuation + string.whitespace + "，、。：；"
_LINE = re.compile(r"[^\n]{0,300}")
# A line that begins with the letter of a choice.
_LISTED = re.compile(r"[\s({\[*_#>-]*([A-Z])(?:[)}\]*]*[.:)]|[)}\]*_\s]*$|\*\*)")
_REASON = re.compile(r"\s*(?:because|since|as)\b|\s*(?:是?因为|由于)", re.I)
_CONCLUSION = re.compile(
    r".{0,1000}?(?<![^\s.;!?:])(?:(?:(?:so|thus|therefore|hence|then)\b\W*|I\s+(?:think|believe|guess)\b\W*(?:that\b\W*)?)+"
    r"(?:(?:it|that|this)(?:['’]s|\s+is|\s+must\s+be)\s+)?|(?:it|that|this)(?:['’]s|\s+is|\s+must\s+be)\s+)"
    r"(?:the\s+(?=option|choice))?(?=\W*(?:(?:option|choice)\s+)?\W*(?-i:[A-Z])\W*$)",
    re.I,
)
_SENTENCE = re.compile(r"[^\n.;]{0,300}")
# Characters at the end of an answer that are searched.
_TAIL = 2_000


def choice_reward(
    prompt: str = "", completion: str = "", *ids: Any, answer: str, choices: Sequence[str] = (), **data: Any
) -> float:
    """Return 1.0 if the completion chooses `answer`: a letter, or the text of one of `choices`.

    The chosen letter is that in the last `<answer>`, in the last box, stated (`answer is`, `I choose`, `故选`), alone
    in the last line, called right there (`option B is correct`), or alone in the first line, with its reasons behind.
    Choices that the text rules out (`not B, but C`; `B is wrong, so C`; `不是B，而是C`) are skipped. Several letters
    (`A or B`) are no choice. With `choices`, their text counts as their letter.
    """
    letters = string.ascii_uppercase[: len(choices)] if choices else string.ascii_uppercase
    texts = [normalize(str(choice)) for choice in choices]
    wanted = _letter_of(str(answer), letters, texts)
    if wanted is None:
        raise DatasetError(f"the answer {str(answer)[:100]!r} of a row is neither a letter nor one of its choices")
    return float(find_choice(completion, letters, texts) == wanted)


def find_choice(completion: str, letters: str = string.ascii_uppercase, texts: Sequence[str] = ()) -> str | None:
    """Return the letter that a completion chooses, or None; `texts` are the normalized choices."""
    tail = TYPESETTING.sub(r"\1", behind_thinking(completion)[-_TAIL:]).translate(_WIDE)
    tagged = last_tagged(tail)
    return _chosen(tail if tagged is None else tagged, letters, texts)


def _chosen(text: str, letters: str, texts: Sequence[str]) -> str | None:
    """Return the letter that is in the last box, stated, or alone in the last line or the first."""
    if boxed := last_boxed(text):
        return _letter_of(boxed, letters, texts) or _last_stated(boxed, letters, texts)
    text = _DELIMITER.sub("", text)
    if stated := _last_stated(text, letters, texts):
        return stated
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    listed = [found[1].upper() for line in lines if (found := _LISTED.match(line))]
    last = lines[-1][conclusion.end() :] if (conclusion := _CONCLUSION.match(lines[-1])) else lines[-1]
    if found := None if _ends_with_listing(lines) else _letter_of(last, letters, texts):
        return found
    called_right = [found[2] for found in _CALLED_RIGHT.finditer(lines[-1]) if not found[1] and found[2] in letters]
    called_right += [letter for letter in _RIGHT_ZH.findall(lines[-1]) if letter in letters]
    if called_right:
        return called_right[-1]
    # Explained behind: `B. The Hague`, and why in other lines.
    return _letter_of(lines[0], letters, texts) if len(lines) > 1 and len(set(listed)) == 1 else None


def _ends_with_listing(lines: list[str]) -> bool:
    """Whether the last line is the last of the choices, repeated one by one."""
    ends = [(found[1], bool(normalize(line[found.end() :]))) for line in lines[-2:] if (found := _LISTED.match(line))]
    return len(ends) == 2 and ends[0][0] != ends[1][0] and ends[0][1] == ends[1][1]


def _last_stated(text: str, letters: str, texts: Sequence[str]) -> str | None:
    stated = [_stated_letter(text, marker.end(), letters, texts) for marker in _STATED.finditer(text)]
    return next((letter for letter in reversed(stated) if letter), None)


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
    if not found or found[1].upper() not in letters or _is_one_of_several(text, found, letters, texts):
        return None
    return found[1].upper()


def _letter_of(text: str, letters: str, texts: Sequence[str]) -> str | None:
    """Return the letter that a short text is or begins with, or of the choice that it repeats."""
    words = normalize(text)
    if words in texts:
        return letters[list(texts).index(words)]
    if ruled_out := _RULED_OUT.match(text):
        instead = _INSTEAD.match(text, ruled_out.end())
        return _letter_of(text[instead.end() :], letters, texts) if instead else None
    found = _LETTER.match(text)
    if found is None or found[1].upper() not in letters or _is_one_of_several(text, found, letters, texts):
        return None
    rest = normalize(text[found.end() :])
    # `A`, `(A) its text`, `A because`, or `A, not B`, but not `A cat sat`.
    is_choice = not rest or rest in texts or found.group().rstrip()[-1:] in ").]:"
    is_choice = is_choice or (found[1].isupper() and _REASON.match(text, found.end()) is not None)
    is_stressed = any(comma in found.group() for comma in ",，") and _RULED_OUT.match(text, found.end())
    return found[1].upper() if is_choice or is_stressed else None


def _is_one_of_several(text: str, found: re.Match[str], letters: str, texts: Sequence[str]) -> bool:
    """Whether other letters follow as alternatives: `A or B`, `A, B, C`, `(A) Paris (B) Rome`."""
    line = _LINE.match(text, found.end(1))
    label = _LABEL.search(line[0]) if line else None
    while line and label and label[1] not in letters:
        label = _LABEL.search(line[0], label.end())
    if line is None or label is None or label[1] == found[1].upper() or _SUBJECT.match(line[0], label.start()):
        return False
    between = normalize(line[0][: label.start()])
    return _JOINED.sub("", between).strip(_PUNCTUATION) in ("", *texts)
