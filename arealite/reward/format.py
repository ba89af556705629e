"""Rewards for the form of an answer: tags in their order, or a pattern."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TagsReward:
    """1.0 if an answer is exactly `<think>…</think><answer>…</answer>`, or other tags, with text in each.

    Each tag occurs once and in order, with nothing but space between and around them. Text before the first tag is
    allowed with `is_prefix_free=False`. With `partial`, the share of opening and closing tags that occur exactly once.
    """

    tags: Sequence[str] = ("think", "answer")
    partial: bool = False
    is_prefix_free: bool = True

    def __call__(self, prompt: str = "", completion: str = "", *ids: Any, **data: Any) -> float:
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        positions = [completion.find(mark) for mark in marks]
        is_single = [completion.count(mark) == 1 for mark in marks]
        if self.partial and not all(is_single):
            return sum(is_single) / len(marks)
        if not all(is_single) or positions != sorted(positions):
            return 0.0
        ends = [position + len(mark) for position, mark in zip(positions, marks, strict=True)]
        between = [completion[a:b] for a, b in zip([0, *ends], [*positions, len(completion)], strict=True)]
        # Outside are the text before the first tag, between tags and behind the last; inside, what the tags hold.
        outside, inside = between[0::2], between[1::2]
        is_free = all(not text.strip() for text in (outside if self.is_prefix_free else outside[1:]))
        return float(is_free and all(text.strip() for text in inside))


@dataclass(frozen=True)
class PatternReward:
    """1.0 if a regular expression matches an answer: all of it, or some part with `anywhere`.

    A pattern that takes exponential time costs its answer, by the deadline of the reward pool.
    """

    pattern: str
    anywhere: bool = False

    def __call__(self, prompt: str = "", completion: str = "", *ids: Any, **data: Any) -> float:
        pattern = re.compile(self.pattern, re.S)
        found = pattern.search(completion) if self.anywhere else pattern.fullmatch(completion)
        return float(found is not None)


think_answer_reward = TagsReward()
