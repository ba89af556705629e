"""Reward for GSM8K: compares the final answer with the number after `####` in the dataset."""

from typing import Any

from arealite.api.errors import DatasetError
from arealite.reward.math import math_reward


def gsm8k_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: str = "", **data: Any
) -> float:
    """Return 1.0 if right, else 0.0. `answer` is the dataset's column, with or without the worked steps."""
    expected = str(answer).rsplit("####", 1)[-1].strip()
    if not expected:
        raise DatasetError("gsm8k_reward needs the column `answer`, ending in `#### number`")
    return math_reward(prompt, completion, prompt_ids, completion_ids, expected)
