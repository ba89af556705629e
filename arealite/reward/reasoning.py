"""Reward for rows of reasoning-gym: the verifier of the task that generated them.

Verifiers give partial credit for answers that are merely well formed. By default only a full score is a reward.
"""

import re
from functools import lru_cache
from typing import Any

from arealite.reward.extraction import behind_thinking, last_boxed, last_tagged

# Where a model that continues text goes on with a question of its own.
# From the last line break: with all of them, a text of nothing else would take the square of its length.
_NEXT_QUESTION = re.compile(r"\n[^\S\n]*Question:")


def reasoning_gym_reward(
    prompt: str,
    completion: str,
    *ids: Any,
    entry: dict[str, Any] | None = None,
    threshold: float | None = 0.999,
    **data: Any,
) -> float:
    """Return whether the verifier's score reaches the threshold; without one the score itself."""
    assert entry is not None, "a row of reasoning-gym has the column `entry`"
    score = float(_dataset(entry["metadata"]["source_dataset"]).score_answer(find_answer(completion), entry))
    return score if threshold is None else float(score >= threshold)


def find_answer(completion: str) -> str:
    """Return what the last `<answer>` holds, else the last box, else the text up to a next question."""
    completion = behind_thinking(completion)
    tagged = last_tagged(completion)
    if tagged is not None:
        return tagged.strip()
    return (last_boxed(completion) or _NEXT_QUESTION.split(completion)[0]).strip()


@lru_cache
def _dataset(task: str) -> Any:
    """Return a dataset of the task: its verifier is a method."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0)
