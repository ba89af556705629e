"""Rewards for answers that are numbers or expressions: find the final answer in a text, compare it with the right one.

With `math-verify` installed expressions are compared by algebra; without it, as exact rational numbers and, failing that, as normalised text.
Nothing here evaluates model output as code.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?|[-+]?\.\d+")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([-+]?\d+)\s*\}\s*\{\s*([-+]?\d+)\s*\}")
_DROP = re.compile(
    r"\\left|\\right|\\!|\\,|\\;|\\ |\\\$|\$|\\text\{[^{}]*\}|\\mathrm\{[^{}]*\}|\\%|%|\\circ|\^\{?\\circ\}?"
)
_HAS_MATH_VERIFY = importlib.util.find_spec("math_verify") is not None


def math_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: str = "",
    **data: Any,
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
                number = _NUMBER.search(rest.splitlines()[0].replace("$", ""))
                return number.group() if number else rest.splitlines()[0].rstrip(".")
    numbers = _NUMBER.findall(text)
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


def answers_equal(given: str, expected: str) -> bool:
    """Equal as numbers, as text, or (with math-verify) as expressions."""
    a, b = parse_number(given), parse_number(expected)
    if a is not None and b is not None:
        return a == b
    if normalise(given) == normalise(expected):
        return True
    return _HAS_MATH_VERIFY and _verify(given, expected)


def parse_number(text: str) -> Fraction | None:
    """`1,234.50`, `-3/4`, `\\frac{1}{2}`, `$7`, `50%` as an exact number (signs of currency and percent dropped)."""
    cleaned = _LATEX_FRACTION.sub(r"\1/\2", text)
    cleaned = _DROP.sub("", cleaned).strip().rstrip(".").replace(" ", "")
    if not _NUMBER.fullmatch(cleaned) or len(cleaned) > 100:
        return None
    try:
        return Fraction(cleaned.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        pass  # a decimal over something, or a zero below
    return None


def normalise(text: str) -> str:
    """Expression text without what does not change its meaning."""
    cleaned = (
        _LATEX_FRACTION.sub(r"\1/\2", _DROP.sub("", text))
        .replace("\\dfrac", "\\frac")
        .replace("\\tfrac", "\\frac")
    )
    return re.sub(r"\s+", "", cleaned).rstrip(".").lower()


def _verify(given: str, expected: str) -> bool:
    verifier = importlib.import_module("math_verify")
    gold, answer = verifier.parse(f"\\boxed{{{expected}}}"), verifier.parse(f"\\boxed{{{given}}}")
    return bool(verifier.verify(gold, answer))
