"""`BM25Index`: search over a small corpus in memory, as a tool for agents.

    index = BM25Index.from_texts({"Paris": "Paris is the capital of France.", …})
    ToolWorkflow(reward, config.gconfig, tokenizer, tools=[index.search])

Scores are those of Okapi BM25 (Robertson and Zaragoza, 2009) with k1 = 1.2 and b = 0.75.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75
# Most words of a query that are used: a model may write anything.
_MAX_WORDS = 64


class BM25Index:
    """Passages by title, and in which of them each word occurs how often."""

    def __init__(self, num_results: int = 3, max_chars: int = 1_000):
        self.num_results, self.max_chars = num_results, max_chars
        self.titles: list[str] = []
        self.texts: list[str] = []
        self._lengths: list[int] = []
        # For each word: (passage, count).
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)

    @classmethod
    def from_texts(cls, texts: Mapping[str, str], num_results: int = 3, max_chars: int = 1_000) -> "BM25Index":
        """Index passages by title."""
        index = cls(num_results, max_chars)
        for title, text in texts.items():
            index.add(title, text)
        return index

    def add(self, title: str, text: str) -> None:
        words = _words(f"{title} {text}")
        for word, count in Counter(words).items():
            self._postings[word].append((len(self.texts), count))
        self.titles.append(title)
        self.texts.append(text)
        self._lengths.append(len(words))

    def ranked(self, query: str) -> list[tuple[int, float]]:
        """Return passages that share a word with the query and their scores, best first."""
        scores: dict[int, float] = defaultdict(float)
        total, mean = len(self.texts), sum(self._lengths) / max(1, len(self._lengths))
        for word in dict.fromkeys(_words(query)[:_MAX_WORDS]):
            found = self._postings.get(word, ())
            weight = math.log(1 + (total - len(found) + 0.5) / (len(found) + 0.5))
            for passage, count in found:
                norm = _K1 * (1 - _B + _B * self._lengths[passage] / mean)
                scores[passage] += weight * count * (_K1 + 1) / (count + norm)
        return sorted(scores.items(), key=lambda item: (-item[1], item[0]))

    async def search(self, query: str) -> str:
        """Search the corpus; returns the best passages."""
        best = self.ranked(query)[: self.num_results]
        passages = [f"{self.titles[i]}: {self.texts[i][: self.max_chars]}" for i, _ in best]
        return "\n\n".join(passages) or "nothing found"


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
