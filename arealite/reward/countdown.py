"""Reward for countdown: an expression of given numbers, each used once, that equals a target.

The expression is parsed and evaluated with exact fractions; it is never run as code.
"""

import ast
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from arealite.reward.extraction import behind_thinking, last_boxed, last_tagged

_ALLOWED = re.compile(r"[0-9+\-*/() ]{1,200}")
_REPLACED = (
    ("×", "*"), ("·", "*"), ("\\times", "*"), ("\\cdot", "*"), ("÷", "/"), ("\\div", "/"), ("−", "-"),
    ("\\left", ""), ("\\right", ""),
)  # fmt: skip
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
# Fractions in fractions are read this deep.
_MAX_DEPTH = 4


def countdown_reward(
    prompt: str, completion: str, *ids: Any, numbers: Sequence[int], target: int, **data: Any
) -> float:
    """Return 1.0 if the last `<answer>` (else the last box, else the last line) solves the row, else 0.0."""
    return float(solves(find_expression(completion), numbers, target))


def find_expression(completion: str) -> str:
    """Return the expression that a completion gives as its answer; what follows `=` is left out."""
    completion = behind_thinking(completion)
    answer = last_tagged(completion)
    if answer is None:
        answer = last_boxed(completion) or (completion.strip().splitlines() or [""])[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for _ in range(_MAX_DEPTH):
        answer = _FRACTION.sub(r"((\1)/(\2))", answer)
    return answer.split("=")[0].strip(" .$\n\t")


def solves(expression: str, numbers: Sequence[int], target: int) -> bool:
    """Whether an expression uses each of the numbers exactly once and equals the target."""
    if not _ALLOWED.fullmatch(expression) or "**" in expression or "//" in expression:
        return False
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        used: Counter[int] = Counter()
        return _evaluate(tree, used) == target and used == Counter(numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return False


def _evaluate(node: ast.expr, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, used)
    if not isinstance(node, ast.BinOp):
        raise ValueError("only numbers, + - * / and parentheses are allowed")
    left, right = _evaluate(node.left, used), _evaluate(node.right, used)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case _:
            raise ValueError("only + - * / are allowed")
