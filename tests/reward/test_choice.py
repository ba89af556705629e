"""Wordings of choices: what chooses a letter, and what chooses none."""

import pytest

from arealite.reward.choice import choice_reward

CITIES = ["Paris", "The Hague", "Berlin", "A village"]


def chosen(completion):
    return [letter for letter in "ABCD" if choice_reward(completion=completion, answer=letter, choices=CITIES)]


@pytest.mark.parametrize(
    "completion",
    [
        "I choose B", "I'd go with option B.", "I'm going with (B).", "My choice is B", "I select (B)", "Ans: (B)",
        "The answer is most likely B.", "The answer to the question is B.",
        "The answer has to be B", "B is the answer.",
        "The answer is the letter B.", "Therefore B", "So, B.", "I think it's B", "It must be B.", "That's B.", "B!",
        "B because it is by the sea", "B, since A is wrong", "Answer: 'B'", "$B$",
        r"\(\mathbf{B}\)", "# B", "- B", "→ B",
        "<answer>The answer is B</answer>", r"<answer>\boxed{B}</answer>", r"\boxed{Answer: B}",
        "B.\n\nExplanation: A is wrong because Paris is old.", "B\n\nParis is not it.", "Rule out A, C and D. So B.",
        "正确选项是B", "本题选B", "我选择B", "选项B是正确的", "B选项正确", "答案就是B", "正确的选项是B",
        "B，因为有法院",
        "【答案】B\n【解析】A错", "（B）", "答案是Ｂ", "A不正确，B正确",
        "The answer is B, A is wrong", "Answer: B, A and C are wrong", "B, not A or C",
        "The answer is B (A is too old)",
        "The answer is B because A or C would be wrong", "The answer is B, I think", "A. no\nB. yes\nC. no\n\nB",
        "The answer is A? No, the answer is B",
    ],
)  # fmt: skip
def test_a_choice_in_other_words(completion):
    assert chosen(completion) == ["B"]


@pytest.mark.parametrize(
    "completion",
    [
        "The answer is A or B", "The answer is A and B.", "The answer is A, B, C, D",
        "Answer: A/B", "The answer is A & B",
        "(A) (B) (C) (D)", "<answer>A) B) C) D)</answer>", r"\boxed{(A) (B)}", "(A) or (B)", "A. B. C. D.",
        "The answer is (A) Paris or (B) The Hague",
        "<answer>A. Paris B. The Hague</answer>", "答案是A或B", "答案是A、B",
        "I choose A or B", "选A还是B", "A和B正确",
        "A. Paris\nB. The Hague\nC. Berlin", "A\nB\nC\nD", "A. Paris\nB. The Hague\n\nLet me think about it",
    ],
)  # fmt: skip
def test_several_letters_are_no_choice(completion):
    assert chosen(completion) == []


@pytest.mark.parametrize(
    "answer", ["B", "Answer: B", "I choose **B**", "B. The Hague", r"\boxed{B}", "<answer>B</answer>"]
)
@pytest.mark.parametrize("thought", ["The answer is A. Hmm.", r"\boxed{A}", "<answer>A</answer>"])
def test_what_stands_behind_the_thinking_counts(thought, answer):
    assert chosen(f"<think>\n{thought}\n</think>\n\n{answer}") == ["B"]
    # Nothing stands behind it.
    assert chosen(f"<think>\n{thought}\n</think>\n") == ["A"]
