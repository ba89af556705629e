"""Rewards read what stands behind `</think>`; only if nothing does, the thinking itself."""

import pytest

from arealite.reward.code import extract_code
from arealite.reward.countdown import countdown_reward
from arealite.reward.extraction import behind_thinking
from arealite.reward.gsm8k import gsm8k_reward
from arealite.reward.math import math_reward
from arealite.reward.qa import f1_reward, qa_reward
from arealite.reward.reasoning import find_answer


@pytest.mark.parametrize("thought", [r"\boxed{5}", "The answer is 5.", "<answer>5</answer>", "#### 5"])
@pytest.mark.parametrize("answer", ["6", r"\boxed{6}", "The answer is 6.", "<answer>6</answer>"])
def test_answers_stand_behind_the_thinking(thought, answer):
    completion = f"<think>\nSo {thought}\n</think>\n\n{answer}"
    for reward in (math_reward, gsm8k_reward, qa_reward, f1_reward):
        assert [reward("", completion, [], [], answer=each) for each in "56"] == [0.0, 1.0]
    assert find_answer(completion) in ("6", answer)
    # Nothing stands behind it: the answer ends with the thinking.
    assert math_reward("", f"<think>\n{thought}\n</think>\n", [], [], answer="5") == 1.0


def test_an_expression_stands_behind_the_thinking():
    for answer in ("2 * 3", r"\boxed{2 \times 3}", "<answer>2 * 3</answer>"):
        completion = f"<think>Not \\boxed{{2 + 3}} or <answer>2 - 3</answer></think>\n{answer}"
        assert countdown_reward("", completion, numbers=[2, 3], target=6) == 1.0


def test_code_stands_behind_the_thinking():
    assert extract_code("<think>```python\nx = 1\n``` or ```python\ny</think>\n```python\nz = 2\n```") == "z = 2\n"
    assert extract_code("<think>```python\nx = 1\n```</think>\nz = 2") == "\nz = 2"
    assert extract_code("<think>```python\nx = 1\n```\n</think>\n") == "x = 1\n"


def test_the_last_end_of_thinking_counts():
    assert behind_thinking("a</think>b</think>c") == "c"
    assert behind_thinking("a</think>b</think> \n") == "a</think>b</think> \n"
    assert behind_thinking("<think>a") == "<think>a"
