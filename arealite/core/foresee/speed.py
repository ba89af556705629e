"""How fast servers generate and the trainer works, by what runs at once: fitted to a recording.

The unit of work of an episode is one step of its server. If the servers counted the seconds of their steps, a
`StepCurve` says what a step takes with n episodes, and `CoreUse` or `GpuShare` how servers and trainer slow each other
down. Otherwise a step takes `fixed + per_episode·n + busy·b`, where b says whether the trainer works, fitted to samples
of the load. `recorded_work` measures all that was recorded in these units.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from arealite.core.foresee.core_sharing import CoreUse, Speeds
from arealite.core.foresee.gpu_sharing import SLOWEST, GpuShare, fit_gpu_share
from arealite.core.foresee.recorded_work import GENERATE, Timeline, recorded_work
from arealite.core.foresee.recording import Recording
from arealite.core.foresee.step_curve import StepCurve, fit_step_curve
from arealite.utils.step_context import NO_CONTEXT, StepContext

_MIN_RATES = 6
# The longest answers of fewer episodes do not give a reliable mean.
_MIN_LENGTHS = 20


class GenerationSpeed(NamedTuple):
    """Seconds for one unit of work. `is_known` is False without counters of the servers to fit it to."""

    fixed: float = 1.0
    per_episode: float = 0.0
    busy: float = 0.0
    is_known: bool = False
    # Cores or a GPU that servers and trainer share (None: `busy` is all that is known).
    shared: CoreUse | GpuShare | None = None
    # Sequences of an episode that run at once, on average.
    samples: float = 1.0
    # If it is known, it takes the place of `fixed` and `per_episode`.
    steps: StepCurve | None = None
    # Seconds for which a generation that begins holds up its server: the tokens of its prompt.
    prompt_s: float = 0.0
    # The same for each step in which one or more generations begin: the pass that computes their prompts.
    pass_s: float = 0.0
    # Episodes that a server runs at once; others wait.
    most: float = float("inf")
    # Tokens of a sequence before its generation begins: its prompt, and earlier turns.
    start_tokens: float = 0.0
    # Seconds between the last token of a generation and its end for the caller.
    latency_s: float = 0.0

    def at(self, num_episodes: float, is_busy: bool, context: StepContext = NO_CONTEXT) -> float:
        """Return the units of work per second of one episode on a server, before cores are shared."""
        if self.steps is not None:
            tokens = context.tokens + num_episodes * self.start_tokens
            loads = (self.samples * value for value in (num_episodes, tokens, context.spread))
            return 1.0 / max(1e-12, self.steps.at(*loads))
        return 1.0 / max(1e-12, self.fixed + self.per_episode * num_episodes + self.busy * is_busy)

    def shares(self, loads: Sequence[float], rates: Sequence[float], is_busy: bool) -> Speeds:
        """Return how much servers and the trainer are slowed down by what they share.

        Servers have so many episodes, with so many units of work per second each.
        """
        if self.shared is None:
            return Speeds(1.0, 1.0)
        tokens_per_s = self.samples * sum(load * rate for load, rate in zip(loads, rates, strict=True))
        return self.shared.speeds(sum(load > 0 for load in loads), tokens_per_s, is_busy)


def fit_speed(recording: Recording, latency_s: float | None = None) -> GenerationSpeed:
    """Fit the speed to the servers' own counters. `latency_s` None: fitted, too."""
    curve, shared = fit_devices(recording)
    if curve is None or (shared is None and recording.server_use.cpu_s is not None):
        return _fit_to_rates(recording, _samples_at_once(recording, Timeline(recording)))
    latency_s = Timeline(recording).latency_s() if latency_s is None else latency_s
    return _of_curve(recording, curve, shared, latency_s)


def _of_curve(
    recording: Recording, curve: StepCurve, shared: CoreUse | GpuShare | None, latency_s: float
) -> GenerationSpeed:
    timeline = Timeline(recording, latency_s)
    samples = _samples_at_once(recording, timeline)
    prompts = sum(row.prompt_tokens for row in recording.server_use.steps) / max(1, timeline.num_generations)
    most = max(1.0, (recording.max_running or float("inf")) / samples)
    return GenerationSpeed(
        is_known=True,
        shared=shared,
        samples=samples,
        steps=curve,
        prompt_s=prompts * curve.prompt_s,
        pass_s=curve.pass_s,
        most=most,
        latency_s=latency_s,
    )


def fit_devices(recording: Recording) -> tuple[StepCurve | None, CoreUse | GpuShare | None]:
    """Return what steps take on a device of their own, and how servers share theirs with a trainer."""
    use = recording.server_use
    if recording.cores is not None:
        slower = switching(recording).server
        use = use._replace(steps=[row._replace(cpu_s=row.cpu_s / slower) for row in use.steps])
    curve = fit_step_curve(use)
    if curve is None or use.cpu_s is not None:
        return curve, recording.cores
    share, curve = fit_gpu_share(use, curve, Timeline(recording).overlap())
    if not recording.shares_gpu:
        return curve, None
    return curve, _fit_to_lengths(recording, curve, share) if share.is_known else share


class Switching(NamedTuple):
    """By which factor servers and trainer needed more CPU seconds in a run than they need alone."""

    server: float
    trainer: float


def switching(recording: Recording) -> Switching:
    """Return what taking turns on the cores cost in a run, by the model of `CoreUse`."""
    cores, timeline, steps = recording.cores, Timeline(recording), recording.server_use.steps
    if cores is None:
        return Switching(1.0, 1.0)
    num_servers = recording.settings.servers
    tokens_per_s = num_servers * sum(row.sequences for row in steps) / max(1e-9, sum(row.cpu_s for row in steps))
    both = cores.switching(num_servers, tokens_per_s, True)
    servers, trainer = cores.switching(num_servers, tokens_per_s, False), cores.switching(0, 0.0, True)
    server_share, trainer_share = timeline.overlap(), timeline.trainer_overlap()
    return Switching(
        server_share * both + (1 - server_share) * servers, trainer_share * both + (1 - trainer_share) * trainer
    )


def _fit_to_lengths(recording: Recording, curve: StepCurve, share: GpuShare) -> GpuShare:
    """Return the share with which episodes have as many steps as their longest answers have tokens.

    Servers also stop while weights are updated, which the seconds of their steps do not show. The steps of an episode
    grow with the share.
    """
    tried, steps = (share.server, share.server / 2), []
    for server in tried:
        speed = _of_curve(recording, curve, share._replace(server=server), 0.0)
        found = _generated_once(recording, recorded_work(recording, speed).episodes)
        if len(found) < _MIN_LENGTHS:
            return share
        steps.append(sum(work for work, _ in found))
    tokens = sum(longest for _, longest in found)
    slope = (steps[0] - steps[1]) / (tried[0] - tried[1])
    if slope <= 0:
        return share
    server = tried[0] + (tokens - steps[0]) / slope
    return share._replace(server=min(1.0, max(SLOWEST, server)))


def _generated_once(recording: Recording, works: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return the work of episodes with one generation, and the tokens of their longest answer."""
    began = recording.steps[0].ready_at - recording.steps[0].waited_s
    found = []
    for episode, parts in zip(recording.started, works, strict=True):
        generated = [work for (kind, _), work in zip(episode.parts, parts, strict=True) if kind == GENERATE]
        if episode.number in recording.longest and len(generated) == 1 and episode.started_at > began:
            found.append((generated[0], recording.longest[episode.number]))
    return found


def _samples_at_once(recording: Recording, timeline: Timeline) -> float:
    """Return how many sequences of an episode run at once: those of a group do not end together."""
    asked = float(np.median([episode.samples for episode in recording.episodes if episode.samples] or [1]))
    rows, most = recording.server_use.steps, recording.settings.servers * (recording.max_running or float("inf"))
    steps_s, active_s = sum(row.seconds for row in rows), timeline.running_s(1.0)
    # Counters of a run of which only the last steps are played again cover more than these.
    if not 0 < steps_s < 1.1 * recording.settings.servers * active_s:
        return _sampled_at_once(recording, timeline, asked)
    sequence_s = sum(row.seconds * row.sequences / row.steps for row in rows)
    found = asked
    for _ in range(20):
        # Episodes that wait in a server are not running.
        found = min(asked, max(1.0, sequence_s / timeline.running_s(most / found)))
    return found


def _sampled_at_once(recording: Recording, timeline: Timeline, asked: float) -> float:
    """Return the same from samples of the servers' loads."""
    loads = [load for load in recording.loads if not load.waiting]
    episodes = sum(timeline.num_running(load.time) for load in loads) / recording.settings.servers
    if episodes < 10:
        return asked
    return min(asked, max(1.0, sum(load.running for load in loads) / episodes))


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
