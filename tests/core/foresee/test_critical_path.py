"""What steps waited for: chains of recordings made by hand, whose answers are known."""

import random

import pytest

from arealite.core.foresee.critical_path import describe_path, find_critical_path
from arealite.core.foresee.recording import PlayedStep, Recording, Settings
from tests.core.foresee.make_recording import episode, synchronous


def kinds(path):
    return [(link.kind, round(link.seconds, 6), link.episode) for link in path.links]


def test_a_batch_waits_for_generation_then_its_straggler_then_its_reward():
    # Generation begins with the new weights, half a second before the trainer waits.
    found = find_critical_path(synchronous())
    assert [path.step for path in found.paths] == [1, 2, 3], "the first step fills the pipeline"
    # Episodes 4 to 6 end 3 s after their start: from then on one of four is missing.
    assert kinds(found.paths[0]) == [("generation", 2.5, 7), ("stragglers", 2.0, 7), ("reward", 1.0, 7)]
    assert found.paths[0].stragglers == [7]
    assert found.waited_s == pytest.approx(3 * 5.5) and found.total_s == pytest.approx(3 * 7.5)
    assert sum(found.seconds.values()) == pytest.approx(found.waited_s)
    assert found.sentence() == (
        "the trainer waited 73% of 22.5 s: 33% generation, 27% stragglers (3 episodes, 900 tokens a sample; the median "
        "of all is 100), 13% reward"
    )
    assert describe_path(found.paths[0]) == (
        "step 2 waited 5.50 s: generation of episode 7 2.50 s → stragglers of episode 7 2.00 s → "
        "reward of episode 7 1.00 s"
    )


def test_the_chain_goes_on_to_the_episode_that_made_room():
    # One at a time: 1 starts when 0 has ended. The trainer waits from 10 on.
    episodes = [
        episode(0, 9.0, ("generate", 2.0), ("reward", 1.0), step=1),
        episode(1, 12.0, ("workflow", 0.5), ("generate", 3.0), step=1),
    ]
    steps = [PlayedStep(0, 8.0, 1.0, 2.0, 2.0), PlayedStep(1, 15.75, 5.75, 1.0, 1.0)]
    found = find_critical_path(Recording(Settings(2, max_concurrent_rollouts=1), steps, episodes))
    assert kinds(found.paths[0]) == [
        ("generation", 1.0, 0),
        ("reward", 1.0, 0),
        ("workflow", 0.5, 1),
        ("generation", 3.0, 1),
        ("collect", 0.25, None),
    ]


def test_an_episode_that_nothing_visible_let_start_waited_for_admission():
    episodes = [episode(0, 12.0, ("generate", 1.0), step=1)]
    steps = [PlayedStep(0, 8.0, 1.0, 2.0, 2.0), PlayedStep(1, 13.0, 3.0, 1.0, 1.0)]
    found = find_critical_path(Recording(Settings(1), steps, episodes))
    assert kinds(found.paths[0]) == [("admission", 2.0, None), ("generation", 1.0, 0)]


def test_a_trainer_that_does_not_wait():
    episodes = [episode(0, 1.0, ("generate", 1.0), step=0), episode(1, 1.0, ("generate", 1.0), step=1)]
    steps = [PlayedStep(0, 2.0, 1.0, 2.0, 2.0), PlayedStep(1, 4.0, 0.0, 1.0, 1.0)]
    found = find_critical_path(Recording(Settings(1, 1), steps, episodes))
    assert found.paths[0].links == [] and found.sentence() == "the trainer waited 0% of 2.0 s"


@pytest.mark.parametrize("seed", range(20))
def test_links_always_add_up_to_the_wait(seed):
    rng = random.Random(seed)
    episodes, steps = [], []
    for number in range(40):
        parts = [(rng.choice(("generate", "reward", "tool", "workflow")), rng.expovariate(1)) for _ in range(5)]
        episodes.append(episode(number, rng.uniform(0, 20), *parts, step=number // 8))
    for number in range(5):
        ready_at = max(e.finished_at for e in episodes if e.step == number) + rng.random()
        steps.append(PlayedStep(number, ready_at, rng.uniform(0, 10), 1.0, 1.0))
    found = find_critical_path(Recording(Settings(8, 4), steps, episodes))
    for path in found.paths:
        assert sum(link.seconds for link in path.links) == pytest.approx(path.waited_s)
        for before, after in zip(path.links, path.links[1:], strict=False):
            assert before.began + before.seconds == pytest.approx(after.began)
