"""Measures in several units, such as `6 ft 2 in` or `1 hour and 30 minutes`: find and compare them."""

import re
from fractions import Fraction

# Units of one kind by size, largest first.
_KINDS: tuple[tuple[tuple[str, int], ...], ...] = (
    (("miles?|mi", 63_360), ("yards?|yds?", 36), ("feet|foot|ft", 12), ("inch(?:es)?|in", 1)),
    (("km|kilomet(?:er|re)s?", 10**6), ("m|met(?:er|re)s?", 1000), ("cm|centimet(?:er|re)s?", 10), ("mm", 1)),
    (
        ("weeks?", 604_800),
        ("days?", 86_400),
        ("hours?|hrs?|h", 3600),
        ("minutes?|mins?|m", 60),
        ("seconds?|secs?|s", 1),
    ),
    (("years?|yrs?", 12), ("months?", 1)),
    (("pounds?|lbs?", 16), ("ounces?|oz", 1)),
    (("kg|kilograms?|kilos?", 1000), ("g|grams?", 1)),
    (("dollars?", 100), ("cents?", 1)),
)
_AMOUNT = r"(\d{1,12}(?:\.\d{1,12})?)"
_ONE = tuple(
    tuple((re.compile(rf"{_AMOUNT}\s*(?:{words})\b\.?", re.I), size) for words, size in kind) for kind in _KINDS
)
_JOINT = re.compile(r"\s*(?:,\s*)?(?:and\s+)?")


def measure_at(text: str, start: int = 0) -> tuple[int, int, Fraction, int] | None:
    """Return the measure at `start`, or None.

    That is its kind, its number of units, its size in the smallest unit, and its end.
    """
    found = [_read(text, start, kind) for kind in range(len(_ONE))]
    return max((each for each in found if each), key=lambda each: each[1], default=None)


def compound_at(text: str, start: int) -> str | None:
    """Return the text of a measure in two units or more at `start`, or None."""
    start += len(text[start:]) - len(text[start:].lstrip())
    found = measure_at(text, start)
    return text[start : found[3]] if found and found[1] > 1 else None


def measures_equal(given: str, expected: str) -> bool | None:
    """Compare two measures; None unless both are of one kind, and one has two units or more."""
    a, b = measure_at(given), measure_at(expected)
    if a is None or b is None or a[0] != b[0] or max(a[1], b[1]) < 2 or (a[3], b[3]) != (len(given), len(expected)):
        return None
    return a[2] == b[2]


def _read(text: str, start: int, kind: int) -> tuple[int, int, Fraction, int] | None:
    count, total, end = 0, Fraction(0), start
    for unit, size in _ONE[kind]:
        joint = _JOINT.match(text, end) if count else None
        if found := unit.match(text, joint.end() if joint else end):
            count, total, end = count + 1, total + Fraction(found[1]) * size, found.end()
    return (kind, count, total, end) if count else None
