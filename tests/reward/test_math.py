"""Finding and comparing final answers."""

from concurrent.futures import ThreadPoolExecutor

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


def reward(completion: str, answer: str) -> float:
    return math_reward("", completion, [], [], answer=answer)


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("\\boxed{\\text{yes}}", "\\text{yes}"),
        ("\\boxed{\\text{(B)}}", "(B)"),
        ("\\boxed{1\\frac{1}{2}}", "1.5"),
        ("\\boxed{-1\\frac12}", "-3/2"),
        ("\\boxed{1 1/2}", "1.5"),
        ("\\boxed{70{,}000}", "70,000"),
        ("\\boxed{70\\,000}", "70000"),
        ("\\boxed{−5}", "-5"),
        ("\\boxed{18 dollars}", "18"),
        ("\\boxed{\\text{18 dollars}}", "18"),
        ("\\boxed{12\\text{ m}^2}", "12"),
        ("\\boxed{60 miles per hour}", "60"),
        ("\\boxed{€12}", "12"),
        ("\\boxed{x=18}", "18"),
        ("\\boxed{5 \\times 3 = 15}", "15"),
        ("\\boxed{0 apples}", "0"),
        ("She has 1{,}000 apples.", "1000"),
        ("The final answer is $\\frac{3}{4}$.", "3/4"),
        ("The answer is $1\\frac{1}{2}$ cups.", "1.5"),
        ("The answer is 5 + 3 = 8", "8"),
        ("The answer is 5 apples + 3 apples = 8 apples.", "8"),
        ("The answer is 12 when x = 3", "12"),
        ("The answer is 18 because 20 - 2 = 18", "18"),
        ("The answer is \\( 18 \\).", "18"),
        ("The answer is $2\\sqrt{3}$.", "2\\sqrt{3}"),
        ("The answer is $2x + 3$.", "2x+3"),
    ],
)
def test_right_answers_in_other_words(completion, answer):
    assert reward(completion, answer) == 1.0


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("\\boxed{\\text{no}}", "\\text{yes}"),
        ("\\boxed{\\text{(B)}}", "\\text{(A)}"),
        ("\\boxed{}", "\\text{Evelyn}"),
        ("\\boxed{\\text{}}", ""),
        ("\\boxed{1\\frac{1}{2}}", "5.5"),
        ("\\boxed{1 1/2}", "5.5"),
        ("\\boxed{18 20}", "1820"),
        ("\\boxed{18, 20}", "20"),
        ("\\boxed{18 or 20}", "18"),
        ("\\boxed{18-20}", "18"),
        ("\\boxed{18 apples and 20 pears}", "18"),
        ("\\boxed{x=18, y=20}", "20"),
        ("\\boxed{x=18 or x=20}", "20"),
        ("\\boxed{2x = 18}", "18"),
        ("\\boxed{x >= 18}", "18"),
        ("\\boxed{18x}", "18"),
        ("\\boxed{m^2}", "2"),
        ("\\boxed{5 cm}", "5 m"),
        ("\\boxed{3 million}", "3"),
        ("\\boxed{3 and a half}", "3"),
        ("\\boxed{50%}", "0.5"),
        ("\\boxed{1.000}", "1,000"),
        ("\\boxed{1,2}", "12"),
        ("The answer is 18 or 20", "18"),
        ("The answer is 18-20", "18"),
        ("The answer is 5 + 3", "5"),
        ("The answer is $\\sqrt{2}$", "2"),
        ("The answer is $3\\pi$", "3"),
        ("The answer is $2^{10}$", "2"),
    ],
)
def test_wrong_answers_stay_wrong(completion, answer):
    assert reward(completion, answer) == 0.0


def test_expressions_are_compared_by_algebra_in_any_thread():
    pytest.importorskip("math_verify")
    with ThreadPoolExecutor(1) as threads:
        for run in (reward, lambda *args: threads.submit(reward, *args).result(60)):
            assert run("\\boxed{(x+1)^2}", "x^2+2x+1") == 1.0
            assert run("\\boxed{(x+1)^2}", "x^2+1") == 0.0
