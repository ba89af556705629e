"""A world whose truth is known: servers that decode token by token, and the recordings of runs in it.

Admission, batches and trainer are those of the re-run. Servers are not: every decode step is an event, each sample has
its own length, prompts are computed when a group starts, and at most `max_running` sequences run at once.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from arealite.core.foresee.core_sharing import CoreUse
from arealite.core.foresee.gpu_sharing import GpuShare
from arealite.core.foresee.recording import PlayedEpisode, PlayedStep, Recording, ServerLoad, Settings
from arealite.core.foresee.rerun import Scenario, _Run, _Station
from arealite.core.foresee.resources import ServerUse, StepTime
from arealite.inference.timing.step_times import StepTimes, context_of
from arealite.utils.step_context import NO_CONTEXT, StepContext

SAMPLE_S = 2.0


@dataclass(frozen=True)
class World:
    """Costs in seconds. `loads` and `step_s` are points of the curve of a decode step."""

    loads: Sequence[float]
    step_s: Sequence[float]
    shared: CoreUse | GpuShare | None = None
    # For each prompt token, and for each step with prompts.
    prompt_s: float = 0.0
    pass_s: float = 0.0
    prompt_tokens: int = 6
    max_running: int = 1024
    batch: int = 32
    samples: int = 8
    train_s: float = 0.5
    update_s: float = 0.05
    # Median and sigma of the lengths of answers, the longest, and how much the samples of a group differ.
    length: tuple[float, float, int] = (20.0, 1.2, 400)
    spread: float = 0.0
    # For each token of the running sequences, and for each by which their lengths deviate.
    context_s: float = 0.0
    spread_s: float = 0.0
    # From the last token of a group until its episode has it.
    latency_s: float = 0.0

    def seconds(self, load: int, context: StepContext = NO_CONTEXT) -> float:
        return self._of_load(load) + self.context_s * context.tokens + self.spread_s * context.spread

    def _of_load(self, load: int) -> float:
        i = next((i for i, known in enumerate(self.loads) if known > load), len(self.loads) - 1)
        if i == 0:
            return self.step_s[0]
        slope = (self.step_s[i] - self.step_s[i - 1]) / (self.loads[i] - self.loads[i - 1])
        return self.step_s[i - 1] + slope * (load - self.loads[i - 1])

    def lengths(self, row: int) -> list[int]:
        rng, (median, sigma, most) = random.Random(row), self.length
        group = rng.lognormvariate(math.log(median), sigma)
        drawn = (group * rng.lognormvariate(0.0, self.spread) for _ in range(self.samples))
        return [max(1, min(most, round(length))) for length in drawn]


@dataclass(eq=False)
class _Answer:
    left: int
    length: int
    # Shared by the samples of a group: how many are left, and what their end does.
    group: SimpleNamespace = field(default_factory=SimpleNamespace)


class _TokenServer(_Station):
    """Its only job is the present decode step."""

    def __init__(self, world: World):
        super().__init__()
        self.world, self.times = world, StepTimes()
        self.running: list[_Answer] = []
        self.queue: deque[_Answer] = deque()
        self.step_s, self.num_prompts, self.decoded = 0.0, 0, NO_CONTEXT

    def submit(self, lengths: Sequence[int], action: Callable[[], None]) -> None:
        group = SimpleNamespace(left=len(lengths), action=action, has_prompt=True)
        self.queue.extend(_Answer(length, self.world.prompt_tokens, group) for length in lengths)
        self.start_step()

    def start_step(self) -> None:
        if self.jobs:
            return
        self.num_prompts = 0
        while self.queue and len(self.running) < self.world.max_running:
            answer = self.queue.popleft()
            self.num_prompts += self.world.prompt_tokens if answer.group.has_prompt else 0
            answer.group.has_prompt = False
            self.running.append(answer)
        if self.running:
            self.decoded = context_of(np.array([answer.length for answer in self.running]))
            prompts_s = self.world.prompt_s * self.num_prompts + self.world.pass_s * (self.num_prompts > 0)
            self.step_s = self.world.seconds(len(self.running), self.decoded) + prompts_s
            self.jobs = [(self.done + self.step_s, 0, lambda: None)]

    def end_step(self, seconds: float) -> list[Callable[[], None]]:
        self.jobs = []
        self.times.add(len(self.running), self.num_prompts, seconds, self.step_s, self.decoded)
        ended = []
        for answer in self.running:
            answer.left -= 1
            answer.length += 1
            if answer.left == 0:
                answer.group.left -= 1
                ended += [answer.group.action] if answer.group.left == 0 else []
        self.running = [answer for answer in self.running if answer.left > 0]
        return ended


class _TokenRun(_Run):
    """A run in a world."""

    def __init__(self, world: World, settings: Settings, num_steps: int, num_rows: int):
        rows = [
            PlayedEpisode(i, "trained", 0, None, world.samples, 0, 0.0, 1.0, (("generate", 1.0),))
            for i in range(num_rows)
        ]
        steps = [PlayedStep(i, float(i), 0.0, 0.0, 0.0) for i in range(num_steps)]
        works = (
            [[world.lengths(row)] for row in range(num_rows)],
            [(world.train_s, world.train_s + world.update_s)] * num_steps,
        )
        speed = SimpleNamespace(most=math.inf, prompt_s=0.0, pass_s=0.0, latency_s=0.0)
        made = SimpleNamespace(recording=Recording(settings, steps, rows), works=works, speed=speed)
        super().__init__(made, Scenario(settings))  # type: ignore[arg-type]
        self.world = world
        self.servers = [_TokenServer(world) for _ in range(self.num_servers)]
        self.began: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.versions: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.updated_at: list[float] = []
        self.waits_at: list[float] = []
        self.loads: list[ServerLoad] = []
        self.step_began: dict[_Station, float] = {}

    def _sample(self) -> None:
        self.loads += [ServerLoad(self.now, len(s.running), len(s.queue)) for s in self.servers]
        self._later(SAMPLE_S, self._sample)

    def play(self):
        self._later(0.0, self._sample)
        return super().play()

    def _add_job(self, station, work, action):
        if station is self.trainer:
            return super()._add_job(station, work, action)
        station.advance(self.now)
        had_step = bool(station.jobs)
        station.submit(work, action)
        if not had_step:
            self.step_began[station] = self.now
        self._set_rates()

    def _end_job(self, station):
        if station is self.trainer:
            return super()._end_job(station)
        station.advance(self.now)
        ended = station.end_step(self.now - self.step_began[station])
        for action in ended:
            self._later(self.world.latency_s, action) if self.world.latency_s else action()
        self._admit()
        station.start_step()
        self.step_began[station] = self.now
        self._set_rates()

    def _set_rates(self):
        is_busy = bool(self.trainer.jobs)
        active = [server for server in self.servers if server.running]
        tokens_per_s = sum(len(s.running) / s.world.seconds(len(s.running), s.decoded) for s in active)
        for station in (*self.servers, self.trainer):
            station.advance(self.now)
        if self.world.shared is not None:
            shares = self.world.shared.speeds(len(active), tokens_per_s, is_busy)
            for server in self.servers:
                server.share = shares.server
            self.trainer.share = shares.trainer

    def _begin_part(self, row, index):
        if index == 0:
            self.began[row], self.versions[row] = self.now, self.manager.version
        super()._begin_part(row, index)

    def _end_episode(self, row, state):
        self.ended[row] = self.now
        super()._end_episode(row, state)

    def _train(self, waited_s):
        for row in sorted(self.finished)[: self.batch]:
            self.used[row] = self.step
        super()._train(waited_s)

    def _set_version(self):
        self.updated_at.append(self.now)
        super()._set_version()

    def _wait(self):
        self.waits_at.append(self.now)
        super()._wait()


def record(world: World, eta: int, num_steps: int = 20, lead: int | None = None, with_trial: bool = True) -> Recording:
    """Run in a world; returns what such a run records."""
    settings = Settings(world.batch, eta, lead, None, 1)
    run = _TokenRun(world, settings, num_steps, world.batch * (num_steps + eta + 2))
    rerun = run.play()
    total_s = world.train_s + world.update_s
    steps = []
    for number, (ready_at, waited_s) in enumerate(zip(rerun.ready_at, rerun.waited_s, strict=True)):
        has_ended = number < len(run.waits_at)
        update_s = run.updated_at[number] - ready_at if has_ended else world.train_s
        steps.append(
            PlayedStep(number, ready_at, waited_s, update_s, run.waits_at[number] - ready_at if has_ended else total_s)
        )
    episodes = []
    for row, end in sorted(run.ended.items()):
        began, seconds = run.began[row], end - run.began[row]
        tokens = sum(world.lengths(row)) + world.samples * world.prompt_tokens
        episodes.append(
            PlayedEpisode(
                row,
                "trained",
                run.versions[row],
                run.used.get(row),
                world.samples,
                tokens,
                began,
                end,
                (("generate", seconds),),
            )
        )
    unfinished = [
        PlayedEpisode(
            row, "running", run.versions[row], None, world.samples, 0, at, run.now, (("generate", run.now - at),)
        )
        for row, at in sorted(run.began.items())
        if row not in run.ended
    ]
    on_gpu = not isinstance(world.shared, CoreUse)
    rows = [StepTime(*row) for server in run.servers for row in server.times.rows()]
    engine_s = sum(row.cpu_s for row in rows)
    trial = _trial(world) if with_trial else []
    use = ServerUse(rows, None if on_gpu else engine_s, trial)
    cores = None if on_gpu else world.shared
    shares_gpu = on_gpu and world.shared is not None
    return Recording(settings, steps, episodes, (), use, cores, run.loads, world.max_running, shares_gpu, unfinished)


def _trial(world: World) -> list[StepTime]:
    """Return what servers measure at their start."""
    found = [(load, StepContext(20 * load)) for load in (1 << i for i in range(9))]
    found += [(64, StepContext(5120, 4600.0)), (64, StepContext(16384))]
    rows = []
    for load, context in found:
        seconds = 4 * world.seconds(load, context)
        rows.append(StepTime(4, 4 * load, 0, seconds, seconds, 4 * context.tokens, 4 * context.spread))
    return rows
