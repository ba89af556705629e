"""`FinishedEpisodes`: the buffer between generation and training, oldest episode first."""

from __future__ import annotations

import heapq

from arealite.core.episode import Episode


class FinishedEpisodes:
    """A heap of finished episodes, ordered by id. Not thread-safe: the executor guards it with its lock."""

    def __init__(self) -> None:
        # Flat tuples compare faster than nested ones.
        self._heap: list[tuple[str, int, Episode]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, episode: Episode) -> None:
        heapq.heappush(self._heap, (episode.id.source, episode.id.number, episode))

    def pop_oldest(self, count: int) -> list[Episode]:
        return [heapq.heappop(self._heap)[2] for _ in range(count)]

    def pop_stale(self, oldest_allowed: int) -> list[Episode]:
        """Remove and return the episodes that have a token of a version before `oldest_allowed`."""
        stale = [e for _, _, e in self._heap if e.result and e.result.oldest_version < oldest_allowed]
        if stale:
            removed = set(stale)
            self._heap = [item for item in self._heap if item[2] not in removed]
            heapq.heapify(self._heap)
        return stale

    def in_order(self) -> list[Episode]:
        return [episode for *_, episode in sorted(self._heap, key=lambda item: item[:2])]
