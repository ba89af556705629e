"""Admission and accounting."""

import pytest

from arealite.core.staleness_manager import Lead, StalenessManager


@pytest.mark.parametrize("eta, version, expected", [(0, 0, 8), (1, 0, 16), (4, 0, 40), (4, 3, 40)])
def test_capacity_follows_the_papers_rule(eta, version, expected):
    staleness = StalenessManager(8, eta)
    staleness.version = version
    # concurrency: one batch per allowed version
    assert staleness.capacity() == min((eta + version + 1) * 8, (eta + 1) * 8) == expected


def test_what_ends_without_use_frees_its_place_at_once():
    staleness = StalenessManager(8, 0, max_concurrent=100)
    staleness.admit(8)
    assert staleness.capacity() == 0
    staleness.reject()
    staleness.fail()
    staleness.accept()
    assert staleness.capacity() == 2
    staleness.accept()
    staleness.drop_stale()
    assert staleness.capacity() == 3
    staleness.train(1)
    assert staleness.capacity() == 3  # trained episodes stay counted until the version rises
    staleness.version = 1
    assert staleness.capacity() == 11
    staleness.counts.check()


def test_concurrency_limits_too():
    staleness = StalenessManager(8, 4, max_concurrent=3)
    staleness.admit(2)
    assert staleness.capacity() == 1


def test_lost_or_doubled_episodes_are_noticed():
    staleness = StalenessManager(8)
    staleness.admit(1)
    staleness.counts.running = 0
    with pytest.raises(AssertionError, match="do not add up"):
        staleness.counts.check()


def test_the_lead_grows_when_the_trainer_waits_and_shrinks_when_it_never_does():
    lead = Lead(max_staleness=4)
    assert lead.batches == 1
    for _ in range(2):  # the pipeline fills: waiting says nothing yet
        lead.adapt(wait_s=5.0, step_s=6.0, has_spare_batch=False)
    assert lead.batches == 1
    for expected in (2, 3, 4, 4):
        lead.adapt(wait_s=1.0, step_s=2.0, has_spare_batch=False)
        assert lead.batches == expected
    for _ in range(200):
        lead.adapt(wait_s=0.0, step_s=2.0, has_spare_batch=True)
    assert lead.batches == 1
    synchronous = Lead(max_staleness=0)
    for _ in range(9):
        synchronous.adapt(wait_s=1.0, step_s=2.0, has_spare_batch=False)
    assert synchronous.batches == 0


def leads(*step_times):
    """The lead after each of 250 batches, and then of 250 more, if a step takes `step_s(lead)`, one second of it for training."""
    lead, seen = Lead(max_staleness=4), []
    for step_s in step_times:
        for _ in range(250):
            taken_s = step_s(lead.batches)
            lead.adapt(wait_s=taken_s - 1, step_s=taken_s, has_spare_batch=False)
            seen.append(lead.batches)
    return seen


def test_no_running_ahead_that_does_not_help():
    seen = leads(lambda lead: 2.0)  # generation takes all the time there is
    assert max(seen) == 4 and set(seen[60:]) == {1}
    seen = leads(lambda lead: 6 / min(lead, 3))  # the fourth batch is of no use
    assert set(seen[60:]) == {3}


def test_running_ahead_that_helps_is_taken_up_again_after_a_trial():
    seen = leads(lambda lead: 6 / lead)
    assert 3 in seen[10:60] and set(seen[60:]) == {4}


def test_what_was_of_no_use_is_tried_again_after_a_long_time():
    seen = leads(lambda lead: 2.0, lambda lead: 6 / lead)
    assert seen[249] == 1 and seen[-1] == 4


def test_the_lead_only_ever_holds_back():
    plain, led = StalenessManager(8, 4, 1000), StalenessManager(8, 4, 1000, Lead(4))
    assert led.capacity() == 16 < plain.capacity() == 40
