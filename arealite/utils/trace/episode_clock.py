"""`EpisodeClock`: in which part of an episode its time was spent, in order.

`EpisodeRunner` gives every episode a clock, and `tracing.part_of_episode` tells it what begins and ends. The ledger
keeps the parts of all episodes, so that a report can say what a step waited for.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from typing import NamedTuple

from arealite.utils import clock

GENERATE = "generate"
# Of parts that run at the same time (the samples of a group), the first of these counts. Parts with other names follow.
_ORDER = (GENERATE, "tool", "environment", "reward")
# Time outside of all parts: code of the workflow, and waiting for a free worker process.
WORKFLOW = "workflow"
# Further parts are added to the last one of the same kind.
MAX_PARTS = 64


class Part(NamedTuple):
    """A part of an episode, and the tokens of each answer that it has generated."""

    kind: str
    seconds: float
    answers: tuple[int, ...] = ()


Parts = list[Part]


class EpisodeClock:
    """Splits the time between its creation and `stop` into parts that do not overlap."""

    def __init__(self) -> None:
        self.began = self._changed = clock.monotonic()
        # Kind, seconds and answers of each part.
        self._rows: list[list] = []
        self._active: dict[str, int] = {}
        self._current: str | None = WORKFLOW

    def enter(self, kind: str) -> None:
        """Begin a part; several of one kind may run at once."""
        self._active[kind] = self._active.get(kind, 0) + 1
        self._update()

    def leave(self, kind: str) -> None:
        """End a part."""
        left = self._active.get(kind, 0) - 1
        if left > 0:
            self._active[kind] = left
        else:
            self._active.pop(kind, None)
        self._update()

    def add_answers(self, tokens: Iterable[int]) -> None:
        """Count the tokens of answers that have just been generated."""
        if self._current is None:
            return
        if self._current == GENERATE:
            # Others still generate: their part has begun.
            self._charge()
        row = next((row for row in reversed(self._rows) if row[0] == GENERATE), None)
        if row is None:
            row = [GENERATE, 0.0, []]
            self._rows.append(row)
        row[2] += tokens

    def stop(self) -> Parts:
        """Return the parts until now; what ends later is ignored."""
        self._charge()
        self._current = None
        return [Part(kind, seconds, tuple(answers)) for kind, seconds, answers in self._rows]

    def replace(self, parts: Parts) -> None:
        """Take the parts of a clock in another process; what they lack was spent on the way there."""
        self._charge()
        inside_s = sum(part.seconds for part in parts)
        outside_s = max(0.0, clock.monotonic() - self.began - inside_s)
        self._rows = [[WORKFLOW, outside_s, []], *([kind, seconds, [*answers]] for kind, seconds, answers in parts)]

    def _update(self) -> None:
        kinds = self._active
        kind = next((name for name in _ORDER if name in kinds), None) or next(iter(kinds), WORKFLOW)
        if self._current is not None and kind != self._current:
            self._charge()
            self._current = kind

    def _charge(self) -> None:
        """Add the time since the last change to the current part."""
        now, kind = clock.monotonic(), self._current
        seconds, self._changed = now - self._changed, now
        if kind is None or seconds <= 0:
            return
        rows = self._rows
        if len(rows) < MAX_PARTS and not (rows and rows[-1][0] == kind):
            rows.append([kind, seconds, []])
        else:
            row = next((row for row in reversed(rows) if row[0] == kind), rows[-1])
            row[1] += seconds


_clock: ContextVar[EpisodeClock | None] = ContextVar("episode_clock", default=None)


def current_clock() -> EpisodeClock | None:
    """Return the clock of this task's episode; None outside of episodes."""
    return _clock.get()


def use_clock(clock: EpisodeClock | None) -> None:
    """Let this task, and those that it starts from now on, tell `clock` about their parts."""
    _clock.set(clock)
