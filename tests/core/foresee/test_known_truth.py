"""What-if answers in worlds whose truth is known: steps by load, a limit of requests, prompts, shared devices."""

from dataclasses import replace

import pytest

from arealite.core.foresee.core_sharing import CoreUse
from arealite.core.foresee.gpu_sharing import GpuShare, fit_gpu_share
from arealite.core.foresee.prompt_passes import PromptPasses
from arealite.core.foresee.recorded_work import recorded_work
from arealite.core.foresee.recording import PlayedEpisode, PlayedStep, Recording, Settings
from arealite.core.foresee.resources import ServerUse, StepTime
from arealite.core.foresee.speed import GenerationSpeed, fit_speed
from arealite.core.foresee.step_curve import StepCurve, fit_step_curve
from arealite.core.foresee.what_if import WhatIf, parse_question
from tests.core.foresee.token_world import World, record

# Steps of a small model on an aarch64 core: kernels change between 8 and 16 sequences.
CPU = World(
    loads=(1, 8, 18, 41, 89, 182, 395, 700),
    step_s=(2.9e-3, 3.5e-3, 6.4e-3, 7.8e-3, 10.2e-3, 14.5e-3, 24e-3, 40e-3),
    shared=CoreUse(2, 1.06, 1.0, 1, 1.4e-5),
    prompt_s=4e-5,
    train_s=0.3,
    length=(12.0, 1.2, 250),
)
GPU = World(
    loads=(1, 64, 256, 512),
    step_s=(0.9e-3, 1.2e-3, 2.1e-3, 3.6e-3),
    shared=GpuShare(0.5, 0.75),
    prompt_s=1e-6,
    prompt_tokens=64,
    max_running=256,
    batch=16,
    train_s=0.2,
    update_s=0.05,
    length=(60.0, 1.2, 800),
)
WORLDS = {
    "cores": CPU,
    "a limit of requests": replace(CPU, max_running=128),
    "long prompts": replace(CPU, prompt_tokens=150),
    "passes of prompts": replace(CPU, pass_s=5e-3, max_running=128),
    "samples that differ": replace(CPU, length=(20.0, 0.6, 250), spread=0.8),
    "steps that depend on lengths": replace(CPU, context_s=0.23e-6, spread_s=0.3e-6),
    "a GPU": GPU,
}


def ask(asked, eta):
    return asked.ask(*parse_question([f"max_head_offpolicyness={eta}"], asked.recording.settings)).rerun.step_s


@pytest.mark.parametrize("name", WORLDS)
def test_each_run_predicts_the_others(name):
    runs = {eta: WhatIf(record(WORLDS[name], eta, 12)) for eta in (0, 1, 4)}
    ratios = {
        (source, eta): ask(asked, eta) / other.recorded_step_s
        for source, asked in runs.items()
        for eta, other in runs.items()
    }
    assert all(abs(ratio - 1) < 0.1 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("name, few, many", [("cores", 64, 512), ("a GPU", 64, 256)])
def test_servers_that_decode_more_at_once(name, few, many):
    """A server with a queue is too small; one that decodes all that come gains nothing."""
    world = replace(WORLDS[name], batch=64)
    small, large = (WhatIf(record(replace(world, max_running=running), 2, 12)) for running in (few, many))
    for asked, other, running in ((small, large, many), (large, small, few)):
        scenario = parse_question([f"server.max_running_requests={running}"], asked.recording.settings)
        assert asked.ask(*scenario).rerun.step_s == pytest.approx(other.recorded_step_s, rel=0.1)
    assert any(f"max_running_requests {few} → {2 * few}" in answer.question for answer in small.advise())
    idle = WhatIf(record(replace(world, max_running=4096), 2, 12))
    assert not any("max_running_requests" in answer.question for answer in idle.advise())


def test_answers_arrive_later_than_their_last_token():
    world = replace(GPU, latency_s=0.15)
    runs = {eta: WhatIf(record(world, eta, 12)) for eta in (0, 1, 4)}
    assert runs[0].simulation.speed.latency_s == pytest.approx(0.15, abs=0.02)
    ratios = [ask(runs[0], eta) / runs[eta].recorded_step_s for eta in runs]
    assert all(abs(ratio - 1) < 0.1 for ratio in ratios), ratios
    # A server that is never idle does not show it.
    assert runs[4].simulation.speed.latency_s == 0


def test_without_a_trial_the_loads_of_a_synchronous_run_are_not_known():
    world = replace(CPU, batch=64, length=(20.0, 1.2, 400))
    synchronous = WhatIf(record(world, 0, 12)).recorded_step_s
    with_trial, without = (WhatIf(record(world, 1, 12, with_trial=known)) for known in (True, False))
    assert ask(with_trial, 0) == pytest.approx(synchronous, rel=0.1)
    assert ask(without, 0) > 1.1 * synchronous, "a full server tells nothing about steps of one episode"


def test_the_share_of_a_gpu_is_found():
    found = WhatIf(record(GPU, 4, 12)).simulation.speed.shared
    assert found.is_known and found.server == pytest.approx(GPU.shared.server, abs=0.05)
    # Nothing in a synchronous run was done at once.
    assert WhatIf(record(replace(GPU, update_s=0.0), 0, 12)).simulation.speed.shared == GpuShare()


def rows(*values):
    return [
        StepTime(steps, steps * load, prompts, steps * seconds, steps * seconds)
        for steps, load, prompts, seconds in values
    ]


def test_the_curve_goes_through_what_was_measured():
    use = ServerUse(
        rows((10, 8, 0, 3.0), (1, 40, 0, 2.0), (10, 64, 0, 10.0), (5, 64, 50, 11.0)), 100.0, rows((4, 1, 0, 1.0))
    )
    curve = fit_step_curve(use)
    assert curve.at(0) == curve.at(1) == 1.0
    # 8 and 40 are in the wrong order: 32 seconds of 11 steps, 120 sequences.
    assert curve.at(120 / 11) == pytest.approx(32 / 11) and curve.at(64) == pytest.approx(10.0)
    assert curve.at(128) > 15, "it goes on as before"
    assert curve.prompt_s == pytest.approx(5 * 1.0 / 50)
    assert fit_step_curve(ServerUse(rows((10, 8, 0, 3.0)), 30.0)) is None
    # On a GPU the trial counts: nothing disturbed it.
    trial = rows((4, 1, 0, 1.0), (4, 64, 0, 2.0))
    assert fit_step_curve(ServerUse(use.steps, None, trial)).at(64) == 2.0


def test_prompts_cost_a_pass_and_their_tokens():
    decoding = rows((10, 8, 0, 3.0), (10, 64, 0, 10.0))
    # 5 s a pass and 0.1 s a token: few prompts at once, and many.
    prompts = rows((20, 8, 20 * 1, 3.0 + 5.1), (4, 64, 4 * 100, 10.0 + 15.0))
    curve = fit_step_curve(ServerUse([*decoding, *prompts], 100.0))
    assert (curve.prompt_s, curve.pass_s) == pytest.approx((0.1, 5.0))
    assert curve.scaled(2.0).pass_s == pytest.approx(10.0)
    # Longer steps with prompts may have another cause, but none of the costs is negative.
    fewer = rows((20, 8, 20 * 50, 3.0 + 5.0), (4, 64, 4 * 100, 10.0 + 1.0))
    curve = fit_step_curve(ServerUse([*decoding, *fewer], 100.0))
    assert curve.prompt_s == 0 and curve.pass_s == pytest.approx(104 / 24)


def test_the_curve_goes_on_from_points_that_are_far_apart():
    # Steps of 512 sequences of one length are hardly slower than those of 400 that end one after the other.
    use = ServerUse(
        rows((20, 8, 0, 3.0), (20, 200, 0, 10.0), (20, 270, 0, 13.0), (20, 400, 0, 18.0), (5, 512, 0, 18.5)), 1.0
    )
    assert fit_step_curve(use).at(1024) == pytest.approx(42.0, rel=0.1)


def test_a_single_step_is_no_point_of_the_curve():
    # Without prompts a full server makes one step with all sequences, the first one.
    full = rows((20, 8, 0, 3.0), (20, 200, 0, 10.0), (10, 600, 0, 30.0), (1, 1000, 0, 31.0))
    curve = fit_step_curve(ServerUse(full, 1.0))
    assert curve.at(1000) == pytest.approx(50.0, rel=0.1)
    assert curve.loads == pytest.approx((8, 200, 7000 / 11))
    # One of the smallest load is joined to the next.
    assert fit_step_curve(ServerUse(rows((1, 1, 0, 9.0), *[(20, 8, 0, 3.0), (20, 200, 0, 10.0)]), 1.0)).at(1) < 3.5


def test_requests_of_one_step_share_a_pass():
    one, two = PromptPasses(2.0), PromptPasses(2.0, num_servers=2)
    starts = (0.0, 0.5, 0.9, 1.0, 5.2, 5.3)
    assert [one.start(steps) for steps in starts] == [2.0, 0.0, 0.0, 2.0, 2.0, 0.0]
    assert [two.start(steps) for steps in starts] == [2.0, 2.0, 0.0, 2.0, 2.0, 2.0]


def test_costs_of_lengths_come_from_steps_of_one_load():
    def step(load, length, differ, seconds):
        return StepTime(4, 4 * load, 0, 4 * seconds, 4 * seconds, 4 * load * length, 4 * load * differ)

    # 2 ms a token of context and 1 ms of spread.
    measured = ((16, 100, 0), (64, 100, 0), (64, 150, 200), (64, 400, 0))
    trial = [step(n, length, differ, n + n * (2e-3 * length + 1e-3 * differ)) for n, length, differ in measured]
    run = [step(200, 100, 0, 240.0), step(260, 200, 100, 260 * 1.5)]
    curve = fit_step_curve(ServerUse(run, 1.0, trial))
    assert (curve.context_s, curve.spread_s) == pytest.approx((2e-3, 1e-3))
    assert curve.at(64, 6400) == pytest.approx(64 * 1.2, rel=0.02), "what lengths cost is not counted twice"
    assert curve.at(230, 230 * 100, 0) == pytest.approx(230 * 1.2, rel=0.02)
    # 64 sequences of different lengths take 128 s longer than padding explains.
    calls = [*trial[:2], step(64, 150, 200, 64 + 64 * (0.3 + 0.2) + 128.0), trial[3]]
    assert fit_step_curve(ServerUse(run, 1.0, calls)).spread_s == pytest.approx(2e-3)
    assert fit_step_curve(ServerUse(run, None, calls)).spread_s == pytest.approx(1e-3 + 128 / 64 / 200)
    # Long ones seem to be faster than short ones: those of different lengths tell what tokens cost.
    failed = fit_step_curve(ServerUse(run, 1.0, [*trial[:3], step(64, 400, 0, 64.0)]))
    assert failed.context_s == pytest.approx((2e-3 * 50 + 1e-3 * 200) / 50) and failed.spread_s == 0
    # Of no use: longer sequences are hardly slower.
    level = [step(64, 20, 0, 1.0), step(64, 250, 0, 1.01), step(64, 80, 70, 1.02)]
    curve = fit_step_curve(ServerUse(run, 1.0, [*level, step(1, 20, 0, 0.5)]))
    assert curve.context_s == curve.spread_s == 0


def test_unfinished_episodes_get_the_work_of_longer_ones():
    # Nine end after 1 s to 9 s; three run for 2, 8 and 20 s and longer. The third is the longest of all.
    recording = make_recording_of([float(i) for i in range(1, 10)], [2.0, 8.0, 20.0])
    works = [sum(work) for work in recorded_work(recording, GenerationSpeed()).episodes]
    assert works[:9] == pytest.approx([float(i) for i in range(1, 10)])
    assert works[9] > 2 and works[10] > 8 and works[11] == pytest.approx(20.0)


def test_what_ran_while_the_trainer_started_gets_the_work_of_later_episodes():
    def episode(number, end, tokens, seconds, reward_s, *more):
        parts = (("generate", seconds), ("reward", reward_s), *more)
        return PlayedEpisode(number, "trained", 0, None, 1, tokens, end - seconds - reward_s, end, parts)

    early = [
        # Ended after the trainer had asked for its first batch.
        episode(0, 13.0, 100, 3.0, 2.0),
        episode(1, 5.0, 20, 2.0, 1.0),
        episode(2, 5.0, 20, 2.0, 1.0, ("tool", 1.0)),
    ]
    later = [episode(number, 20.0, tokens, tokens / 100, 0.1) for number, tokens in enumerate([100, 20, 30, 90] * 8, 3)]
    steps = [PlayedStep(i, 12.0 + i, 1.0, 0.0, 0.0) for i in range(2)]
    recording = Recording(Settings(4), steps, [*early, *later])
    works = recorded_work(recording, GenerationSpeed()).episodes
    assert works[0] == pytest.approx([0.95, 0.1], abs=0.06) and works[1] == pytest.approx([0.25, 0.1], abs=0.06)
    assert works[2] == pytest.approx([2.0, 1.0, 1.0]), "no later episode has the same parts"
    assert works[3] == pytest.approx([1.0, 0.1])


def make_recording_of(ended, running):
    """Return a recording of episodes with so many seconds of generation."""
    rows = [
        PlayedEpisode(i, "trained" if i < len(ended) else "running", 0, None, 1, 10, 0.0, s, (("generate", s),))
        for i, s in enumerate([*ended, *running])
    ]
    steps = [PlayedStep(i, 30.0 + i, 0.0, 0.0, 0.0) for i in range(2)]
    return Recording(Settings(4), steps, rows[: len(ended)], unfinished=rows[len(ended) :])


@pytest.mark.parametrize(
    ("overlap", "trial", "server", "scale"),
    [
        # Steps take 2 s instead of 1. No overlap: answers are longer than those of the trial.
        (0.0, True, GpuShare().server, 2.0),
        (1.0, True, 0.5, 1.0),
        # Half of the time alone, so the other half at no speed at all: the least that is believed.
        (0.5, True, 0.05, 1.0),
        # Without a trial the speed is assumed, and the curve of the run holds both times.
        (1.0, False, GpuShare().server, 2.0 * GpuShare().server),
    ],
)
def test_the_share_of_a_gpu_by_hand(overlap, trial, server, scale):
    alone, run = rows((4, 1, 0, 1.0), (4, 64, 0, 1.0)), rows((100, 8, 0, 2.0), (50, 64, 0, 2.0))
    use = ServerUse(run, None, alone if trial else ())
    curve = StepCurve((1.0, 64.0), (1.0, 1.0) if trial else (2.0, 2.0))
    found, scaled = fit_gpu_share(use, curve, overlap)
    assert found.server == pytest.approx(server) and found.is_known == (trial and overlap > 0)
    assert scaled.at(8) == pytest.approx(scale)


def test_the_share_of_a_gpu_follows_from_the_lengths_of_answers():
    recording = record(GPU, 1, 12)
    speed = fit_speed(recording)
    works = recorded_work(recording, speed).episodes
    # Servers stopped at times, so that answers are shorter than the seconds of steps say.
    longest = {e.number: round(0.85 * sum(work)) for e, work in zip(recording.started, works, strict=True)}
    known = replace(recording, longest=longest)
    found = fit_speed(known)
    assert found.shared.server < 0.9 * speed.shared.server
    began = recording.steps[0].ready_at - recording.steps[0].waited_s
    pairs = zip(recording.started, recorded_work(known, found).episodes, strict=True)
    later = [(sum(work), longest[e.number]) for e, work in pairs if e.started_at > began]
    assert sum(work for work, _ in later) == pytest.approx(sum(tokens for _, tokens in later), rel=0.03)
    few = replace(recording, longest=dict(list(longest.items())[-10:]))
    assert fit_speed(few).shared == speed.shared
