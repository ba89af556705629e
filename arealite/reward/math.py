"""Rewards for numbers and formulas: compare a completion's final answer with the right one.

Numbers are compared exactly, as fractions. Formulas are compared as text first and then by algebra, with math-verify.
Its timeouts work in the main thread only and are off. Instead, formulas that could take minutes are compared as text
only, and the reward pool has a deadline. Nothing here evaluates model output as code.
"""

import logging
import re
from fractions import Fraction
from functools import lru_cache
from math import comb, gcd, prod
from typing import Any

import math_verify
import sympy

from arealite.reward.extraction import FRACTIONS, SCALE, SCALES, SUPERSCRIPTS, final_answer, last_boxed
from arealite.reward.measures import measures_equal
from arealite.utils.pools.process_pool import prepare_workers

__all__ = ["answers_equal", "final_answer", "first_equal", "last_boxed", "math_reward", "parse_number"]

# math-verify warns at its first call that its timeouts are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_MAX_FORMULA = 400
# Algebra on these can take minutes: powers of powers, large exponents, factorials and binomials of large numbers, what
# an answer leaves to be integrated or derived.
_TOO_LARGE = re.compile(
    r"\^\s*(?:[\d.]+|[A-Za-z])\s*\^|\^[\s{(]+[^{}()]*[\s})]*\^|\^\s*\{?\s*-?\d{5,}|[A-Za-z]\s*\^\s*\{?\s*\d{3,}|\d{4,}\s*!|!\s*!"
    r"|binom\s*\{(?:\s*\d{4}|[^{}]*\}\s*\{\s*\d{3})|\d{200,}"
    r"|\\i*int(?![a-z])|\\frac\s*\{\s*d\b[^{}]*(?:\{\d+\})?\s*\}\s*\{\s*d|\^\s*\{?\s*\d{4,}\s*\}?\s*[a-z]"
    r"|\([^()]*sqrt[^()]*\)\s*\^\s*\{?\s*\d{2,}|\\(?:sin|cos|tan)\s*\^\s*\{?\s*\d{2,}"
    r"|\\begin\s*\{vmatrix|(?:[-+]\s*){10}|(?:[(|][^(|]*){40}"
)
_POWER_OF_SUM = re.compile(r"[)\]}]\s*\^\s*\{?\s*(\d{1,4})")
_MAX_EXPANSION = 8
_MAX_TERMS = 300
_MAX_POWER = 10_000
_COMMAND = re.compile(r"\\[A-Za-z]+")
_ONE_VARIABLE = re.compile(r"[A-Za-z]")
_PROSE = re.compile(r"(?<![\\A-Za-z{])(?!sqrt)[A-Za-z]{4,}")
_PARSE_CONFIG = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]

# Thousands may be grouped by commas or spaces; 1 1/2 is a mixed number.
_NUMBER = (
    r"[-+]?(?:\d+ +\d+ */ *\d+"
    r"|(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d{1,2}| */ *\d+)?|\.\d+(?:e[-+]?\d{1,2})?)"
)
_INTEGER = re.compile(r"[-+]?\d{1,100}")
# 0.1\overline{6}: sign and whole part, digits, repeated digits.
_REPEATING = re.compile(r"([-+]?)(\d{0,20})\.(\d{0,20})\\overline\{(\d{1,20})\}")
_SCALED = re.compile(rf"({_NUMBER})({SCALE})?", re.I)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_TEXT = re.compile(r"\\(?:text\w*|math(?:rm|bf|sf|it|tt)|boldsymbol|bm|mbox|operatorname)\s*\{([^{}]*)\}")
# `3^{rd}`, `4^{\text{th}}`: an ordinal number, and no power.
_ORDINAL_END = r"(?:st|nd|rd|th)"
_ORDINAL = re.compile(
    rf"(?<=\d)\s*\^\s*(?:({_ORDINAL_END})\b|\{{\s*({_ORDINAL_END})\s*\}}"
    rf"|\{{?\s*\\(?:text\w*|mathrm|mathbf|mathit|mbox)\s*\{{\s*({_ORDINAL_END})\s*\}}\s*\}}?)"
)
_NO_MEANING = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\!|\\\$|[$€£¥₹₩]|\\?%|\^\{?\\circ\}?|\\circ|°|\\degree|\\[()\[\]]|\\displaystyle"
)
_MINUS_ZH = re.compile(r"负\s*(?=\d)")
_QUOTED = re.compile(r"(?:``|[\"'“‘])([^\"'“‘”’`]+)(?:''|[\"'”’])")
_BLACKBOARD = re.compile(r"\\mathbb\s*([A-Z])")
# `6.02 \times 10^{23}`: exact for all exponents, where algebra rounds.
_POWER_OF_TEN = re.compile(
    r"(?<![\d.^_])(\d{1,30}(?:\.\d{1,30})?)\s*[*x]\s*10\s*\^\s*\{?\s*([-+]?\d{1,2})\s*\}?(?![\d.^!*/])"
)
_ONE_POWER = re.compile(r"([-+]?)10\s*\^\s*\{?\s*([-+]?\d{1,2})\s*\}?")
# Between the rows of a matrix. The space behind it is none of the commands for spaces, which begin with `\\` too.
_ROW_END = re.compile(r"\\\\(?:\[-?[\d.]+ ?[a-z]{2}\])?")
_REPLACED = (
    ("{,}", ","), (",\\!", ","), ("−", "-"), ("–", "-"), ("×", "*"), ("\\times", "*"), ("\\cdot", "*"), ("·", "*"),
    ("÷", "/"), ("π", "\\pi "), ("∞", "\\infty "), ("≤", "\\le "), ("≥", "\\ge "), (">=", "\\ge "), ("<=", "\\le "),
    ("**", "^"), ("－", "-"), ("＋", "+"), ("（", "("), ("）", ")"), ("％", "%"), ("＝", "="), ("，", ","),
    ("\\varnothing", "\\emptyset"), ("±", "\\pm "),
)  # fmt: skip
_POWER = re.compile(rf"[{SUPERSCRIPTS}]+")
_RAISED = str.maketrans(SUPERSCRIPTS, "0123456789+-n")
# Words after a number that are its unit (`18 dollars`, `5 km/h`, `12 cm^2`), not a part of its value.
_UNIT_WORD = (
    rf"(?!(?:and|or|to|plus|minus|times|over|half|{'|'.join(SCALES)})\b)"
    r"(?:[^\W\d_]{2,}\b\.?|[mgslhLVWNJKCF]\b)(?: ?\^ ?\{?[23]\}?)?"
)
# Behind a formula: `2\sqrt{3}\text{ square inches}`.
_TEXT_UNIT = re.compile(
    rf"(?<=[\w)}}\]])\s*\\(?:text|mathrm|mbox)\s*\{{\s*(?!(?:not|no|more|less|squared|cubed)\b){_UNIT_WORD}"
    rf"(?:[\s/-]+{_UNIT_WORD}){{0,3}}\s*\}}(?: ?\^ ?\{{?[23]\}}?)?$"
)
# Units in Chinese, Japanese or Korean (`12个`, `3千克`), without the words that multiply a number.
_CJK_UNIT = r"(?:(?:(?![十百千万亿萬億半만억])[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]|千(?=[米克瓦卡]))+)"
_WITH_UNIT = re.compile(
    rf"({_NUMBER}(?:{SCALE})?)(?:(?<=\d)(?:[ckm]?m|[km]?g|ml|l|in|ft|lbs?|oz|mph|hrs?|h|mins?|s|st|nd|rd|th|am|pm|[CF])\b(?:\^[23])?"
    rf"|\s*{_CJK_UNIT}(?:/{_CJK_UNIT})?|\s+{_UNIT_WORD}(?:[\s/-]+{_UNIT_WORD})*)",
    re.I,
)
# What may stand left of `=` for the answer to be right of it: a name (`x`, `f(x)`, `\angle A`), or numbers (`5 + 3`).
_NAME_OR_SUM = re.compile(r"[^\d,;<>!+*/^-]*(?:\(\w+\)|\d+|_\{?\w+\}?)?|[^A-Za-z;<>!]*")
# Solutions of one equation (`x = 2 or x = 3`, `x_1 = 2, x_2 = 3`), and what stands between them.
_SOLUTION = re.compile(r"([A-Za-z])(?:_\{?\w+\}?)?\s*=([^=]+)")
_JOINT = re.compile(r"(?:\s|\\q?quad)*(?:,\s*(?:and\b|or\b)?|\b(?:and|or)\b)(?:\s|\\q?quad)*")
# `(x, y) = …`; in another order than that of the alphabet the numbers mean something else.
_NAMES = re.compile(r"\(\s*\\?[A-Za-z]+(?:\s*,\s*\\?[A-Za-z]+)+\s*\)")
_SPHERICAL = ["\\rho", "\\theta", "\\phi"]
_TIME = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")
_RATIO = re.compile(r"(\d{1,30})(?:(?: ?: ?| to )\d{1,30})+")
_WITH_BASE = re.compile(r"\(?([0-9A-Za-z]{1,100})\)? ?_ ?\{? ?(\d{1,2}) ?\}?")
# Words in a formula that algebra would ignore: further answers, and what denies one.
_OTHER_ANSWER = re.compile(r"[\d,;]|\b(?:or|not|no|nor)\b", re.I)
_JOINT_WORD = re.compile(r",?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}")
_SEVERAL = re.compile(r"[,;<>]|\b(?:or|and)\b|\\(?:text|le|ge)")


def math_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **data: Any
) -> float:
    """1.0 if the completion's final answer equals `answer`, else 0.0."""
    found = final_answer(completion)
    return float(found is not None and answers_equal(found, str(answer)))


def answers_equal(given: str, expected: str) -> bool:
    """Whether two answers are equal as numbers, as text, or by algebra. Nothing equals an empty answer."""
    sides = given, expected
    given, expected = _clean(given), _clean(expected)
    if not given or not expected:
        return False
    if (same_measure := measures_equal(given, expected)) is not None:
        return same_measure
    if all(map(_RATIO.fullmatch, (given, expected))):
        return _ratios_equal(given, expected)
    bases = _WITH_BASE.fullmatch(given.lower()), _WITH_BASE.fullmatch(expected.lower())
    if bases[0] and bases[1]:
        a, b = bases[0].groups(), bases[1].groups()
        return a == b or _in_base(*a) == _in_base(*b) is not None
    a, b = _value(given), _value(expected)
    is_same_text = _letters(given) == _letters(expected)
    if a is not None and b is not None:
        # A name or a unit on one side only is ignored; 5 cm is not 5 m.
        is_plain = _plain_number(given) is not None or _plain_number(expected) is not None
        return _numbers_equal(a, b, given + expected) if is_plain else is_same_text
    if is_same_text:
        return True
    left = _tidy(sides[0]) if a is None else _as_latex(a)
    right = _tidy(sides[1]) if b is None else _as_latex(b)
    if ("=" in left) != ("=" in right):
        left, right = _without_name(left), _without_name(right)
    return left is not None and right is not None and _equal_by_algebra(_both_signs(left), _both_signs(right))


def _ratios_equal(given: str, expected: str) -> bool:
    """Compare `6:2`, `3:1` and `3 to 1`.

    Only the first two may have a common factor: `2 to 4` may be a range.
    """
    a, b = (list(map(int, re.findall(r"\d+", text))) for text in (given, expected))
    is_proportion = all(":" in text and not _TIME.fullmatch(text) for text in (given, expected))
    if is_proportion and gcd(*a) and gcd(*b):
        a, b = [part // gcd(*a) for part in a], [part // gcd(*b) for part in b]
    return a == b


def _in_base(digits: str, base: str) -> int | None:
    """Return the number that has these digits in this base; None if there is none."""
    try:
        return int(digits, int(base)) if int(base) > 1 else None
    except ValueError:
        return None


def _both_signs(formula: str) -> str:
    r"""Return both values of a formula with `\pm`, which algebra reads only between terms."""
    if formula.count("\\pm") != 1 or any(sign in formula for sign in ("=", ",", "&", "\\mp")):
        return formula
    return ", ".join(formula.replace("\\pm", sign) for sign in "+-")


def first_equal(answers: list[str]) -> int:
    """Return the index of the first answer that equals the last one. A model has written all of them."""
    last = answers[-1]
    # `answers_equal` trusts its second argument.
    return next(
        i for i, a in enumerate(answers) if a == last or (not _is_too_large(_tidy(a)) and answers_equal(last, a))
    )


def parse_number(text: str) -> Fraction | None:
    r"""Read `1,234.50`, `-3/4`, `1\frac{1}{2}`, `$7`, `50%` (as 50) or `5 thousand`; None for other text."""
    return _plain_number(_clean(text))


def _plain_number(cleaned: str) -> Fraction | None:
    if _INTEGER.fullmatch(cleaned):
        return Fraction(int(cleaned))
    if repeating := _REPEATING.fullmatch(cleaned):
        sign, whole, digits, period = repeating.groups()
        behind = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(digits)
        value = Fraction(f"{whole or 0}.{digits or 0}") + behind
        return -value if sign == "-" else value
    match = _SCALED.fullmatch(re.sub(r"^([-+]) +", r"\1", cleaned)) if len(cleaned) <= 100 else None
    if match is None:
        return None
    number = re.sub(r"(?<=\d) (?=\d{3}(?!\d| *\/))|,", "", match[1])
    whole, space, part = re.sub(r" */ *", "/", number).rpartition(" ")
    try:
        value = Fraction(part)
        if space:
            value = Fraction(whole) + value * (-1 if whole.startswith("-") else 1)
    except (ValueError, ZeroDivisionError):
        return None
    for scale in (match[2] or "").lower().split():
        value *= SCALES[scale]
    return value


def _value(cleaned: str) -> Fraction | None:
    """Return the number in `x = 18`, `5 + 3 = 8` or `18 dollars`; None for equations to solve and lists."""
    number = _plain_number(cleaned)
    if number is not None:
        return number
    right = _without_name(cleaned)
    if right is None:
        return None
    with_unit = _WITH_UNIT.fullmatch(right)
    return _plain_number(with_unit[1] if with_unit else right)


def _without_name(cleaned: str) -> str | None:
    """Return the right side of `x = …` or `5 + 3 = …`; None if the left is neither a name nor a sum.

    Of several solutions for one name, return the list of their right sides.
    """
    solutions = [_SOLUTION.fullmatch(part) for part in _JOINT.split(_TEXT.sub(r" \1 ", cleaned).strip())]
    names = {found and found[1] for found in solutions}
    if len(solutions) > 1 and len(names) == 1 and None not in names:
        return ", ".join(found[2].strip() for found in solutions if found)
    *left, right = cleaned.split("=")
    if len(left) == 1 and _NAMES.fullmatch(left[0].strip()) and right.strip().startswith("("):
        names = re.findall(r"\\?[A-Za-z]+", left[0])
        return right.strip() if names == _SPHERICAL or names == sorted(names, key=lambda n: n.strip("\\")) else None
    if left and (not _NAME_OR_SUM.fullmatch(left[0].strip()) or any(_SEVERAL.search(part) for part in left)):
        return None
    return right.strip()


def _numbers_equal(a: Fraction, b: Fraction, texts: str) -> bool:
    """Compare exactly, or if a decimal is involved rounded to six places, so that 0.333333 is 1/3.

    Small numbers must also have three digits in common: 0.0000124 is not 0.000012.
    """
    return a == b or ("." in texts and round(a, 6) == round(b, 6) != 0 and abs(a - b) <= abs(b) / 1000)


def _tidy(text: str) -> str:
    """`text` with one spelling for each sign, and without signs that have no meaning here."""
    text = text.strip("* \t\r\n").translate(FRACTIONS)
    for old, new in _REPLACED:
        text = text.replace(old, new)
    text = _BLACKBOARD.sub(r"\\mathbb{\1}", _MINUS_ZH.sub("-", _POWER.sub(_power, text)))
    text = _ORDINAL.sub(lambda found: "".join(filter(None, found.groups())), text)
    rows = (re.sub(r"\\[,;: ]|\s+|~", " ", _NO_MEANING.sub("", row)).strip() for row in _ROW_END.split(text))
    text = r"\\".join(rows).rstrip(".,;: ")
    return re.sub(r"^(?:\\approx|approximately|about)\s*", "", text)


def _power(found: re.Match[str]) -> str:
    """Return `^6` for ⁶ and `^{10}` for ¹⁰."""
    digits = found.group().translate(_RAISED)
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def _clean(text: str) -> str:
    r"""`_tidy(text)` without typesetting: `\text{X}` is X, `\frac{1}{2}` is 1/2, `{,}` is a comma."""
    if _INTEGER.fullmatch(text):
        return text
    text = _FRACTION.sub(r" \1\2/\3\4 ", _TEXT.sub(r" \1 ", _tidy(text)))
    text = _QUOTED.sub(r"\1", re.sub(r"\s+", " ", text).strip())
    text = _ONE_POWER.sub(r"\g<1>1e\2", text) if _ONE_POWER.fullmatch(text) else _POWER_OF_TEN.sub(r"\1e\2", text)
    single = re.fullmatch(r"\(([A-Za-z])\)|\{([^{}]*)\}", text)
    return (single[1] or single[2] or "").strip() if single else text


def _letters(cleaned: str) -> str:
    """`cleaned` in lower case without spaces, but those between digits, and braces around a digit."""
    return re.sub(r"(?<=[_^])\{(\d)\}", r"\1", re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", cleaned)).lower()


def _as_latex(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else f"\\frac{{{number.numerator}}}{{{number.denominator}}}"


def _equal_by_algebra(given: str, expected: str) -> bool:
    if (
        max(len(given), len(expected)) > _MAX_FORMULA
        or _PROSE.search(_TEXT_UNIT.sub("", given))
        or _is_too_large(given)
    ):
        return False
    if any(map(_OTHER_ANSWER.search, _TEXT.findall(_JOINT_WORD.sub(",", given)))):
        return False
    parsed = _parse(_TEXT_UNIT.sub("", expected)), _parse(_TEXT_UNIT.sub("", given))
    return bool(math_verify.verify(*parsed, timeout_seconds=0)) or _same_equation(*(each[0] for each in parsed if each))


def _same_equation(*equations: Any) -> bool:
    """Whether equations of polynomials are multiples: `2x^2 + 2y^2 = 8`, `x^2 + y^2 - 4 = 0`."""
    if len(equations) != 2 or not all(isinstance(each, sympy.Eq) for each in equations):
        return False
    zeros = [sympy.expand(each.lhs - each.rhs) for each in equations]
    if any(zero.is_number or not zero.is_polynomial() for zero in zeros):
        return False
    return bool(sympy.cancel(zeros[0] / zeros[1]).is_number)


def _is_too_large(formula: str) -> bool:
    """Whether algebra on a formula could take minutes. The expected answer is trusted."""
    if _TOO_LARGE.search(formula):
        return True
    variables = set(_ONE_VARIABLE.findall(_COMMAND.sub(" ", formula)))
    powers = list(map(int, _POWER_OF_SUM.findall(formula)))
    # The terms of a product of sums, each of which has all variables.
    factors = formula.count(")") + sum(power - 1 for power in powers)
    terms = comb(factors + len(variables), len(variables))
    if not variables:
        return prod(powers) > _MAX_POWER
    return prod(powers) > _MAX_EXPANSION or (len(variables) > 1 and terms > _MAX_TERMS)


@lru_cache(maxsize=1024)
def _parse(formula: str) -> list[Any]:
    formula = re.sub(r"sqrt\s*\(([^()]*)\)|√\s*(\d+|\([^()]*\))", r"\\sqrt{\1\2}", formula)
    formula = re.sub(r",?\s+(?:and|or)\s+", ", ", _JOINT_WORD.sub(", ", formula))
    return math_verify.parse(f"\\boxed{{{formula}}}", _PARSE_CONFIG, parsing_timeout=0)


def _load_algebra() -> None:
    """Compare formulas: the parser and sympy load half a second of code at their first use."""
    for given, expected in ((r"\frac{1}{2}", "x+1"), ("(1,2)", "(2,1)"), (r"\sqrt{2}", "1.41")):
        _equal_by_algebra(given, expected)


prepare_workers(_load_algebra)
