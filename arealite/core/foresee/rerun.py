"""Runs the durations of a recording again under other settings: a small event simulation.

Admission, staleness and lead are decided by the `StalenessManager` and `Lead` of real runs, and batches are filled as
by the executor: oldest first, stale ones dropped, stragglers waited for. Episodes keep their parts: rewards and tools
take their recorded time, generation shares a server with what else runs there. Steps keep their work. Servers and
trainer slow each other down if they share cores or a GPU (`speed`). At its own settings a recording gives its own times
again.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from arealite.core.foresee.lengths import Lengths
from arealite.core.foresee.prompt_passes import PromptPasses
from arealite.core.foresee.recorded_work import GENERATE, mean_generated, recorded_work
from arealite.core.foresee.recording import Recording, Settings
from arealite.core.foresee.speed import GenerationSpeed, fit_speed
from arealite.core.staleness_manager import FixedLead, Lead, StalenessManager
from arealite.utils.step_context import NO_CONTEXT, StepContext

_ENDED_WITHOUT_RESULT = ("rejected", "failed")


@dataclass(frozen=True)
class Scenario:
    """Settings, and by which factor parts are faster: kinds of parts of episodes, or `trainer`."""

    settings: Settings
    speeds: dict[str, float] = field(default_factory=dict)


@dataclass
class Rerun:
    """What a re-run measured between its first and its last batch."""

    ready_at: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    # Trained samples by age, and episodes that were dropped because they were too old.
    ages: Counter[int] = field(default_factory=Counter)
    num_stale: int = 0
    # The two leads of the last trial if its margin was small; see `Lead`.
    close_leads: tuple[int, int] | None = None

    @property
    def step_s(self) -> float:
        return (self.ready_at[-1] - self.ready_at[0]) / max(1, len(self.ready_at) - 1)

    @property
    def wait_share(self) -> float:
        return sum(self.waited_s[1:]) / max(self.ready_at[-1] - self.ready_at[0], 1e-9)

    @property
    def mean_age(self) -> float:
        return sum(age * number for age, number in self.ages.items()) / max(1, self.ages.total())


class _Station:
    """A server, or the trainer. All its jobs progress at the same rate, on an axis of their own, `done`.

    At most `most` jobs run at once. A job that starts holds up all of them for `start_s`, and jobs that start in the
    same step for `pass_s`.
    """

    def __init__(self, most: float = float("inf"), start_s: float = 0.0, pass_s: float = 0.0) -> None:
        self.most, self.start_s = most, start_s
        self.passes = PromptPasses(pass_s)
        # The work on that axis at which a job ends and at which it began.
        self.jobs: list[tuple[float, int, Callable[[], None], float]] = []
        self.lengths = Lengths()
        self.waiting: deque[tuple[float, int, Callable[[], None]]] = deque()
        self.done = self.at = self.debt_s = 0.0
        # Work in a second, and the share of the device that it has.
        self.rate = self.share = 1.0

    def advance(self, now: float) -> None:
        """Count the work until now, at the present rate."""
        worked_s, self.at = (now - self.at) * self.share if self.jobs else 0.0, now
        paid_s = min(worked_s, self.debt_s)
        self.debt_s -= paid_s
        self.done += (worked_s - paid_s) * self.rate

    def load(self) -> int:
        """Return the number of jobs, with those that wait."""
        return len(self.jobs) + len(self.waiting)

    def next_end(self) -> float:
        if not self.jobs:
            return float("inf")
        return self.at + (self.debt_s + max(0.0, self.jobs[0][0] - self.done) / self.rate) / self.share

    def start_waiting(self) -> None:
        while self.waiting and len(self.jobs) < self.most:
            work, order, action = self.waiting.popleft()
            heapq.heappush(self.jobs, (self.done + work, order, action, self.done))
            self.lengths.add(self.done)
            self.debt_s += self.start_s + self.passes.start(self.done)

    def end_job(self) -> Callable[[], None]:
        """Remove the job that ends first; returns what follows it."""
        _, _, action, began = heapq.heappop(self.jobs)
        self.lengths.remove(began)
        return action

    def context(self) -> StepContext:
        """Return the tokens of all jobs, half-way to the end of the first."""
        if not self.jobs:
            return NO_CONTEXT
        return self.lengths.context(self.done + max(0.0, self.jobs[0][0] - self.done) / 2)


class Simulation:
    """One re-run. `num_steps` defaults to those of the recording."""

    def __init__(self, recording: Recording, speed: GenerationSpeed | None = None):
        self.recording = recording
        self.speed = fit_speed(recording) if speed is None else speed
        self.works = recorded_work(recording, self.speed)
        if self.speed.steps is not None and self.speed.steps.context_s > 0:
            # What sequences have before they begin follows from the contexts that servers have counted.
            rows = recording.server_use.steps
            context = sum(row.context for row in rows) / max(1.0, sum(row.sequences for row in rows))
            start_tokens = max(0.0, context - mean_generated(self.works, recording))
            self.speed = self.speed._replace(start_tokens=start_tokens)
            self.works = recorded_work(recording, self.speed)

    def run(self, scenario: Scenario) -> Rerun:
        """Play all steps of the recording under a scenario."""
        return _Run(self, scenario).play()


class _Run:
    def __init__(self, simulation: Simulation, scenario: Scenario):
        settings, self.recording = scenario.settings, simulation.recording
        self.episodes = self.recording.started
        self.works, self.step_works = simulation.works
        self.speed, self.speeds = simulation.speed, scenario.speeds
        most, running = self.speed.most, settings.max_running_requests
        most = most if running is None else max(1.0, running / self.speed.samples)
        self.limits = most, self.speed.prompt_s, self.speed.pass_s
        # Those that have had a job: servers beyond the episodes at once have none.
        self.servers: list[_Station] = []
        self.num_servers = settings.servers
        self.trainer = _Station()
        eta, self.batch = settings.max_head_offpolicyness, settings.batch_size
        lead = Lead(eta) if settings.lead is None else FixedLead(settings.lead, eta)
        self.manager = StalenessManager(self.batch, eta, settings.max_concurrent_rollouts, lead)
        self.lead = lead
        self.manager.version = self.recording.steps[0].number
        self.manager.counts.admitted = self.manager.counts.accepted = self.manager.version * self.batch
        self.manager.counts.trained = self.manager.counts.accepted
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        # What the present rates were set for.
        self.rated: tuple[list[int], list[float], bool] | None = None
        self.order = count()
        self.next_row = 0
        # Started versions of running episodes by row, in order of start; finished rows as a heap.
        self.running: dict[int, int] = {}
        self.started: dict[int, int] = {}
        self.finished: list[int] = []
        # Since when the trainer waits; None: it works.
        self.waits_since: float | None = 0.0
        self.last_batch_at = 0.0
        self.step = 0
        self.result = Rerun()

    def factor(self, kind: str) -> float:
        return self.speeds.get(kind, 1.0)

    def play(self) -> Rerun:
        self._admit()
        while self.step < len(self.recording.steps):
            station = min((*self.servers, self.trainer), key=_Station.next_end)
            at, timed_at = station.next_end(), self.events[0][0] if self.events else float("inf")
            if at <= timed_at:
                self.now = at
                self._end_job(station)
            else:
                self.now, _, action = heapq.heappop(self.events)
                action()
            self._admit()
            self._collect()
        self.result.close_leads = self.lead.close
        return self.result

    def _add_job(self, station: _Station, work: float, action: Callable[[], None]) -> None:
        station.advance(self.now)
        station.waiting.append((work, next(self.order), action))
        station.start_waiting()
        self._set_rates()

    def _end_job(self, station: _Station) -> None:
        station.advance(self.now)
        action = station.end_job()
        station.start_waiting()
        self._set_rates()
        action()

    def _set_rates(self) -> None:
        """Give every station the speed that it has with all that is active now."""
        loads, is_busy = [len(server.jobs) for server in self.servers], bool(self.trainer.jobs)
        for server in self.servers:
            server.advance(self.now)
        rates = [self.speed.at(max(1, len(s.jobs)), is_busy, s.context()) for s in self.servers]
        if self.rated == (loads, rates, is_busy):
            return
        self.rated = loads, rates, is_busy
        shares = self.speed.shares(loads, rates, is_busy)
        for server, rate in zip(self.servers, rates, strict=True):
            server.rate, server.share = rate, self.factor(GENERATE) * shares.server
        self.trainer.advance(self.now)
        self.trainer.share = self.factor("trainer") * shares.trainer

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), action))

    # ---------------------------------------------------------------------------------------- episodes

    def _admit(self) -> None:
        number = max(0, self.manager.capacity())
        self.manager.admit(number)
        for _ in range(number):
            row, self.next_row = self.next_row, self.next_row + 1
            self.running[row] = self.started[row] = self.manager.version
            self._begin_part(row, 0)

    def _begin_part(self, row: int, index: int) -> None:
        """Begin a part of an episode; rows behind the last recorded one repeat the first ones."""
        place = row % len(self.works)
        episode, works = self.episodes[place], self.works[place]
        if index == len(works):
            return self._end_episode(row, episode.state)
        kind, work = episode.parts[index][0], works[index]

        def follow() -> None:
            self._begin_part(row, index + 1)

        if kind == GENERATE:
            server = self._choose_server()
            latency_s = self.speed.latency_s
            self._add_job(server, work, (lambda: self._later(latency_s, follow)) if latency_s else follow)
        else:
            self._later(work / self.factor(kind), follow)

    def _choose_server(self) -> _Station:
        """Return the server with the fewest jobs."""
        found = min(self.servers, key=_Station.load, default=None)
        if found is not None and (not found.load() or len(self.servers) == self.num_servers):
            return found
        self.servers.append(_Station(*self.limits))
        return self.servers[-1]

    def _end_episode(self, row: int, state: str) -> None:
        del self.running[row]
        if state in _ENDED_WITHOUT_RESULT:
            self.manager.reject()
        else:
            self.manager.accept()
            heapq.heappush(self.finished, row)

    # ----------------------------------------------------------------------------------------- trainer

    def _collect(self) -> None:
        """Give the trainer its batch if it waits and the batch is complete."""
        if self.waits_since is None:
            return
        oldest_allowed = self.manager.oldest_allowed
        if stale := [row for row in self.finished if self.started[row] < oldest_allowed]:
            self.finished = [row for row in self.finished if self.started[row] >= oldest_allowed]
            heapq.heapify(self.finished)
            for _ in stale:
                self.manager.drop_stale()
            self.result.num_stale += len(stale)
            self._admit()
        if len(self.finished) < self.batch:
            return
        waited_s, patience_s = self.now - self.waits_since, self.waits_since - self.last_batch_at
        first_running = next(iter(self.running.values()), None)
        if first_running is not None and first_running <= oldest_allowed and waited_s < patience_s - 1e-9:
            return self._later(patience_s - waited_s, lambda: None)
        self._train(waited_s)

    def _train(self, waited_s: float) -> None:
        for row in [heapq.heappop(self.finished) for _ in range(self.batch)]:
            samples = max(1, self.episodes[row % len(self.works)].samples)
            self.result.ages[self.manager.version - self.started.pop(row)] += samples
        self.manager.train(self.batch)
        self.lead.adapt(waited_s, self.now - self.last_batch_at, len(self.finished) >= self.batch)
        self.result.ready_at.append(self.now)
        self.result.waited_s.append(waited_s)
        self.waits_since, self.last_batch_at = None, self.now
        update_work, work = self.step_works[self.step]
        self.step += 1
        self._add_job(self.trainer, update_work, self._set_version)
        self._add_job(self.trainer, work, self._wait)
        self._admit()

    def _set_version(self) -> None:
        self.manager.version += 1

    def _wait(self) -> None:
        self.waits_since = self.now
