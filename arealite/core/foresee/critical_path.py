"""The critical path of a run: what each step waited for, as a chain through episodes.

The wait for a batch ends with its last episode. From there the chain goes back in time: through the parts of that
episode to its start, from its start to the event that let it start (another episode that ended, or new weights), and so
on until the wait began. The links of a chain do not overlap and add up to the wait exactly.
"""

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from arealite.core.foresee.recording import PlayedEpisode, PlayedStep, Recording

# Generation while at most this share of a batch is missing is a wait for stragglers.
STRAGGLER_SHARE = 0.1
# An event that comes at most so long before the start of an episode has let it start.
_CAUSE_S = 0.1
# Links of one chain; a batch of very short episodes may have many.
_MAX_LINKS = 1000
GENERATION, STRAGGLERS, ADMISSION, COLLECT = "generation", "stragglers", "admission", "collect"
LINK_TEXTS = {
    GENERATION: "generation",
    STRAGGLERS: "stragglers",
    ADMISSION: "admission of episodes",
    COLLECT: "joining the batch",
    "workflow": "code of the workflow",
}


class Link(NamedTuple):
    """A part of a wait: who was waited for, and what it did. `episode` None: the executor itself."""

    kind: str
    began: float
    seconds: float
    episode: int | None


@dataclass(frozen=True)
class StepPath:
    """What one step waited for, the first link first."""

    step: int
    waited_s: float
    links: list[Link]
    # Episodes that the step waited for as stragglers.
    stragglers: list[int]


@dataclass
class CriticalPath:
    """The chains of all steps, and sums over the run. Shares refer to `total_s`."""

    total_s: float
    paths: list[StepPath]
    seconds: dict[str, float]
    stragglers: list[PlayedEpisode]
    # Tokens of a sample of an episode, the median.
    median_tokens: float
    notes: list[str] = field(default_factory=list)

    @property
    def waited_s(self) -> float:
        return sum(path.waited_s for path in self.paths)

    def sentence(self) -> str:
        """Say how much the trainer waited, and for what."""
        total = max(self.total_s, 1e-9)
        head = f"the trainer waited {self.waited_s / total:.0%} of {self.total_s:.1f} s"
        parts = []
        for kind, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            if seconds / total >= 0.005:
                extra = f" ({self._describe_stragglers()})" if kind == STRAGGLERS else ""
                parts.append(f"{seconds / total:.0%} {LINK_TEXTS.get(kind, kind)}{extra}")
        return f"{head}: {', '.join(parts)}" if parts else head

    def _describe_stragglers(self) -> str:
        tokens = [episode.sample_tokens for episode in self.stragglers]
        if not tokens or not self.median_tokens:
            return f"{len(self.stragglers)} episodes"
        return (
            f"{len(tokens)} episodes, {statistics.median(tokens):,.0f} tokens a sample; the median of all is "
            f"{self.median_tokens:,.0f}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.total_s,
            "waited_s": self.waited_s,
            "waits_s": dict(self.seconds),
            "stragglers": [episode.number for episode in self.stragglers],
            "sentence": self.sentence(),
            "steps": [
                {
                    "step": path.step,
                    "waited_s": path.waited_s,
                    "chain": [{"kind": k, "began": b, "seconds": s, "episode": e} for k, b, s, e in path.links],
                }
                for path in self.paths
            ],
        }


def find_critical_path(recording: Recording) -> CriticalPath:
    """Return what the steps waited for; the first one, which fills the pipeline, is left out."""
    batches: dict[int, list[PlayedEpisode]] = {}
    for episode in recording.episodes:
        if episode.step is not None:
            batches.setdefault(episode.step, []).append(episode)
    by_end = sorted(recording.episodes, key=lambda episode: episode.finished_at)
    finder = _Finder(by_end, [episode.finished_at for episode in by_end])
    paths = [finder.path(step, batches.get(step.number, [])) for step in recording.steps[1:]]
    seconds: dict[str, float] = {}
    for link in (link for path in paths for link in path.links):
        seconds[link.kind] = seconds.get(link.kind, 0.0) + link.seconds
    numbers = {number for path in paths for number in path.stragglers}
    stragglers = [episode for episode in recording.episodes if episode.number in numbers]
    tokens = [episode.sample_tokens for episode in recording.episodes if episode.samples]
    median = statistics.median(tokens) if tokens else 0.0
    return CriticalPath(recording.seconds, paths, seconds, stragglers, median, recording.notes)


def describe_path(path: StepPath) -> str:
    """Return a chain as one line, without links below 1%; equal ones in a row are one."""
    words, last = [], None
    for link in path.links:
        if link.seconds < 0.01 * path.waited_s:
            continue
        if last is not None and (last.kind, last.episode) == (link.kind, link.episode):
            link = Link(link.kind, last.began, last.seconds + link.seconds, link.episode)
            words.pop()
        who = "" if link.episode is None else f" of episode {link.episode}"
        words.append(f"{LINK_TEXTS.get(link.kind, link.kind)}{who} {link.seconds:.2f} s")
        last = link
    if len(words) > 8:
        words = [*words[:3], f"{len(words) - 6} more", *words[-3:]]
    return f"step {path.step + 1} waited {path.waited_s:.2f} s: {' → '.join(words)}"


class _Finder:
    """Follows chains back in time through episodes, which are ordered by their end."""

    def __init__(self, by_end: Sequence[PlayedEpisode], ends: Sequence[float]):
        self.by_end, self.ends = by_end, ends

    def path(self, step: PlayedStep, batch: Sequence[PlayedEpisode]) -> StepPath:
        began, ready_at = step.ready_at - step.waited_s, step.ready_at
        missing = sorted((e for e in batch if began < e.finished_at <= ready_at), key=lambda e: e.finished_at)
        if not missing:
            links = [Link(COLLECT, began, step.waited_s, None)] if step.waited_s > 0 else []
            return StepPath(step.number, step.waited_s, links, [])
        links = self._chain(missing[-1], began, ready_at)
        # Until so few were missing, the whole batch was generated.
        count = min(len(missing), max(int(len(batch) >= 4), math.floor(STRAGGLER_SHARE * len(batch))))
        late_from = missing[-count - 1].finished_at if count < len(missing) else began if count else ready_at
        links = _split_generation(links, late_from)
        has_stragglers = any(link.kind == STRAGGLERS for link in links)
        late = [e.number for e in missing if e.finished_at > late_from] if has_stragglers else []
        return StepPath(step.number, step.waited_s, links, late)

    def _chain(self, last: PlayedEpisode, began: float, ready_at: float) -> list[Link]:
        """Return the links between the two times, the first one first."""
        links = [Link(COLLECT, last.finished_at, ready_at - last.finished_at, None)]
        episode: PlayedEpisode | None = last
        while episode is not None and len(links) < _MAX_LINKS:
            at = episode.finished_at
            for kind, seconds in reversed(episode.parts):
                start = max(began, at - seconds)
                if at > start:
                    links.append(Link(kind, start, at - start, episode.number))
                at -= seconds
            at = max(began, min(at, episode.started_at))
            episode = self._cause(episode, began) if at > began else None
            until = began if episode is None else episode.finished_at
            if at > until:
                links.append(Link(ADMISSION, until, at - until, None))
        if links[-1].began > began and episode is not None:
            links.append(Link(ADMISSION, began, links[-1].began - began, None))
        return [link for link in reversed(links) if link.seconds > 0]

    def _cause(self, episode: PlayedEpisode, began: float) -> PlayedEpisode | None:
        """Return the episode whose end let this one start, if there is one within the wait."""
        index = bisect.bisect_right(self.ends, episode.started_at) - 1
        if index < 0:
            return None
        found = self.by_end[index]
        is_cause = found.finished_at > began and episode.started_at - found.finished_at <= _CAUSE_S
        return found if is_cause and found.started_at < episode.started_at else None


def _split_generation(links: Sequence[Link], late_from: float) -> list[Link]:
    """Name generation after `late_from` a wait for stragglers."""
    result = []
    for link in links:
        if link.kind != "generate":
            result.append(link)
            continue
        end = link.began + link.seconds
        cut = min(max(late_from, link.began), end)
        if cut > link.began:
            result.append(Link(GENERATION, link.began, cut - link.began, link.episode))
        if end > cut:
            result.append(Link(STRAGGLERS, cut, end - cut, link.episode))
    return result
