"""Shared cores, computed by hand."""

import pytest

from arealite.core.foresee.core_sharing import CoreUse


def crowded(share: float) -> float:
    """Return a share of the cores without the time of switching, which is 15% from 1.5 times the cores on."""
    return share / (1 + 0.3 * min(0.5, 1 / share - 1))


@pytest.mark.parametrize(
    ("use", "num_servers", "trainer_works", "expected"),
    [
        (CoreUse(2), 0, False, (1, 1)),
        (CoreUse(2), 1, True, (1, 1)),
        # Three cores are needed and there are two.
        (CoreUse(2), 2, True, (crowded(2 / 3), crowded(2 / 3))),
        (CoreUse(2), 2, False, (1, 1)),
        (CoreUse(1), 1, True, (crowded(1 / 2), crowded(1 / 2))),
        # Threads of one interpreter run one at a time, so a server needs one core. With two ranks: 1 + 2 on 2.
        (CoreUse(2, server=1.5, num_ranks=2), 1, True, (crowded(2 / 3) / 1.5, crowded(2 / 3))),
        (CoreUse(8, server=1.25), 1, False, (0.8, 1)),
        # An engine of two threads and more computes outside of the interpreter: 3 + 1 on 2.
        (CoreUse(2, server=3), 1, True, (crowded(1 / 2), crowded(1 / 2))),
        # A trainer of four threads beside a server.
        (CoreUse(4, trainer=4), 1, True, (crowded(4 / 5), crowded(4 / 5))),
        (CoreUse(8, trainer=4), 1, True, (1, 1)),
    ],
)
def test_all_get_the_same_share_of_what_they_need(use, num_servers, trainer_works, expected):
    assert use.speeds(num_servers, 100.0 * num_servers, trainer_works) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        # 200 tokens a second take 0.2 of the interpreter; the server has a core of its own.
        (CoreUse(8, token_s=0.001), (1, 0.8)),
        (CoreUse(2, token_s=0.001), (1, 0.8)),
        # The engine makes fewer tokens while other threads of its server run.
        (CoreUse(2, server=1.25, token_s=0.001), (0.8, 0.84)),
        # The second rank waits for the first: 1 + 0.2 + 2 · 0.8 on 2.
        (CoreUse(2, num_ranks=2, token_s=0.001), (crowded(2 / 2.8), 0.8 * crowded(2 / 2.8))),
        # Four threads compute outside of the interpreter: 1 + 0.2 + 4 on 4.
        (CoreUse(4, trainer=4, token_s=0.001), (crowded(4 / 5.2), crowded(4 / 5.2))),
        # The trainer is never stopped altogether.
        (CoreUse(8, token_s=0.1), (1, 0.1)),
    ],
)
def test_episodes_take_the_interpreter_from_the_trainer(use, expected):
    assert use.speeds(1, 200.0, True) == pytest.approx(expected)


def test_a_trainer_that_waits_needs_nothing():
    assert CoreUse(1, token_s=0.001).speeds(1, 200.0, False).server == pytest.approx(crowded(1 / 1.2))


def test_switching_costs_a_seventh_at_most():
    """Beyond that, a process runs long enough between two switches to fill its caches."""
    assert CoreUse(1).speeds(40, 0.0, False).server == pytest.approx(1 / 40 / 1.15)
    assert CoreUse(2).speeds(3, 0.0, False).server == pytest.approx(2 / 3 / 1.15)


def test_cpu_seconds_grow_by_switching_alone():
    """Not by waiting for a core, nor for the interpreter."""
    assert CoreUse(2).switching(2, 0.0, False) == 1
    assert CoreUse(2).switching(2, 0.0, True) == pytest.approx(1.15)
    assert CoreUse(2, token_s=0.001).switching(2, 200.0, False) == pytest.approx(1.03)
    assert CoreUse(8, server=1.25, token_s=0.001).switching(1, 200.0, True) == 1
