"""Rewards for choices, words, form and length, and sums of rewards."""

import asyncio
import importlib.util
import math
import pickle

import pytest

from arealite.api.errors import ConfigError, DatasetError, RewardError
from arealite.api.reward_api import check_columns
from arealite.reward.choice import choice_reward
from arealite.reward.combined import AsyncCombinedReward, CombinedReward
from arealite.reward.format import PatternReward, TagsReward, think_answer_reward
from arealite.reward.length import CosineReward, OverlongPenalty
from arealite.reward.math import math_reward
from arealite.reward.pool import RewardPool
from arealite.reward.qa import f1_reward, qa_reward
from arealite.trainer import tasks
from tests.reward import sample_rewards

CITIES = ["Paris", "The Hague", "Berlin", "A village"]


@pytest.mark.parametrize(
    "completion, chosen",
    [
        ("B", "B"), ("b", "B"), ("(B)", "B"), ("B.", "B"), ("**B**", "B"), ("B) The Hague", "B"), ("B: it is", "B"),
        ("I think so.\nThe answer is B.", "B"), ("Answer: (C)", "C"), ("the answer is **C**", "C"),
        (r"so \boxed{D}", "D"), (r"\boxed{\text{B}}", "B"), (r"\boxed{\textbf{(C)}}", "C"),
        ("<answer> B </answer>", "B"),
        ("<answer>the hague</answer>", "B"), ("Hague", "B"), ("Option C", "C"), ("A village", "D"), ("A", "A"),
        ("<answer>A</answer> no, <answer>B</answer>", "B"), ("The answer is A. No: the answer is C", "C"),
        ("A cat sat there", None), ("E", None), ("", None), ("\n\n", None), ("Both A and B are right", None),
        ("Because", None), ("B" * 10**7, None), ("\ud800", None), ("The answer isn't A", None),
        ("The correct option is (C).", "C"), ("The answer is Berlin.", "C"), ("So the answer is a village", "D"),
        ("not B, but C", "C"), ("The answer is not B but (C).", "C"), ("It is not A; the answer is C", "C"),
        ("B is wrong, so C", "C"), ("the answer B is wrong, so C", "C"), ("The answer isn't A, it's C.", "C"),
        ("The answer is neither A nor B, but option C", "C"), (r"\boxed{\text{not B, but C}}", "C"), ("C, not B", "C"),
        ("<answer>B is incorrect. It must be C</answer>", "C"), ("Answer C, since answer B is wrong", "C"),
        ("The answer cannot be A, so it is C", "C"), ("Answer B is incorrect.", None), ("Not B", None),
        ("The answer is not a cat, but it is B", "B"), ("The answer is B. A is wrong.", "B"),
        ("not A but " * 999, None), ("The answer must be C", "C"), ("the answer is clearly C.", "C"),
        ("The answer is a cat", None), ("正确答案是C。", "C"), ("The answer is B, as Berlin is not it.", "B"),
        ("答案不是B，而是C", "C"), ("答案不是 B 而是 (C)。", "C"), ("答案并不是B，应该是C。", "C"),
        ("答案不选选项B，选C", "C"), ("答案不是A，也不是B，而是D", "D"), ("答案不可能是A或B，所以答案为C", "C"),
        ("答案：B不对，应该选C", "C"), ("答案不是B", None), ("答案应该是C，不是B", "C"), ("答案是C而非B", "C"),
        ("<answer>C，不是B</answer>", "C"), (r"\boxed{不是B，而是C}", "C"), ("答案非常清楚", None),
        ("答案不是A，也" * 300, None), ("<answer>C。</answer>", "C"), ("故选B。", "B"), ("A不对，故选：C。", "C"),
        ("因此选择B", "B"), ("所以，选 D。", "D"), ("选B", "B"), ("不应该选B", None), ("故选项B", None),
        ("so option B is the correct answer.", "B"), ("Therefore, **C** is correct.", "C"),
        ("Neither A nor B is right", None), ("选项B", None),
        ("A is right.\nB is right.\nC is wrong, so\nD", "D"), ("If option B is correct, I am lost", None),
        ("Option B is not correct", None), ("The reason why (B) must be the right choice", "B"), ("a is correct", None),
    ],
)  # fmt: skip
def test_choices(completion, chosen):
    for letter in "ABCD":
        assert choice_reward(completion=completion, answer=letter, choices=CITIES) == float(letter == chosen)


def test_the_right_choice_may_be_a_text():
    assert choice_reward(completion="D", answer="a village", choices=CITIES) == 1.0
    assert choice_reward(completion="Answer: G", answer="G") == 1.0
    with pytest.raises(DatasetError, match="neither a letter nor one of its choices"):
        choice_reward(completion="D", answer="Rome", choices=CITIES)


def test_words_in_common():
    def f1(completion, answer):
        return f1_reward("", completion, [], [], answer=answer)

    assert f1("<answer>The Eiffel tower!</answer>", "Eiffel Tower") == 1.0
    assert f1("so\nblue whale", ["whale", "dolphin"]) == pytest.approx(2 / 3)
    assert f1("", "x") == f1("y", "x") == f1("y", []) == 0.0
    assert f1("y " * 10**6, "y") < 0.01
    assert f1("<answer>" * 10**6 + "y", "y") == f1("<answer>z</answer>" * 10**5, "y") == 0.0
    assert qa_reward("", "The answer is “Saint Denis”.", [], [], answer="saint denis") == 1.0
    assert qa_reward("", "The answer is 北京。", [], [], answer="北京") == 1.0
    for answer in (1945, ["the year 45", 1945]):
        assert qa_reward("", "The answer is 1945.", [], [], answer=answer) == 1.0
        assert f1_reward("", "The answer is 1945.", [], [], answer=answer) == 1.0
    for completion in (r"so \boxed{\text{Saint Denis}}", r"<answer>\textbf{Saint Denis}</answer>"):
        assert qa_reward("", completion, [], [], answer="saint denis") == 1.0
    assert qa_reward("", "<answer>y</answer> or <answer>z</answer>", [], [], answer="z") == 1.0


@pytest.mark.parametrize(
    "completion, expected",
    [
        ("<think>a</think><answer>b</answer>", 1.0), (" <think>a\n</think>\n <answer>b</answer>\n", 1.0),
        ("x<think>a</think><answer>b</answer>", 0.0), ("<think>a</think>x<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>x", 0.0), ("<think>a<answer>b</think></answer>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0), ("<think>a</think>", 0.0), ("", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0), ("<think>" * 10**6, 0.0),
    ],
)  # fmt: skip
def test_tags(completion, expected):
    assert think_answer_reward(completion=completion) == expected


def test_other_forms():
    assert TagsReward(partial=True)(completion="<think>a</think><answer>b") == 0.75
    assert TagsReward(["plan"], is_prefix_free=False)(completion="So: <plan>a</plan>") == 1.0
    assert PatternReward(r".*\d+")(completion="it\nis 5") == 1.0
    assert PatternReward(r"\d+")(completion="it is 5") == 0.0
    assert PatternReward(r"\d+", anywhere=True)(completion="it is 5") == 1.0


def test_long_answers_lose():
    penalty = OverlongPenalty(max_tokens=100, buffer_tokens=20)
    assert [penalty(completion_ids=[1] * n) for n in (0, 80, 85, 90, 100, 1000)] == [0, 0, -0.25, -0.5, -1, -1]
    with pytest.raises(ConfigError, match="buffer_tokens must be"):
        OverlongPenalty(10, 20)


def test_the_cosine_schedule():
    reward = CosineReward(math_reward, max_tokens=100, right=(2.0, 1.0), wrong=(-1.0, 0.0), too_long=-5.0)

    def score(text, length):
        return reward("", text, [], [1] * length, answer="4")["reward"]

    assert (
        score("4", 0) == 2.0 and score("4", 50) == pytest.approx(1.5) and score("4", 99) == pytest.approx(1.0, abs=0.01)
    )
    assert score("5", 0) == -1.0 and score("5", 50) == pytest.approx(-0.5)
    assert score("4", 100) == score("5", 200) == -5.0
    assert reward("", "4", [], [], answer="4")["unscaled"] == 1.0


def test_a_weighted_sum_shows_its_parts():
    reward = CombinedReward(
        {"right": (1.0, math_reward), "form": (0.5, think_answer_reward), "own": (2.0, sample_rewards.in_parts)}
    )
    rows = [
        dict(prompt="", completion="<think>2+2</think><answer>4</answer>", prompt_ids=[], completion_ids=[], answer="4")
    ]
    pool = RewardPool(num_workers=1)
    try:
        (score,) = asyncio.run(pool.run(pickle.loads(pickle.dumps(reward)), rows))
    finally:
        pool.close()
    assert score == 1.0 + 0.5 + 2 * 1.5
    assert score.parts == {"right": 1.0, "form": 1.0, "own": 1.5, "own/length": 36.0, "own/format": 1.0}


def test_bad_parts_of_a_sum_are_named():
    with pytest.raises(RewardError, match="returns_nan returned nan"):
        CombinedReward({"a": (1.0, sample_rewards.returns_nan)})(completion="x")
    with pytest.raises(ConfigError, match="use AsyncCombinedReward"):
        CombinedReward({"a": (1.0, sample_rewards.remote_judge)})
    with pytest.raises(ConfigError, match="names other than `reward`"):
        CombinedReward({"reward": (1.0, math_reward)})
    with pytest.raises(ConfigError, match="names other than `reward`"):
        CombinedReward({})


def test_columns_that_a_part_misses_are_found_before_the_run():
    cosine = CosineReward(math_reward, max_tokens=100)
    for reward in (cosine, CombinedReward({"form": (0.5, TagsReward()), "right": (1.0, cosine)})):
        check_columns(reward, {"prompt": "1+1?", "answer": "2"})
        with pytest.raises(
            DatasetError, match="the reward math_reward needs 'answer', and a row has the columns prompt"
        ):
            check_columns(reward, {"prompt": "1+1?"})
    for column, fn in (("images", lambda images, **row: 1.0), ("messages", lambda messages, **row: 1.0)):
        with pytest.raises(DatasetError, match=f"needs '{column}', a column that the workflow reads and rewards"):
            check_columns(CombinedReward({"seen": (1.0, fn)}), {column: ["a"]})
    judged = AsyncCombinedReward({"short": (1.0, lambda completion: 1.0)})
    with pytest.raises(DatasetError, match=r"does not take 'prompt'.*end its parameters with"):
        check_columns(judged, {"prompt": "1+1?"})


def test_parts_may_be_awaited():
    reward = AsyncCombinedReward({"judge": (0.5, sample_rewards.remote_judge), "length": (1.0, sample_rewards.length)})
    (score,) = asyncio.run(RewardPool().run(reward, [dict(completion="abcd")]))
    assert (score, score.parts) == (6.0, {"judge": 4.0, "length": 4.0})
    assert math.isfinite(score)


HUGE = 10_000_000
ROW = {
    "answer": "2",
    "numbers": [1, 2, 3],
    "target": 6,
    "choices": ["2", "b", "c", "d"],
    "entry": {"question": "", "answer": "2", "metadata": {"source_dataset": "gcd"}},
    "threshold": 0.5,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["x" * HUGE, r"\boxed{" * (HUGE // 7), "<answer>" * (HUGE // 8), "1 " * (HUGE // 2), "\n" * HUGE, " " * HUGE,
     "\ud800\udc80\0\ufffd" * 99,
     "<answer>" + "(" * 100_000 + "</answer>", "<answer>9**9**9**9</answer>", r"\boxed{9^{9^{9^{9}}}}"],
    ids=["letters", "boxes", "tags", "numbers", "lines", "blanks", "no UTF-8", "nested", "tower", "boxed tower"],
)  # fmt: skip
def test_no_reward_by_name_hangs_or_raises_for_any_text(text):
    """`code` runs in a sandbox, with tests of its own."""
    for name, reward in tasks.REWARDS.items():
        if not name.startswith("code") and (name != "reasoning_gym" or importlib.util.find_spec("reasoning_gym")):
            score = reward(prompt="p", completion=text, prompt_ids=[1], completion_ids=[2], **ROW)
            assert 0.0 <= float(score) < 1.0, name
