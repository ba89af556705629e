"""Scales costs until a simulation of a recorded run, at its own settings, takes the recorded time.

Counters of servers and times of phases are measured while servers and trainer disturb each other, and some runs have
few of them. Ratios between settings come from the model; the level comes from here. CPU seconds need little of that:
servers are scaled only as far as the step time tells something about them (`match_servers`).
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from arealite.api.cli_args import InferenceEngineConfig
from arealite.plan.costs import ServerCost, TrainCost, UpdateCost
from arealite.plan.measured import Measured
from arealite.plan.simulate import Prediction, Setup, simulate

# The first steps load, compile and fill the pipeline.
FILLING_STEPS = 2
_MAX_ROUNDS = 10
_CLOSE = 0.02
# Below this share of waiting the step time says nothing about the servers; the time of generation does.
_WAITS = 0.1
# Standard error of a step time, simulated or recorded: steps are few, and influence each other.
_STEP_ERROR = 0.03
# Costs are varied by this much, up and down.
_NEAR = 0.15
_MAX_ANSWERS = 12_000
_NO_LIMIT_S = 1e7


class Target(NamedTuple):
    """Mean seconds of a recorded run: waiting and working in a step, generation of an episode."""

    wait_s: float
    work_s: float
    generate_s: float

    @property
    def step_s(self) -> float:
        return self.wait_s + self.work_s


def own_setup(measured: Measured) -> Setup:
    """Return the setup of the run itself."""
    limits = dict.fromkeys(("request_timeout_s", "episode_timeout_s", "batch_timeout_s"), _NO_LIMIT_S)
    rollout = InferenceEngineConfig(
        max_head_offpolicyness=measured.eta, adaptive_lead=measured.adaptive_lead,
        max_concurrent_rollouts=measured.max_concurrent, **limits,
    )  # fmt: skip
    work = measured.workload
    steps = min(20, max(4, _MAX_ANSWERS // (work.prompts * work.samples)))
    # The same steps as those that were measured: lengths of few episodes vary.
    steps = min(steps, measured.num_steps)
    costs = measured.server, measured.train, measured.update
    return Setup(work, measured.num_servers, *costs, rollout, steps, FILLING_STEPS, cores=measured.cores)


def match(measured: Measured, target: Target) -> Measured:
    """Return the costs with which a step of the run comes nearest to its recorded time."""
    best, least = measured, float("inf")
    servers, trainer = _Search(), _Search()
    for number in range(_MAX_ROUNDS):
        found = simulate(own_setup(measured))
        work_s = found.step_s - found.mean("wait_s")
        error = abs(found.step_s / target.step_s - 1) + 0.5 * abs(work_s / target.work_s - 1)
        if error < least:
            best, least = measured, error
        if error < _CLOSE:
            break
        slower = servers.next_ratio(_server_ratio(measured.eta, found, target, is_first=number == 0))
        longer = trainer.next_ratio(target.work_s / max(work_s, 1e-9))
        train, update = scaled_train(measured.train, longer), scaled_update(measured.update, longer)
        measured = replace(measured, server=_scaled_server(measured.server, slower), train=train, update=update)
    return best


def match_servers(measured: Measured, target: Target, cost_error: float) -> Measured:
    """Return the costs with servers that are slower by what the recorded step time tells about them.

    For costs in CPU seconds, which have a standard error. Where a step hardly depends on the servers (slower ones have
    more sequences at once), its time says little about them: a line through several simulations tells.
    """
    first = _log_error(measured, target)
    if abs(first) < _CLOSE:
        return measured
    changes = [*np.linspace(-first - _NEAR, -first + _NEAR, _MAX_ROUNDS - 2).tolist()]
    errors = [_log_error(_with_slower_servers(measured, change), target) for change in changes]
    slope, error = np.polyfit([0.0, *changes], [first, *errors], 1).tolist()
    # The most likely change, if steps and costs have these errors.
    change = -slope * error / (slope * slope + (_STEP_ERROR / cost_error) ** 2)
    return _with_slower_servers(measured, change)


def _with_slower_servers(measured: Measured, change: float) -> Measured:
    return replace(measured, server=_scaled_server(measured.server, math.exp(change)))


def _log_error(measured: Measured, target: Target) -> float:
    return math.log(simulate(own_setup(measured)).step_s / target.step_s)


class _Search:
    """Turns ratios of target to result into those of costs; smaller ones after each change of direction."""

    def __init__(self) -> None:
        self._power, self._last = 1.0, 1.0

    def next_ratio(self, ratio: float) -> float:
        ratio = min(max(ratio, 0.01), 100.0)
        if (ratio - 1) * (self._last - 1) < 0:
            self._power /= 2
        self._last = ratio
        return ratio**self._power


def _server_ratio(eta: int, found: Prediction, target: Target, is_first: bool) -> float:
    """Return by how much slower servers must be."""
    nobody_waits = target.wait_s < _WAITS * target.step_s and found.mean("wait_s") < _WAITS * found.step_s
    if target.generate_s > 0 and (is_first or nobody_waits):
        return target.generate_s / max(found.generate_s, 1e-9)
    return target.wait_s / max(found.mean("wait_s"), 1e-9) if eta == 0 else target.step_s / found.step_s


def _scaled_server(cost: ServerCost, ratio: float) -> ServerCost:
    decoding = ("step_s", "weights_s", "compute_s", "sequence_s", "context_s", "spread_s")
    names = (*decoding, "prompt_s", "pass_s", "request_s")
    curve = None if cost.curve is None else cost.curve.scaled(ratio)
    return replace(cost, curve=curve, **{name: getattr(cost, name) * ratio for name in names})


def scaled_train(cost: TrainCost, ratio: float) -> TrainCost:
    return replace(cost, token_s=cost.token_s * ratio, pair_s=cost.pair_s * ratio, step_s=cost.step_s * ratio)


def scaled_update(cost: UpdateCost, ratio: float) -> UpdateCost:
    return replace(cost, publish_s=cost.publish_s * ratio, load_s=cost.load_s * ratio, pause_s=cost.pause_s * ratio)
