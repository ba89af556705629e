"""Re-runs of recordings made by hand: at their own settings they repeat, under others the answer is known."""

from dataclasses import replace

import pytest

from arealite.api.errors import ConfigError
from arealite.core import staleness_manager
from arealite.core.foresee.core_sharing import CoreUse
from arealite.core.foresee.recording import PlayedStep, Recording, ServerRate, Settings
from arealite.core.foresee.rerun import Scenario, Simulation
from arealite.core.foresee.resources import ServerUse, StepTime
from arealite.core.foresee.speed import GenerationSpeed, fit_speed
from arealite.core.foresee.what_if import WhatIf, parse_question
from tests.core.foresee.make_recording import episode, synchronous

SPEEDS = [
    GenerationSpeed(),
    GenerationSpeed(0.0, 1.0),
    GenerationSpeed(1.0, 0.2, 0.7),
    GenerationSpeed(1.0, 0.2, shared=CoreUse(1.0, server=1.1, token_s=0.1)),
]


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_recording_repeats_itself_at_its_own_settings(speed):
    recording = synchronous()
    rerun = Simulation(recording, speed).run(Scenario(recording.settings))
    first = recording.steps[0].ready_at - rerun.ready_at[0]
    assert [at + first for at in rerun.ready_at] == pytest.approx([step.ready_at for step in recording.steps])
    assert rerun.waited_s == pytest.approx([step.waited_s for step in recording.steps])
    assert rerun.ages == {0: 16} and rerun.num_stale == 0


def test_generation_ahead_hides_the_work_of_the_trainer():
    # A step: 6 s of generation and reward, 1.5 s until the new weights. With η = 1 and servers that do not slow
    # down, two batches are in flight: a step takes half of 6 s, and no longer than the trainer's 2 s.
    what_if = WhatIf(synchronous(num_steps=12))
    scenario, name = parse_question(["max_head_offpolicyness=1", "lead=1"], what_if.recording.settings)
    answer = what_if.ask(scenario, name)
    assert what_if.base.step_s == pytest.approx(7.5)
    assert answer.rerun.step_s < 5.0 and max(answer.rerun.ages) == 1
    longer, name = parse_question(["max_head_offpolicyness=8", "lead=8"], what_if.recording.settings)
    assert what_if.ask(longer, name).rerun.step_s == pytest.approx(2.0, rel=0.25)


def test_a_lead_that_decides_closely_is_noted(monkeypatch):
    what_if = WhatIf(synchronous(num_steps=30))
    scenario, _ = parse_question(["max_head_offpolicyness=4", "lead=adaptive"], what_if.recording.settings)
    clear = what_if.simulation.run(scenario)
    assert clear.close_leads is None and what_if.lead_notes(scenario, clear) == []
    monkeypatch.setattr(staleness_manager, "_CLOSE", 100.0)
    close = what_if.simulation.run(scenario)
    assert close.close_leads is not None
    (note,) = what_if.lead_notes(scenario, close)
    for lead in close.close_leads:
        fixed, _ = parse_question(["max_head_offpolicyness=4", f"lead={lead}"], what_if.recording.settings)
        found = what_if.simulation.run(fixed)
        assert f"with {lead}, {found.step_s:.2f} s a step and a mean age of {found.mean_age:.2f}" in note


def test_faster_parts_save_exactly_their_time():
    what_if = WhatIf(synchronous())
    ask = lambda *words: what_if.ask(*parse_question(words, what_if.recording.settings)).rerun.step_s  # noqa: E731
    assert ask("reward_speed=2") == pytest.approx(7.5 - 0.5)
    assert ask("generation_speed=2") == pytest.approx(7.5 - 2.5)
    assert ask("trainer_speed=2") == pytest.approx(7.5 - 0.75)
    assert ask("reward_speed=2", "generation_speed=2") == pytest.approx(7.5 - 3.0)


def test_a_second_server_halves_a_generation_that_is_bound_by_throughput():
    recording = synchronous(late_s=0.0)
    simulation = Simulation(recording, GenerationSpeed(0.0, 1.0))
    base = simulation.run(Scenario(recording.settings))
    two = simulation.run(Scenario(replace(recording.settings, servers=2)))
    assert base.step_s == pytest.approx(4.5) and two.step_s == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("cores", "step_s"),
    [
        (CoreUse(2), 2.0),
        # One core takes turns at the 2 s of generation and the 2 s of training, which makes both 15% longer.
        (CoreUse(1), 4.6),
        # Episodes take 0.25 of the interpreter's time while the server generates a token a second, which takes 2 s.
        (CoreUse(8, token_s=0.25), 2.5),
    ],
)
def test_asynchronous_steps_share_the_cores(cores, step_s):
    recording = synchronous(num_steps=40, reward_s=0.0, late_s=0.0, update_s=2.0, after_s=0.0)
    simulation = Simulation(recording, GenerationSpeed(0.0, 1.0, shared=cores))
    assert simulation.run(Scenario(recording.settings)).step_s == pytest.approx(4.0), "as recorded: no overlap"
    ahead = replace(recording.settings, max_head_offpolicyness=4, lead=4)
    assert simulation.run(Scenario(ahead)).step_s == pytest.approx(step_s, rel=0.03)


def test_the_advice_is_ordered_and_names_the_gain():
    advice = WhatIf(synchronous()).advise()
    assert [answer.change for answer in advice] == sorted(answer.change for answer in advice)
    texts = [answer.text() for answer in advice]
    assert "generation twice as fast: −33%" in texts and "rewards twice as fast: −7%" in texts
    assert not any("tools" in text or "server" in text for text in texts), "no tools; the servers do not slow down"


def test_rejected_episodes_make_room_and_rows_repeat():
    episodes = [episode(i, 0.0, ("generate", 1.0), step=0, state="rejected" if i == 1 else "trained") for i in range(3)]
    steps = [PlayedStep(0, 1.0, 1.0, 1.0, 1.0), PlayedStep(1, 3.0, 1.0, 1.0, 1.0)]
    recording = Recording(Settings(2), steps, episodes)
    rerun = Simulation(recording, GenerationSpeed()).run(Scenario(recording.settings))
    # Rows 0, 1 (rejected), then 2; rows 3, 4 (as 0 and 1), then 5.
    assert rerun.ready_at == pytest.approx([2.0, 5.0])


def test_the_speed_is_fitted_to_the_counters_of_servers():
    recording = synchronous()
    # A token takes 10 ms and 1 ms for each sequence that runs.
    rates = [ServerRate(50.0 + i, 1.0, n, n / (0.010 + 0.001 * n)) for i, n in enumerate((2, 5, 10, 20, 50, 80))]
    speed = fit_speed(replace(recording, rates=rates))
    assert speed.is_known
    assert (speed.fixed, speed.per_episode, speed.busy) == pytest.approx((0.010, 0.001, 0.0), abs=1e-6)
    assert not fit_speed(replace(recording, rates=rates[:3])).is_known
    assert any("counters" in note for note in WhatIf(recording).notes())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("max_head_ofpolicyness=2", "did you mean max_head_offpolicyness"),
        ("colour=2", "It takes max_head_offpolicyness, lead"),
        ("servers=0", "a whole number from 1"),
        ("servers=two", "a whole number from 1"),
        ("servers", "a whole number from 1"),
        ("reward_speed=0", "a factor above 0"),
        ("reward_speed=nan", "a factor above 0"),
        ("max_head_offpolicyness=-1", "a whole number from 0"),
        ("eta=2", "did you mean max_head_offpolicyness"),
        ("servers=2 servers=3", "has servers twice"),
        ("reward_speed=2 reward_speed=3", "has reward_speed twice"),
        ("lead=5 max_head_offpolicyness=1", "lead=5 is above max_head_offpolicyness=1"),
    ],
)
def test_questions_that_make_no_sense_are_refused(word, message):
    with pytest.raises(ConfigError, match=message):
        parse_question(word.split(), Settings(4))


def test_a_speed_of_something_that_the_run_does_not_have_is_noted():
    what_if = WhatIf(synchronous())
    scenario, _ = parse_question(["tool_speed=2", "reward_speed=2", "trainer_speed=2"], what_if.recording.settings)
    assert [note for note in what_if.notes(scenario) if "changes nothing" in note] == [
        "tool_speed changes nothing: no episode of the run has a part of that kind"
    ]
    assert not any("changes nothing" in note for note in what_if.notes())


def test_servers_beyond_the_episodes_at_once_cost_nothing():
    recording = synchronous()
    simulation = Simulation(recording, GenerationSpeed(1.0, 0.2, shared=CoreUse(2.0, server=1.1, token_s=0.1)))
    enough = recording.settings.batch_size * (1 + recording.settings.max_head_offpolicyness)
    reruns = [simulation.run(Scenario(replace(recording.settings, servers=n))) for n in (enough, 10**6)]
    assert reruns[0].ready_at == reruns[1].ready_at


def test_a_machine_on_which_others_work_is_noticed():
    cores = CoreUse(2.0, 1.0, 1.0)
    alone, disturbed = (
        replace(synchronous(), server_use=ServerUse([StepTime(10, 80, 0, seconds, 1.0)], 1.0), cores=cores)
        for seconds in (1.1, 1.6)
    )
    assert not any("other processes" in note for note in WhatIf(alone).notes())
    assert any("took 1.6 times as long" in note for note in WhatIf(disturbed).notes())
    # A server with three threads needs more cores than there are.
    crowded = replace(disturbed, cores=CoreUse(2.0, 3.0, 1.0))
    assert not any("other processes" in note for note in WhatIf(crowded).notes())
