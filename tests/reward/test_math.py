"""Finding and comparing final answers."""

import pytest

from arealite.api.errors import DatasetError
from arealite.reward.gsm8k import gsm8k_reward
from arealite.reward.math import answers_equal, final_answer, math_reward


@pytest.mark.parametrize(
    "text, answer",
    [
        ("so \\boxed{12}", "12"),
        ("first \\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("nested \\boxed{a_{b_{c}}}", "a_{b_{c}}"),
        ("not closed \\boxed{12", "12"),
        ("48/2 = <<48/2=24>>24\n#### 1,072", "1,072"),
        ("The answer is $18.50.", "18.50"),
        ("3 apples and 4 pears, so 7.", "7"),
        ("no number", None),
        ("", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "a, b, equal",
    [
        ("1,072", "1072", True),
        ("0.5", "\\frac{1}{2}", True),
        ("\\dfrac{3}{6}", "1/2", True),
        ("$18.50", "18.5", True),
        ("-7", "7", False),
        ("50%", "50", True),
        ("x + 1", "x+1", True),
        ("\\left(1, 2\\right)", "(1,2)", True),
        ("1/0", "1/0", True),
        ("", "0", False),
        ("__import__('os')", "0", False),
    ],
)
def test_answers_equal(a, b, equal):
    assert answers_equal(a, b) is equal


def test_rewards():
    common = {"prompt": "", "prompt_ids": [], "completion_ids": []}
    assert gsm8k_reward(completion="\\boxed{24}", answer="48/2=24\n#### 24", **common) == 1.0
    assert gsm8k_reward(completion="it is 25", answer="#### 24", **common) == 0.0
    assert math_reward(completion="\\boxed{\\frac{2}{4}}", answer="0.5", **common) == 1.0
    assert math_reward(completion="", answer="0.5", **common) == 0.0
    with pytest.raises(DatasetError, match="column `answer`"):
        gsm8k_reward(completion="1", **common)
