"""Costs of a recorded run on CPU: the trainer's by its CPU seconds, the servers' by what the step time tells."""

from dataclasses import replace
from statistics import mean

import pytest

from arealite.core.foresee.core_sharing import CoreUse
from arealite.core.foresee.recorded_work import Timeline
from arealite.core.foresee.recording import PlayedEpisode, PlayedStep, Recording, Settings
from arealite.core.foresee.resources import ServerUse, StepTime
from arealite.core.foresee.speed import fit_devices, switching
from arealite.plan.costs import ServerCost, TrainCost, UpdateCost
from arealite.plan.match import Target, match_servers, own_setup
from arealite.plan.measured import Measured
from arealite.plan.recorded import _alone
from arealite.plan.simulate import simulate
from arealite.plan.workload import Distribution, EpisodeShape, Workload

LENGTHS = Distribution("constant", (10.0,)), Distribution("lognormal", (60.0, 1.0, 400.0))
MEASURED = Measured(
    Workload(8, 2, *LENGTHS), 1, ServerCost(0.01), TrainCost(0.0, step_s=0.6), UpdateCost(), eta=0, num_steps=6
)


def server_s(measured):
    return measured.server.base_s(8)


def step_s(measured):
    return simulate(own_setup(measured)).step_s


@pytest.mark.parametrize("slower", [0.7, 1.4])
def test_servers_that_decide_the_step_time_are_scaled_to_it(slower):
    truth = replace(MEASURED, server=ServerCost(0.01 * slower))
    found = match_servers(MEASURED, Target(step_s(truth) - 0.6, 0.6, 0.0), cost_error=0.2)
    assert step_s(found) == pytest.approx(step_s(truth), rel=0.03)
    assert server_s(found) == pytest.approx(server_s(truth), rel=0.05) and found.train == MEASURED.train


def test_a_step_time_that_does_not_depend_on_servers_says_nothing_about_them():
    slow_trainer = replace(MEASURED, eta=4, train=TrainCost(0.0, step_s=20.0))
    target = Target(0.0, 1.1 * step_s(slow_trainer), 0.0)
    assert server_s(match_servers(slow_trainer, target, 0.05)) == pytest.approx(server_s(MEASURED), rel=0.02)


def test_known_costs_are_scaled_less_than_uncertain_ones():
    target = Target(1.1 * step_s(MEASURED) - 0.6, 0.6, 0.0)
    little, more = (server_s(match_servers(MEASURED, target, error)) for error in (0.02, 0.2))
    assert server_s(MEASURED) < little < more


# A trainer that works in half of the time of two servers, on two cores.
STEPS = [PlayedStep(number, 10.0 + 2 * number, 1.0, 0.9, 1.0) for number in range(4)]
EPISODES = [
    PlayedEpisode(number, "trained", 0, number // 2, 1, 100, 9.0, 17.0, (("generate", 8.0),)) for number in range(8)
]
ROWS = [StepTime(100, 100, 0, 1.0, 0.5), StepTime(100, 6400, 0, 4.0, 2.0)]
RECORDING = Recording(
    Settings(2, servers=2), STEPS, EPISODES, server_use=ServerUse(ROWS, 2.5), cores=CoreUse(2.0), max_running=64
)


def test_the_time_in_which_both_work():
    timeline = Timeline(RECORDING)
    assert timeline.overlap() == pytest.approx(0.5) and timeline.trainer_overlap() == pytest.approx(1.0)
    alone = replace(RECORDING, steps=[step._replace(ready_at=step.ready_at + 100) for step in STEPS])
    assert Timeline(alone).overlap() == Timeline(alone).trainer_overlap() == 0


def test_costs_are_those_without_switching():
    # Three processes on two cores for half of the servers' time, and for all of the trainer's.
    assert switching(RECORDING) == pytest.approx((1.075, 1.15))
    curve, _ = fit_devices(RECORDING)
    assert curve is not None and curve.seconds == pytest.approx((0.005 / 1.075, 0.02 / 1.075))
    many = replace(RECORDING, cores=CoreUse(8.0))
    assert switching(many) == (1, 1) == switching(replace(RECORDING, cores=None))
    assert fit_devices(many)[0].seconds == pytest.approx((0.005, 0.02))


def test_the_trainer_needs_its_cpu_seconds():
    lines = [{"step": n, "time/step": 2.0, "cpu/cores": 2.0, "cpu/trainer": 0.575} for n in range(4)]
    target = Target(1.0, 1.0, 0.0)
    assert _alone(RECORDING, lines, target) == pytest.approx(0.5)
    # A step with a long evaluation says nothing, nor do runs without counters.
    evaluated = {**lines[0], "time/evaluate": 1.0, "cpu/trainer": 100.0}
    assert _alone(RECORDING, [evaluated, *lines], target) == pytest.approx(0.5)
    assert _alone(replace(RECORDING, cores=None), lines, target) is None
    # Two threads at full speed.
    threads = replace(RECORDING, cores=CoreUse(8.0, trainer=2.0))
    assert _alone(threads, [{**line, "cpu/trainer": 2.0} for line in lines], target) == 1


def test_turns_of_a_recorded_episode_wait_for_all_samples_and_compute_their_prompts():
    shape = EpisodeShape(10.0, [[20.0, 50.0], [100.0, 10.0], [0.0, 0.0]], [0.5, 1.0], [0.0, 0.5, 0.25], 0.0, 30.0)
    work = Workload(4, 2, *LENGTHS, episodes=(shape,))
    server = ServerCost(0.01, prompt_s=1e-3)
    found = simulate(own_setup(replace(MEASURED, workload=work, server=server)))
    # Steps of the longest sample of each turn, waits, and 30 prompt tokens of each of four episodes and two turns.
    assert found.mean("wait_s") == pytest.approx(0.01 * (50 + 100) + 0.75 + 2 * 4 * 30e-3, rel=0.01)
    tokens = mean(step.answer_tokens for step in found.steps)
    assert tokens == pytest.approx(4 * (0.5 * 120 + 60))
