"""Runs a training job on virtual time and measures it: `simulate(Setup)` returns a `Prediction`.

The trainer's loop is the one of `trainer.ppo` with waits of modelled length instead of work. Executor, staleness limit,
lead, ledger, router and fleet are those of a real run. The same setup and seed give the same prediction.
"""

import gc
import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError
from arealite.api.io_struct import Batch, WeightUpdateMeta
from arealite.core.foresee.core_sharing import CoreUse
from arealite.core.foresee.gpu_sharing import GpuShare
from arealite.core.ledger.store import Ledger
from arealite.core.staleness_manager import FixedLead
from arealite.plan.costs import ServerCost, TrainCost, UpdateCost
from arealite.plan.server_model import DecodingServer
from arealite.plan.shared_cores import SharedCores
from arealite.plan.simulated_engine import SimulatedEngine
from arealite.plan.virtual_time import VirtualLoop
from arealite.plan.workload import TOKENS, Rows, SimulatedWorkflow, Workload
from arealite.utils.activity import activity

# Answers that a simulation trains on, unless its number of steps is given: a minute at most on one core.
_MAX_ANSWERS = 130_000
_LEAST_STEPS, _MOST_STEPS = 3, 40


class Crash(NamedTuple):
    """A server dies at a time and comes back after `restart_s`; None: never."""

    at_s: float
    server: int
    restart_s: float | None


@dataclass(frozen=True)
class Setup:
    """Everything that a prediction depends on."""

    workload: Workload
    num_servers: int
    server: ServerCost
    train: TrainCost
    update: UpdateCost = field(default_factory=UpdateCost)
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    # Measured steps; None: as many as are cheap. The steps before them fill the pipeline.
    steps: int | None = None
    warm_up: int | None = None
    crashes: tuple[Crash, ...] = ()
    # Cores that servers and trainer share; None: each has its own devices.
    cores: CoreUse | GpuShare | None = None
    seed: int = 1
    ledger_path: Path | None = None
    # How many batches generation runs ahead; None: as `rollout` says.
    lead: int | None = None

    @property
    def eta(self) -> int:
        return self.rollout.max_head_offpolicyness

    def num_steps(self) -> tuple[int, int]:
        """Return how many steps fill the pipeline, and how many are measured."""
        # With the rules of the lead, its first trial has then ended.
        fill = min(2 * self.eta + 2, 14) if self.rollout.adaptive_lead and self.eta > 1 else min(self.eta + 2, 8)
        cheap = _MAX_ANSWERS // (self.workload.prompts * self.workload.samples)
        if self.steps is None and cheap < fill + _LEAST_STEPS:
            fill = max(2, cheap // 2)
        fill = fill if self.warm_up is None else self.warm_up
        return fill, self.steps or min(max(cheap - fill, _LEAST_STEPS), _MOST_STEPS)


@dataclass(frozen=True)
class Step:
    """One training step. Its seconds add up to the time between two batches."""

    seconds: float
    wait_s: float
    train_s: float
    update_s: float
    # Trained tokens, with prompts, and those of answers.
    tokens: float
    answer_tokens: float


@dataclass(frozen=True)
class Prediction:
    """What a run would do, measured over its steps without the first ones."""

    steps: list[Step]
    # Shares of samples by the age of their oldest token, and of generated tokens by age, in versions.
    sample_ages: dict[int, float]
    token_ages: dict[int, float]
    server_idle: float
    # Mean sequences that a busy server decodes.
    mean_running: float
    num_preemptions: int
    most_in_flight: int
    counts: dict[str, float]
    # Mean seconds that an episode generates.
    generate_s: float = 0.0
    # The two leads of the last trial if its margin was small; see `core.staleness_manager.Lead`.
    close_leads: tuple[int, int] | None = None

    @property
    def step_s(self) -> float:
        return sum(step.seconds for step in self.steps) / len(self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second, with prompts."""
        return sum(step.tokens for step in self.steps) / sum(step.seconds for step in self.steps)

    @property
    def answer_tokens_per_s(self) -> float:
        return sum(step.answer_tokens for step in self.steps) / sum(step.seconds for step in self.steps)

    @property
    def trainer_idle(self) -> float:
        return sum(step.wait_s for step in self.steps) / sum(step.seconds for step in self.steps)

    @property
    def mean_age(self) -> float:
        """Mean age of samples, in versions."""
        return sum(age * share for age, share in self.sample_ages.items())

    def mean(self, name: str) -> float:
        return sum(getattr(step, name) for step in self.steps) / len(self.steps)


class _Simulation:
    """The parts of one simulated run."""

    def __init__(self, setup: Setup, loop: VirtualLoop):
        self.setup, self.loop = setup, loop
        addresses = [f"server-{i}:80" for i in range(setup.num_servers)]
        self.models = {address: DecodingServer(loop, setup.server) for address in addresses}
        self.cores = None if setup.cores is None else SharedCores(loop, setup.cores, list(self.models.values()))
        ledger = None if setup.ledger_path is None else Ledger(setup.ledger_path)
        config = replace(setup.rollout, dump_rollouts=False)
        if not setup.crashes:
            # Health checks that cannot fail would cost most of the time of a large simulation.
            config = replace(config, health_timeout_s=1e6)
        may_fail = bool(setup.crashes)
        self.engine = SimulatedEngine(config, loop, self.models, setup.update, ledger, setup.seed, may_fail)
        self.engine.initialize(train_batch_size=setup.workload.prompts)
        if setup.lead is not None:
            self.engine.executor.staleness.lead = FixedLead(setup.lead, setup.eta)
        self.rows, self.workflow = Rows(setup.workload, setup.seed), SimulatedWorkflow()
        for crash in setup.crashes:
            if crash.server >= setup.num_servers:
                raise ConfigError(f"server {crash.server} cannot crash: the servers are 0 to {setup.num_servers - 1}")
            loop.call_later(crash.at_s, self.engine.crash, addresses[crash.server], crash.restart_s)

    def work(self, seconds: float) -> None:
        """Let the trainer work for so long, on its own devices or on shared cores."""
        if self.cores is None:
            self.loop.run_for(seconds)
        else:
            self.cores.work(seconds)

    def step(self, version: int) -> tuple[Step, Batch]:
        began = self.loop.time()
        batch = self.engine.prepare_batch(self.rows, self.workflow)
        got = self.loop.time()
        tokens = batch[TOKENS]
        train_s = self.setup.train.seconds(_lengths_by_group(batch))
        self.work(train_s)
        trained = self.loop.time()
        self.work(self.setup.update.publish_s)
        self.engine.update_weights(WeightUpdateMeta("disk", "virtual", version + 1))
        end = self.loop.time()
        total, prompts = float(tokens.sum()), float(tokens[:, 0].sum())
        return Step(end - began, got - began, trained - got, end - trained, total, total - prompts), batch

    def busy(self) -> tuple[float, float]:
        """Return the busy seconds of all servers, and the integral of their running sequences."""
        for model in self.models.values():
            model.info()
        busy_s = sum(model.busy_s for model in self.models.values())
        return busy_s, sum(model.sequence_s for model in self.models.values())


def simulate(setup: Setup) -> Prediction:
    """Simulate a run. Raises the errors of the real executor, for example for waits past their deadline."""
    _check(setup)
    loop = VirtualLoop()
    with loop.clock(), _undisturbed():
        try:
            return _run(_Simulation(setup, loop))
        finally:
            loop.shut_down()


def _check(setup: Setup) -> None:
    if setup.num_servers < 1:
        raise ConfigError(f"a run needs at least one server, got {setup.num_servers}")
    if setup.server.base_s(1) <= 0:
        raise ConfigError("a decode step must take time: the costs of the server are all 0")
    longest, room = setup.workload.longest_sequence, setup.server.cache_tokens
    if longest > room:
        raise ConfigError(
            f"the longest sequence has {longest:,.0f} tokens, and the KV cache of a server holds {room:,.0f}: servers "
            "refuse it. Give shorter --lengths or --prompt-lengths, a larger t for servers, or a larger GPU"
        )


def _run(simulation: _Simulation) -> Prediction:
    setup, loop = simulation.setup, simulation.loop
    num_fill, num_steps = setup.num_steps()
    steps: list[Step] = []
    samples: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    most_in_flight, began, busy_before = 0, 0.0, (0.0, 0.0)
    for number in range(num_fill + num_steps):
        if number == num_fill:
            began, busy_before = loop.time(), simulation.busy()
            simulation.workflow.reset()
        step, batch = simulation.step(number)
        most_in_flight = max(most_in_flight, simulation.workflow.most_running)
        if number >= num_fill:
            steps.append(step)
            _count_ages(batch, number, samples, tokens)
    busy_s, sequence_s = (now - before for now, before in zip(simulation.busy(), busy_before, strict=True))
    available_s = (loop.time() - began) * setup.num_servers
    counts, lead = simulation.engine.stats(), simulation.engine.executor.staleness.lead
    simulation.engine.destroy()
    return Prediction(
        steps,
        _shares(samples),
        _shares(tokens),
        max(0.0, 1 - busy_s / available_s) if available_s else 0.0,
        sequence_s / busy_s if busy_s else 0.0,
        sum(model.num_preemptions for model in simulation.models.values()),
        most_in_flight,
        counts,
        simulation.workflow.generate_s / max(1, simulation.workflow.num_ended),
        None if lead is None else lead.close,
    )


def _lengths_by_group(batch: Batch) -> list[list[float]]:
    lengths, groups = batch[TOKENS].sum(1).tolist(), batch["group_ids"].tolist()
    found: dict[int, list[float]] = {}
    for group, length in zip(groups, lengths, strict=True):
        found.setdefault(group, []).append(length)
    return list(found.values())


def _count_ages(batch: Batch, version: int, samples: Counter[int], tokens: Counter[int]) -> None:
    versions, counts = batch["versions"].numpy(), batch[TOKENS].numpy()
    made = versions >= 0
    ages = np.where(made, version - versions, 0)
    for age, count in enumerate(np.bincount(ages.max(1)).tolist()):
        samples[age] += count
    for age, count in enumerate(np.bincount(ages[made], weights=counts[made]).tolist()):
        tokens[age] += count


def _shares(counts: Counter[int]) -> dict[int, float]:
    total = sum(counts.values())
    return {age: count / total for age, count in sorted(counts.items()) if count}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Switch off messages of the executor, and the garbage collector, which would search all episodes."""
    log = logging.getLogger("arealite.executor")
    level, interval_s = log.level, activity.interval_s
    # Its warnings, and lines that name what it waits for, are for the owner of a real run.
    log.setLevel(logging.CRITICAL)
    activity.interval_s = None
    was_on, threads = gc.isenabled(), torch.get_num_threads()
    gc.disable()
    # Tensors are tiny here.
    torch.set_num_threads(1)
    try:
        yield
    finally:
        log.setLevel(level)
        activity.interval_s = interval_s
        torch.set_num_threads(threads)
        if was_on:
            gc.enable()


def ideal_step_s(setup: Setup) -> float:
    """Return the step time if generation and training overlapped perfectly: a first, cheap estimate."""
    w = setup.workload
    answers = w.prompts * w.samples
    running = min(setup.server.max_running, math.ceil(answers * (setup.eta + 1) / setup.num_servers))
    context = w.prompt_tokens.mean() + w.answer_tokens.mean() * w.turns / 2
    running = max(1.0, min(running, setup.server.cache_tokens / context))
    speed = setup.num_servers * setup.server.tokens_per_s(running, context)
    generate_s = answers * w.turns * w.answer_tokens.mean() / speed
    length = w.sequence_tokens
    train_s = setup.train.seconds([[length] * w.samples] * w.prompts) + setup.update.publish_s + setup.update.load_s
    return max(generate_s, train_s) if setup.eta else generate_s + train_s
