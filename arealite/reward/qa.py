"""Rewards for short answers: exact match, or words in common, after SQuAD's normalization."""

import re
import string
from collections import Counter
from typing import Any

from arealite.reward.extraction import behind_thinking, last_boxed, last_tagged

_IS = re.compile(r"\banswer(?: is|:)\s*(.+)", re.I)
# Words in a formula: `\boxed{\text{Paris}}`.
TYPESETTING = re.compile(r"\\(?:text\w*|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation + "“”‘’„«»…–—。，、！？；：（）「」《》")


def qa_reward(prompt: str, completion: str, *ids: Any, answer: Any, **data: Any) -> float:
    """Return 1.0 if the final answer of a completion equals an accepted one, else 0.0."""
    accepted = _texts(answer)
    found = normalize(find_short_answer(completion))
    return float(bool(found) and any(found == normalize(each) for each in accepted))


def f1_reward(prompt: str, completion: str, *ids: Any, answer: Any, **data: Any) -> float:
    """Return the F1 of the words that the final answer shares with the best of the accepted ones."""
    accepted = _texts(answer)
    found = normalize(find_short_answer(completion)).split()
    return max((_f1(found, normalize(each).split()) for each in accepted), default=0.0)


def _texts(answer: Any) -> list[str]:
    """Return the accepted answers, one or a list; JSON has years and amounts as numbers."""
    accepted = [answer] if isinstance(answer, str | int | float) else answer
    return [str(each) for each in accepted if each is not None]


def _f1(found: list[str], wanted: list[str]) -> float:
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def find_short_answer(completion: str) -> str:
    """Return the last `<answer>`, else the last box, else what follows `answer is`, else the last line."""
    completion = behind_thinking(completion)
    tagged = last_tagged(completion)
    if tagged is not None:
        return TYPESETTING.sub(r"\1", tagged)
    lines = completion.strip().splitlines() or [""]
    stated = _IS.search(lines[-1])
    return TYPESETTING.sub(r"\1", last_boxed(completion) or (stated[1] if stated else lines[-1]))


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated spaces."""
    words = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
    # An answer that is all article or punctuation is compared as it is.
    return " ".join(words) or text.strip().lower()
