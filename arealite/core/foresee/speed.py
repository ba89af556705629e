"""How fast servers generate and the trainer works, by what runs at once: fitted to a recording.

Each of n episodes on a server progresses with the speed `1 / (fixed + per_episode·n + busy·b)`, where b says whether
the trainer works. If the servers counted the seconds of their steps (`resources`), the first two follow from them, and
`CoreUse` says how servers and trainer slow each other down. Otherwise all three are fitted to samples of the load.
`recorded_work` measures all that was recorded in these units, so that a re-run with the recorded load takes the
recorded time, whatever the fit.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from arealite.core.foresee.core_sharing import CoreUse, Speeds
from arealite.core.foresee.recording import PlayedEpisode, Recording
from arealite.core.foresee.resources import fit_step_cost

_MIN_RATES = 6


class GenerationSpeed(NamedTuple):
    """Seconds for one unit of work. `is_known` is False without counters of the servers to fit it to."""

    fixed: float = 1.0
    per_episode: float = 0.0
    busy: float = 0.0
    is_known: bool = False
    # Cores that servers and trainer share (None: `busy` is all that is known), and the samples of an episode.
    cores: CoreUse | None = None
    samples: float = 1.0

    def at(self, num_episodes: float, is_busy: bool) -> float:
        """Return the units of work per second of one episode on a server, before cores are shared."""
        return 1.0 / max(1e-12, self.fixed + self.per_episode * num_episodes + self.busy * is_busy)

    def shares(self, loads: Sequence[float], is_busy: bool) -> Speeds:
        """Return how much servers with so many episodes, and the trainer, are slowed down by shared cores."""
        if self.cores is None:
            return Speeds(1.0, 1.0)
        active = [load for load in loads if load > 0]
        tokens_per_s = sum(load * self.samples * self.at(max(1.0, load), is_busy) for load in active)
        return self.cores.speeds(len(active), tokens_per_s, is_busy)


def fit_speed(recording: Recording) -> GenerationSpeed:
    """Fit the speed to the servers' own counters."""
    samples = float(np.median([episode.samples for episode in recording.episodes if episode.samples] or [1]))
    cost = fit_step_cost(recording.server_use)
    if cost is not None and recording.cores is not None:
        return GenerationSpeed(cost.fixed_s, cost.sequence_s * samples, 0.0, True, recording.cores, samples)
    return _fit_to_rates(recording, samples)


def _fit_to_rates(recording: Recording, samples: float) -> GenerationSpeed:
    """Fit the speed to samples of the load, and to whether the trainer works."""
    rates = [rate for rate in recording.rates if rate.running > 0]
    if len(rates) < _MIN_RATES:
        return GenerationSpeed()
    working = _Steps([(step.ready_at, step.ready_at + step.work_s) for step in recording.steps])
    running = np.array([rate.running for rate in rates])
    busy = np.array([working.share(rate.began, rate.began + rate.seconds) for rate in rates])
    seconds = np.array([rate.running * rate.seconds / rate.tokens for rate in rates])
    # Relative errors count: slow and fast times are measured equally well.
    features = np.stack([np.ones_like(running), running, busy * seconds.mean()], axis=1) / seconds[:, None]
    fixed, per_sequence, per_busy = _fit_not_negative(features, np.ones_like(seconds))
    return GenerationSpeed(fixed, per_sequence * samples, per_busy * seconds.mean(), True)


def _fit_not_negative(features: np.ndarray, target: np.ndarray) -> tuple[float, ...]:
    """Return the best coefficients of which none is negative, by trying all subsets of the features."""
    best, best_error = np.zeros(features.shape[1]), np.inf
    for chosen in product((False, True), repeat=features.shape[1]):
        mask = np.array(chosen)
        if not mask.any():
            continue
        found, *_ = np.linalg.lstsq(features[:, mask], target, rcond=None)
        error = float(np.square(features[:, mask] @ found - target).sum())
        if (found >= 0).all() and error < best_error - 1e-12:
            best, best_error = np.zeros(features.shape[1]), error
            best[mask] = found
    return tuple(best.tolist())


class _Steps:
    """Intervals that do not overlap, in order."""

    def __init__(self, intervals: Sequence[tuple[float, float]]):
        ends = np.array(intervals).ravel()
        self._times = ends
        self._total = np.concatenate([[0.0], np.cumsum(np.diff(ends) * (np.arange(len(ends) - 1) % 2 == 0))])

    def share(self, began: float, end: float) -> float:
        """Return the share of a time that the intervals cover."""
        covered = np.interp([began, end], self._times, self._total)
        return float(covered[1] - covered[0]) / max(end - began, 1e-9)


class RecordedWork(NamedTuple):
    """The work of the parts of each episode and of each step, in the units of `GenerationSpeed`.

    Parts that do not generate have their seconds. A step has the work until its new weights are in use, and all of it.
    """

    episodes: list[list[float]]
    steps: list[tuple[float, float]]


def recorded_work(recording: Recording, speed: GenerationSpeed) -> RecordedWork:
    """Measure all recorded work."""
    generated, trained = _progress(recording, speed)
    works = []
    for episode in recording.episodes:
        at, row = episode.finished_at - sum(seconds for _, seconds in episode.parts), []
        for kind, seconds in episode.parts:
            row.append(generated(at + seconds) - generated(at) if kind == "generate" else seconds)
            at += seconds
        works.append(row)
    steps = []
    for step in recording.steps:
        began = trained(step.ready_at)
        ends = (step.ready_at + seconds for seconds in (step.update_s, step.work_s))
        steps.append(tuple(trained(end) - began for end in ends))
    return RecordedWork(works, steps)


def _generations(episode: PlayedEpisode) -> list[tuple[float, float]]:
    at, found = episode.finished_at - sum(seconds for _, seconds in episode.parts), []
    for kind, seconds in episode.parts:
        if kind == "generate":
            found.append((at, at + seconds))
        at += seconds
    return found


def _progress(recording: Recording, speed: GenerationSpeed) -> tuple[Callable[[float], float], ...]:
    """Return the work of an episode, and of the trainer, until a time, as if they had worked all along."""
    intervals = [interval for episode in recording.episodes for interval in _generations(episode)]
    changes = [(began, 1, 0) for began, _ in intervals] + [(end, -1, 0) for _, end in intervals]
    for step in recording.steps:
        changes += [(step.ready_at, 0, 1), (step.ready_at + step.work_s, 0, -1)]
    changes.sort()
    times = np.array([change[0] for change in changes])
    counts = np.cumsum([change[1] for change in changes])[:-1].tolist()
    busy = np.clip(np.cumsum([change[2] for change in changes]), 0, 1)[:-1].tolist()
    num_servers = recording.settings.servers
    generating, training = [], []
    for count, is_busy in zip(counts, busy, strict=True):
        loads = [count / num_servers] * min(count, num_servers)
        generating.append(speed.at(max(1.0, count / num_servers), is_busy) * speed.shares(loads, is_busy).server)
        training.append(speed.shares(loads, True).trainer)
    sums = [np.concatenate([[0.0], np.cumsum(np.diff(times) * np.array(row))]) for row in (generating, training)]
    return tuple(lambda at, done=done: float(np.interp(at, times, done)) for done in sums)
