"""The work of all that was recorded, in the units of `GenerationSpeed`.

`Timeline` orders what began and ended in a recording. `recorded_work` goes through it with a speed: an episode has done
as many steps of its server as the speed says for the load that it met, so that a re-run with the recorded load takes
the recorded time, and one with another load takes the time of that load.
"""

import random
from bisect import bisect_right, insort
from collections import deque
from typing import NamedTuple, Protocol

import numpy as np

from arealite.core.foresee.core_sharing import Speeds
from arealite.core.foresee.lengths import Lengths
from arealite.core.foresee.prompt_passes import PromptPasses
from arealite.core.foresee.recording import PlayedEpisode, Recording
from arealite.utils.step_context import StepContext

GENERATE = "generate"
_NUM_DRAWN = 8
# An episode is not typical if a larger share of its time lies before the trainer asked for its first batch.
_EARLY = 0.1


class Speed(Protocol):
    """What is needed of a `GenerationSpeed`."""

    @property
    def prompt_s(self) -> float: ...

    @property
    def pass_s(self) -> float: ...

    @property
    def most(self) -> float: ...

    @property
    def latency_s(self) -> float: ...

    def at(self, num_episodes: float, is_busy: bool, context: StepContext) -> float: ...

    def shares(self, loads: list[float], rates: list[float], is_busy: bool) -> Speeds: ...


class _Change(NamedTuple):
    """Something ends (`what` 0) or begins (1).

    It is a generation, by its place in the recording, or the work of the trainer (`place` None).
    """

    time: float
    what: int
    place: tuple[int, int] | None


class Timeline:
    """Beginnings and ends of generations and of the trainer's work, in order.

    Generations end `latency_s` earlier than their callers know.
    """

    def __init__(self, recording: Recording, latency_s: float = 0.0):
        self.recording = recording
        changes = []
        for number, episode in enumerate(recording.started):
            at = episode.finished_at - sum(seconds for _, seconds in episode.parts)
            for index, (kind, seconds) in enumerate(episode.parts):
                if kind == GENERATE and seconds > 0:
                    end = at + max(seconds / 2, seconds - latency_s)
                    changes += [_Change(at, 1, (number, index)), _Change(end, 0, (number, index))]
                at += seconds
        self.num_generations = len(changes) // 2
        for step in recording.steps:
            changes += [_Change(step.ready_at, 1, None), _Change(step.ready_at + step.work_s, 0, None)]
        # At the same time, what has ended makes room first.
        self.changes = sorted(changes, key=lambda change: (change.time, change.what))
        self._times = np.array([change.time for change in self.changes])
        steps = np.array([0 if change.place is None else 2 * change.what - 1 for change in self.changes])
        self._running = np.cumsum(steps)

    def num_running(self, time: float) -> int:
        """Return how many episodes generated at a time."""
        place = int(np.searchsorted(self._times, time, side="right"))
        return int(self._running[place - 1]) if place else 0

    def running_s(self, most: float) -> float:
        """Return the seconds of all generating episodes, of which at most `most` run at once."""
        return float(np.minimum(self._running[:-1], most) @ np.diff(self._times))

    def latency_s(self) -> float:
        """Return the seconds between the last token of a generation and its end for the caller.

        Known if the server was idle before every batch: for these seconds episodes seemed to generate, but it did not.
        """
        recording = self.recording
        num_starts = int(np.count_nonzero((self._running[1:] > 0) & (self._running[:-1] == 0))) + 1
        steps_s, active_s = sum(row.seconds for row in recording.server_use.steps), self.running_s(1.0)
        if recording.settings.servers > 1 or num_starts < len(recording.steps) or not 0 < steps_s < active_s:
            return 0.0
        return (active_s - steps_s) / num_starts * len(recording.started) / self.num_generations

    def overlap(self) -> float:
        """Return the share of the servers' time in which the trainer worked."""
        both_s, servers_s, _ = self._active_s()
        return both_s / max(servers_s, 1e-9)

    def trainer_overlap(self) -> float:
        """Return the share of the trainer's time in which servers worked."""
        both_s, _, trainer_s = self._active_s()
        return both_s / max(trainer_s, 1e-9)

    def _active_s(self) -> tuple[float, float, float]:
        """Return the seconds in which servers and trainer, servers, and the trainer were active."""
        seconds = np.diff(self._times)
        signs = [2 * change.what - 1 if change.place is None else 0 for change in self.changes]
        has_servers, has_trainer = self._running[:-1] > 0, np.cumsum(signs)[:-1] > 0
        both_s = float(seconds[has_servers & has_trainer].sum())
        return both_s, float(seconds[has_servers].sum()), float(seconds[has_trainer].sum())


class RecordedWork(NamedTuple):
    """The work of the parts of each started episode and of each step.

    Parts that do not generate have their seconds. A step has the work until its new weights are in use, and all of it.
    """

    episodes: list[list[float]]
    steps: list[tuple[float, float]]


def recorded_work(recording: Recording, speed: Speed) -> RecordedWork:
    """Measure all recorded work."""
    timeline = Timeline(recording, speed.latency_s)
    sweep = _Sweep(speed, recording.settings.servers, timeline.changes[0].time)
    trained_at, trained = [], []
    for change in timeline.changes:
        sweep.advance(change.time)
        trained_at.append(change.time)
        trained.append(sweep.trained)
        sweep.apply(change)
    steps = []
    for step in recording.steps:
        times = [step.ready_at, step.ready_at + step.update_s, step.ready_at + step.work_s]
        began, updated, ended = np.interp(times, trained_at, trained).tolist()
        steps.append((updated - began, ended - began))
    works = [
        [
            sweep.works.get((number, index), 0.0) if kind == GENERATE else seconds
            for index, (kind, seconds) in enumerate(episode.parts)
        ]
        for number, episode in enumerate(recording.started)
    ]
    return RecordedWork(_finished(recording, _typical(recording, works)), steps)


def mean_generated(works: RecordedWork, recording: Recording) -> float:
    """Return the mean tokens that a sequence had generated so far, in the steps that decoded it."""
    found = [w for e, work in zip(recording.started, works.episodes, strict=True) for w in _generated(e, work)]
    return sum(work * work for work in found) / 2 / max(1e-9, sum(found))


def _typical(recording: Recording, works: list[list[float]]) -> list[list[float]]:
    """Give episodes that ran before the trainer asked for its first batch the work of later ones.

    The trainer compiled its model meanwhile and processes for rewards started: all took longer than later. A later
    episode has the same parts and, of a few that are drawn, the nearest number of tokens.
    """
    started, began = recording.started, recording.steps[0].ready_at - recording.steps[0].waited_s
    is_early = [began - episode.started_at > _EARLY * episode.seconds for episode in started]
    later: dict[tuple[str, ...], list[int]] = {}
    for number, episode in enumerate(started):
        if not is_early[number] and episode.state != "running":
            later.setdefault(_kinds(episode), []).append(number)
    result = list(works)
    for number, episode in enumerate(started):
        others = later.get(_kinds(episode), ())
        if is_early[number] and others:
            drawn = random.Random(episode.number).choices(others, k=_NUM_DRAWN)
            like = min(drawn, key=lambda other: abs(started[other].tokens - episode.tokens))
            result[number] = list(works[like])
    return result


def _kinds(episode: PlayedEpisode) -> tuple[str, ...]:
    return tuple(kind for kind, _ in episode.parts)


def _finished(recording: Recording, works: list[list[float]]) -> list[list[float]]:
    """Give episodes that still ran at the end the work of a longer one.

    Those with most work get theirs first, so that others may get it, too: long episodes are seldom among those that
    ended (the estimate of Kaplan and Meier).
    """
    started = recording.started
    rows = list(zip(started, works, strict=True))
    known = sorted(sum(_generated(e, work)) for e, work in rows if e.state != "running")
    running = [number for number, episode in enumerate(started) if episode.state == "running"]
    for number in sorted(running, key=lambda number: -sum(works[number])):
        work = sum(works[number])
        longer = known[bisect_right(known, work) :]
        if longer:
            work = random.Random(started[number].number).choice(longer)
            works[number] = [work]
        insort(known, work)
    return works


def _generated(episode: PlayedEpisode, works: list[float]) -> list[float]:
    return [work for (kind, _), work in zip(episode.parts, works, strict=True) if kind == GENERATE]


class _Sweep:
    """Goes through a recording.

    Servers share their load equally; what they cannot run waits in order of arrival.
    """

    def __init__(self, speed: Speed, servers: int, began: float):
        self.speed, self.servers = speed, servers
        self.works: dict[tuple[int, int], float] = {}
        # Steps that an episode would have made so far, and work of a trainer that had never waited.
        self.done = self.trained = 0.0
        self._at = began
        # Steps at the start of a generation, and, for those that wait, at their arrival.
        self._running: dict[tuple[int, int], float] = {}
        self._lengths = Lengths()
        self._waiting: dict[tuple[int, int], float] = {}
        self._order: deque[tuple[int, int]] = deque()
        self._num_busy = 0
        # Seconds of prompts before steps go on.
        self._debt_s = 0.0
        self._passes = PromptPasses(speed.pass_s, servers)

    def advance(self, now: float) -> None:
        seconds, self._at = now - self._at, now
        is_busy, num_active = self._num_busy > 0, min(len(self._running), self.servers)
        load = max(1.0, len(self._running) / self.servers)
        loads, rates = [load] * num_active, [self._rate(load, is_busy, self.done)] * num_active
        self.trained += seconds * self.speed.shares(loads, rates, True).trainer
        if loads:
            worked_s = seconds * self.speed.shares(loads, rates, is_busy).server
            paid_s = min(worked_s, self._debt_s)
            self._debt_s -= paid_s
            left_s = worked_s - paid_s
            # Contexts grow meanwhile: those of the middle count.
            self.done += left_s * self._rate(load, is_busy, self.done + left_s * rates[0] / 2)

    def _rate(self, load: float, is_busy: bool, done: float) -> float:
        context = self._lengths.context(done)
        share = load / max(1, self._lengths.number)
        return self.speed.at(load, is_busy, StepContext(share * context.tokens, share * context.spread))

    def apply(self, change: _Change) -> None:
        if change.place is None:
            self._num_busy += 2 * change.what - 1
        elif change.what:
            self._waiting[change.place] = self.done
            self._order.append(change.place)
        else:
            # One that ends while it seems to wait has run all the time: the limit was not exact.
            began = self._running.pop(change.place, None)
            if began is not None:
                self._lengths.remove(began)
            began = self._waiting.pop(change.place, 0.0) if began is None else began
            self.works[change.place] = self.done - began
        while self._order and len(self._running) < max(1.0, self.speed.most * self.servers):
            place = self._order.popleft()
            if place in self._waiting:
                del self._waiting[place]
                self._running[place] = self.done
                self._lengths.add(self.done)
                self._debt_s += (self.speed.prompt_s + self._passes.start(self.done)) / self.servers
