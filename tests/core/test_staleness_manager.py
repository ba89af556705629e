"""Admission, counts and the lead."""

import itertools

import pytest

from arealite.core.staleness_manager import Lead, StalenessManager


@pytest.mark.parametrize("eta, version, expected", [(0, 0, 8), (1, 0, 16), (4, 0, 40), (4, 3, 40)])
def test_capacity_follows_the_papers_rule(eta, version, expected):
    staleness = StalenessManager(8, eta)
    staleness.version = version
    # concurrency: one batch per allowed version
    assert staleness.capacity() == min((eta + version + 1) * 8, (eta + 1) * 8) == expected


def test_episodes_that_end_unused_make_room_at_once():
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
    # Trained episodes stay counted until the version rises.
    assert staleness.capacity() == 3
    staleness.version = 1
    assert staleness.capacity() == 11
    staleness.counts.check()


def test_concurrency_limits_admission():
    staleness = StalenessManager(8, 4, max_concurrent=3)
    staleness.admit(2)
    assert staleness.capacity() == 1


def test_lost_or_doubled_episodes_fail_the_check():
    staleness = StalenessManager(8)
    staleness.admit(1)
    staleness.counts.running = 0
    with pytest.raises(AssertionError, match="do not add up"):
        staleness.counts.check()


def leads(lead, wait_s, batches=100, has_spare_batch=False, work_s=lambda batches: 1.0):
    """Return the lead after each batch, if the trainer waits `wait_s(lead)` and works for `work_s(lead)`."""
    seen = []
    for _ in range(batches):
        waited_s = wait_s(lead.batches)
        lead.adapt(waited_s, waited_s + work_s(lead.batches), has_spare_batch)
        seen.append(lead.batches)
    return seen


def test_the_lead_grows_while_that_shortens_the_waiting():
    lead = Lead(max_staleness=4)
    seen = leads(lead, lambda batches: 2 / batches**2)
    # At once: the waiting is for a judge.
    assert seen[:5] == [1] * 5 and set(seen[5:]) == {4}
    seen = leads(lead, lambda batches: 0.0, has_spare_batch=True)
    assert sorted(seen, reverse=True) == seen and seen[-1] == 1
    assert max(leads(Lead(max_staleness=0), lambda batches: 1.0)) == 0
    assert max(leads(Lead(max_staleness=1), lambda batches: 1.0)) == 1


def test_a_longer_lead_that_does_not_help_is_undone():
    generation_takes_all_the_time = Lead(max_staleness=4)
    seen = leads(generation_takes_all_the_time, lambda batches: 1.0)
    assert set(seen) == {1, 3} and set(seen[15:]) == {1}
    seen = leads(Lead(max_staleness=4), lambda batches: 1.0 if batches == 1 else 0.6, 400)
    assert seen[5] == 3 and set(seen[20:100]) == {1}
    assert max(seen[150:]) == 4 and set(seen[250:]) == {2}
    # A few batches that come at once prove nothing.
    tried = itertools.count()
    lucky = leads(Lead(4), lambda b: 0.0 if b > 1 and next(tried) < 8 else 1.0, 60)
    assert max(lucky) == 3 and lucky[-1] == 1
    # after a while it is tried again, after a second time only much later
    seen = leads(generation_takes_all_the_time, lambda batches: 1.0, batches=200)
    assert set(seen) == {1, 2} and set(seen[100:]) == {1}
    seen = leads(generation_takes_all_the_time, lambda batches: 2 / batches**2, batches=1100)
    assert seen[800] == 1 and seen[-1] == 4


def test_a_longer_lead_that_slows_the_trainer_down_is_undone():
    """On a shared GPU more generation ends the waiting, and the update takes that much longer."""

    def lead_after(work_s):
        return leads(Lead(4), lambda b: 0.4 / b**2, 60, work_s=work_s)[-1]

    assert lead_after(lambda batches: 1.0) > 1
    assert lead_after(lambda batches: 1.0 + 0.3 * (batches > 1)) == 1
    # Every fifth one with an evaluation.
    steps = itertools.count()
    assert lead_after(lambda batches: 1.0 if next(steps) % 5 else 20.0) > 1


def test_a_trial_that_is_decided_closely_is_known():
    def closely(wait_s, slower_s):
        lead = Lead(4)
        leads(lead, lambda b: 0.0 if b > 1 else wait_s, 60, work_s=lambda b: 1.0 + slower_s * (b > 1))
        return lead.close

    # Half of the waiting time that is saved may be lost by slower work.
    assert closely(0.4, 0.22) == closely(0.4, 0.18) == (1, 2)
    assert closely(0.4, 0.0) is None and closely(0.4, 0.6) is None


def test_the_lead_never_exceeds_the_staleness_limit():
    plain, led = StalenessManager(8, 4, 1000), StalenessManager(8, 4, 1000, Lead(4))
    assert led.capacity() == 16 < plain.capacity() == 40
