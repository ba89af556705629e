"""Rewards for answers that are numbers or expressions: find the final answer in a text, compare it with the right one.

With `math-verify` installed expressions are compared by algebra; without it, as exact rational numbers and, failing that, as normalised text.
Nothing here evaluates model output as code.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import threading
from fractions import Fraction
from typing import Any

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?|\.\d+"
_NUMBER = re.compile(rf"[-+]?(?:\d+ +\d+ */ *\d+|{_PLAIN})")  # the first is mixed, as 1 1/2
_FRACTION = re.compile(r"\\frac\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_DROP = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\!|\\\$|[$€£¥]|\\?%|\^\{?\\circ\}?|\\circ|°|\\[()\[\]]")
# Words after a number that are its unit (`18 dollars`, `5 km/h`, `12 cm^2`), not a part of its value.
_UNIT_WORD = r"(?!(?:and|or|to|plus|minus|times|over|half|hundred|thousand|[mb]illion|dozen)\b)(?:[^\W\d_]{2,}|[mgslhLVWNJK]\b)(?: ?\^\{?[23]\}?|[²³])?"
_WITH_UNIT = re.compile(rf"({_NUMBER.pattern})\s+{_UNIT_WORD}(?:[\s/-]+{_UNIT_WORD})*", re.I)
# What `=` may follow for the number after it to be the answer: a name, or a sum. After `2x =` it is not.
_LEFT = re.compile(r"[^\d,;<>!]*|[^A-Za-z;<>!]*")
# Two numbers with something between them: none of the two is the answer.
_SUM = re.compile(rf"(?:{_NUMBER.pattern})[\sA-Za-z()]*?(?:[-+*/^×÷–]|\bor\b|\bto\b)[\s({{]*\d")
_HAS_MATH_VERIFY = importlib.util.find_spec("math_verify") is not None


def math_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: str = "", **data: Any
) -> float:
    """1.0 if the completion's final answer equals `answer`, else 0.0."""
    given = final_answer(completion)
    return float(given is not None and answers_equal(given, str(answer)))


def final_answer(text: str) -> str | None:
    """The last `\\boxed{…}`, else what follows the last `####` or `answer is`, else the last number."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    for marker in ("####", "answer is", "Answer:"):
        if marker in text:
            rest = text.rsplit(marker, 1)[1].strip().lstrip(":").strip()
            if rest:
                return _stated(rest.splitlines()[0])
    numbers = _NUMBER.findall(text.replace("{,}", ","))
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}`, braces counted; None if there is none or it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip()
    return None


def _stated(line: str) -> str:
    """The answer that a line begins with: its first number, or what a sum comes to; the line itself where there is none."""
    cleaned = _clean(line)
    number = _NUMBER.search(cleaned)
    if number and _SUM.match(cleaned, number.start()):
        _, equals, result = cleaned.rpartition("=")
        number = _NUMBER.search(result) if equals else None
    elif number and "\\" in cleaned[: number.end()] + cleaned[number.end() :].lstrip()[:1]:
        number = None  # \sqrt{2} or 3\pi
    return number.group() if number else line.rstrip(".")


def answers_equal(given: str, expected: str) -> bool:
    """Equal as numbers, as text, or (with math-verify) as expressions. Nothing equals an empty answer."""
    same_text = normalise(given) == normalise(expected) != ""
    a, b = bare_number(given), bare_number(expected)
    if a is not None and b is not None:
        # A name or a unit is let go where the other side has none; 5 cm is not 5 m.
        is_plain = parse_number(given) is not None or parse_number(expected) is not None
        return a == b if is_plain else same_text
    if a is None and b is None and same_text:
        return True
    is_unsolved = (a is None) != (b is None) and "=" in given + expected
    return _HAS_MATH_VERIFY and not is_unsolved and _verify(given, expected)


def parse_number(text: str) -> Fraction | None:
    """`1,234.50`, `-3/4`, `1\\frac{1}{2}`, `$7`, `50%` as an exact number (signs of currency and percent dropped)."""
    cleaned = re.sub(r"^([-+]) +", r"\1", _clean(text).rstrip(". "))
    cleaned = re.sub(r"(?<=\d) (?=\d{3}(?!\d| */))", ",", cleaned)  # 70 000
    if not _NUMBER.fullmatch(cleaned) or len(cleaned) > 100:
        return None
    whole, space, part = re.sub(r" */ *", "/", cleaned.replace(",", "")).rpartition(" ")
    try:
        if not space:
            return Fraction(part)
        return Fraction(whole) + Fraction(part) * (-1 if whole.startswith("-") else 1)
    except (ValueError, ZeroDivisionError):
        return None  # a decimal over something, or a zero below


def bare_number(text: str) -> Fraction | None:
    """The number in `x = 18`, `5 + 3 = 8` or `18 dollars`; None for an equation to be solved, or several numbers."""
    left, _, right = _clean(text).rstrip(". ").rpartition("=")
    if not all(_LEFT.fullmatch(part) for part in left.split("=")):
        return None
    with_unit = _WITH_UNIT.fullmatch(right.strip())
    return parse_number(with_unit.group(1) if with_unit else right)


def normalise(text: str) -> str:
    """Expression text without what does not change its meaning."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _clean(text)).rstrip(".").lower()


def _clean(text: str) -> str:
    """Without typesetting: `\\text{X}` is X, `\\frac{1}{2}` is 1/2, `{,}` a comma."""
    for sign, plain in (("{,}", ","), ("−", "-"), ("\\times", "*"), ("\\cdot", "*")):
        text = text.replace(sign, plain)
    text = _WRAPPED.sub(r" \1 ", re.sub(r"\\[dt]frac", r"\\frac", text))
    text = _FRACTION.sub(r" \1\2/\3\4 ", _DROP.sub("", text))
    return re.sub(r"\\[,;: ]|\s+|~", " ", text).strip()


def _verify(given: str, expected: str) -> bool:
    verifier = importlib.import_module("math_verify")
    # Its deadline is a signal, which only the main thread can have; elsewhere the caller's holds.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    sides = (f"\\boxed{{{side}}}" for side in (expected, given))
    gold, answer = (verifier.parse(side, parsing_timeout=limit) for side in sides)
    return bool(verifier.verify(gold, answer, timeout_seconds=limit))
