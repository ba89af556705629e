"""Rewards of countdown, short answers and reasoning-gym."""

import pytest

from arealite.reward.countdown import countdown_reward, find_expression, solves
from arealite.reward.qa import qa_reward
from arealite.reward.reasoning import find_answer, reasoning_gym_reward


@pytest.mark.parametrize(
    ("expression", "right"),
    [
        ("(3 + 4) * 5", True),
        ("5*(4+3)", True),
        ("5 * 7", False),
        ("3 + 4 * 5", False),
        ("(3 + 4) * 5 * 5 / 5", False),
        ("35", False),
        ("-(3 + 4) * -5", True),
        ("3**4", False),
        ("(3 + 4) // 5", False),
        ("3 / (4 - 4)", False),
        ("__import__('os')", False),
        ("(" * 100 + "3", False),
        ("9" * 10_000, False),
        ("", False),
    ],
)
def test_an_expression_uses_every_number_once(expression, right):
    assert solves(expression, [3, 4, 5], 35) is right


@pytest.mark.parametrize(
    "completion",
    ["So <answer>1+1</answer>, no: <answer>2 × 3 = 6</answer>", "It is \\boxed{2 \\times 3}", "Let me see.\n2*3."],
)
def test_the_last_answer_counts(completion):
    assert find_expression(completion) in ("2 * 3", "2*3")
    assert countdown_reward("", completion, [], [], numbers=[3, 2], target=6) == 1.0


@pytest.mark.parametrize(
    "answer",
    [r"2 \cdot \left(3 + 4\right)", r"\frac{2}{1} \times (3 + 4)", r"\dfrac{2 \times \frac{3}{1}}{1} + 4 \times 2"],
)
def test_formulas_in_latex_are_read(answer):
    numbers = list(map(int, filter(str.isdigit, answer)))
    assert countdown_reward("", f"\\boxed{{{answer}}}", numbers=numbers, target=14) == 1.0
    assert countdown_reward("", f"\\boxed{{{answer}}}", numbers=[9, *numbers], target=14) == 0.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<answer>The Beatles!</answer>", 1.0),
        ("I think so.\nThe answer is beatles.", 1.0),
        ("beatles", 1.0),
        ("<answer>Fab four</answer>", 1.0),
        ("<answer>beatles and stones</answer>", 0.0),
        ("", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
def test_short_answers_are_compared_after_normalization(completion, reward):
    assert qa_reward("", completion, [], [], answer=["the Beatles", "the fab four"]) == reward


def test_reasoning_gym_gives_no_partial_credit():
    pytest.importorskip("reasoning_gym")
    entry = {"answer": "12", "metadata": {"source_dataset": "gcd", "result": 12}}
    for completion in ("<answer>12</answer>", " 12\n\nQuestion: What", "so \\boxed{12}"):
        assert find_answer(completion) == "12"
        assert reasoning_gym_reward("", completion, [], [], entry=entry) == 1.0
    assert reasoning_gym_reward("", "13", [], [], entry=entry) == 0.0
    assert reasoning_gym_reward("", "about 12 or so", [], [], entry=entry) == 0.0
    assert 0 < reasoning_gym_reward("", "about 12 or so", [], [], entry=entry, threshold=None) < 0.9
