"""Reward for short answers: exact match with an accepted one, after SQuAD's normalization."""

import re
import string
from typing import Any

from arealite.reward.extraction import last_boxed

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.S)
_IS = re.compile(r"\banswer(?: is|:)\s*(.+)", re.I)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def qa_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: str | list[str] = "",
    **data: Any,
) -> float:
    """Return 1.0 if the final answer of a completion equals an accepted one, else 0.0."""
    accepted = [answer] if isinstance(answer, str) else answer
    found = normalize(find_short_answer(completion))
    return float(bool(found) and any(found == normalize(each) for each in accepted))


def find_short_answer(completion: str) -> str:
    """Return the last `<answer>`, else the last box, else what follows `answer is`, else the last line."""
    tagged = _TAGGED.findall(completion)
    if tagged:
        return tagged[-1]
    lines = completion.strip().splitlines() or [""]
    stated = _IS.search(lines[-1])
    return last_boxed(completion) or (stated[1] if stated else lines[-1])


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated spaces."""
    words = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
    # An answer that is all article or punctuation is compared as it is.
    return " ".join(words) or text.strip().lower()
