"""Admission and accounting."""

import pytest

from arealite.core.staleness_manager import StalenessManager


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
