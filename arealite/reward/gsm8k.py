"""Reward for GSM8K: compares the final answer with the number after `####` in the dataset."""

import re
from typing import Any

from arealite.api.errors import DatasetError
from arealite.reward.math import answers_equal, final_answer

_OPERATOR = re.compile(r"\d[\s)}]*(?:[-+*^×·÷−]|\\times|\\cdot|\\div)[\s({$]*\d")
_DIVISION = re.compile(r"\d[\s)}]*/[\s({$]*\d|frac")


def gsm8k_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **data: Any
) -> float:
    """Return 1.0 if right, else 0.0. `answer` is the dataset's column, with or without the worked steps.

    An answer is a number: `\\boxed{6 * 7}`, which leaves the work to whoever reads it, is wrong.
    """
    expected = str(answer).rsplit("####", 1)[-1].strip()
    if not expected:
        raise DatasetError("gsm8k_reward needs the column `answer`, ending in `#### number`")
    found = final_answer(completion)
    if found is None or _is_unfinished(found.rpartition("=")[2], expected):
        return 0.0
    return float(answers_equal(found, expected))


def _is_unfinished(given: str, expected: str) -> bool:
    """Whether an answer still has to be computed. A fraction is a number unless a whole one is expected."""
    is_whole = expected.replace(",", "").lstrip("-").isdigit()
    return _OPERATOR.search(given) is not None or (is_whole and _DIVISION.search(given) is not None)
