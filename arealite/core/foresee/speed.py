"""How fast servers generate, by what runs at once: fitted to a recording.

Each of n episodes on a server progresses with the speed `1 / (fixed + per_episode·n + busy·b)`, where b says whether
the trainer works: on a machine that both share it slows the servers down. `generation_work` measures every recorded
generation in that unit, so that a re-run with the recorded load takes the recorded time, whatever the fit.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from arealite.core.foresee.recording import Recording

_MIN_RATES = 6


class GenerationSpeed(NamedTuple):
    """Seconds for one unit of work. `is_known` is False without counters of the servers to fit it to."""

    fixed: float = 1.0
    per_episode: float = 0.0
    busy: float = 0.0
    is_known: bool = False

    def at(self, num_episodes: float, is_busy: float) -> float:
        """Return the units of work per second of one episode on a server."""
        return 1.0 / max(1e-12, self.fixed + self.per_episode * num_episodes + self.busy * is_busy)


def fit_speed(recording: Recording) -> GenerationSpeed:
    """Fit the speed to the servers' own counters, by what runs and whether the trainer works."""
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
    samples = [episode.samples for episode in recording.episodes if episode.samples]
    return GenerationSpeed(fixed, per_sequence * float(np.median(samples or [1])), per_busy * seconds.mean(), True)


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


def generation_work(recording: Recording, speed: GenerationSpeed) -> list[list[float]]:
    """Return for each episode the work of its parts: seconds, or units of work for those that generate."""
    intervals = [interval for episode in recording.episodes for interval in _generations(episode)]
    progress = _progress(recording, intervals, speed)
    works = []
    for episode in recording.episodes:
        at, row = episode.finished_at - sum(seconds for _, seconds in episode.parts), []
        for kind, seconds in episode.parts:
            row.append(float(progress(at + seconds) - progress(at)) if kind == "generate" else seconds)
            at += seconds
        works.append(row)
    return works


def _generations(episode) -> list[tuple[float, float]]:
    at, found = episode.finished_at - sum(seconds for _, seconds in episode.parts), []
    for kind, seconds in episode.parts:
        if kind == "generate":
            found.append((at, at + seconds))
        at += seconds
    return found


def _progress(
    recording: Recording, intervals: Sequence[tuple[float, float]], speed: GenerationSpeed
) -> Callable[[float], float]:
    """Return the work that an episode would have done until a time, had it generated all along."""
    changes = [(began, 1, 0) for began, _ in intervals] + [(end, -1, 0) for _, end in intervals]
    for step in recording.steps:
        changes += [(step.ready_at, 0, 1), (step.ready_at + step.work_s, 0, -1)]
    changes.sort()
    times = np.array([change[0] for change in changes])
    running = np.cumsum([change[1] for change in changes]) / recording.settings.servers
    busy = np.clip(np.cumsum([change[2] for change in changes]), 0, 1)
    speeds = [speed.at(max(1.0, n), b) for n, b in zip(running[:-1].tolist(), busy[:-1].tolist(), strict=True)]
    done = np.concatenate([[0.0], np.cumsum(np.diff(times) * np.array(speeds))])
    return lambda at: float(np.interp(at, times, done))
