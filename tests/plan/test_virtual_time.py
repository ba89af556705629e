"""The event loop of simulations: order, virtual time, and deadlocks that are named."""

import asyncio
import time

import pytest

from arealite.plan.virtual_time import SimulationError, VirtualCondition, VirtualLoop
from arealite.utils import clock


@pytest.fixture
def loop():
    loop = VirtualLoop()
    yield loop
    loop.shut_down()


def test_timers_run_in_order_and_no_real_time_passes(loop):
    seen, began = [], time.monotonic()

    async def sleeper(name, seconds):
        await asyncio.sleep(seconds)
        seen.append((name, loop.time()))

    async def all_sleepers():
        await asyncio.gather(sleeper("day", 86_400), sleeper("b", 2), sleeper("a", 1), sleeper("a2", 1))

    loop.run_coroutine(all_sleepers())
    assert [name for name, _ in seen] == ["a", "a2", "b", "day"]
    assert [at for _, at in seen] == pytest.approx([1, 1, 2, 86_400], abs=1e-9)
    assert time.monotonic() - began < 60


def test_work_of_the_trainer_takes_exactly_its_time_and_others_go_on(loop):
    seen = []
    loop.call_later(3, seen.append, 3)
    loop.call_later(5, seen.append, 5)
    loop.call_later(7, seen.append, 7)
    loop.run_for(5)
    assert (loop.time(), seen) == (5, [3, 5])
    loop.run_for(0)
    assert loop.time() == 5


def test_code_that_reads_the_clock_reads_virtual_time(loop):
    with loop.clock():
        assert clock.monotonic() == clock.time() == 0
        loop.run_for(60)
        assert clock.monotonic() == 60
    assert abs(clock.time() - time.time()) < 60


def test_a_condition_waits_in_virtual_time(loop):
    condition = VirtualCondition(loop)
    loop.call_later(4, condition.notify_all)
    with condition:
        assert not condition.wait(1) and loop.time() == 1
        assert condition.wait(10) and loop.time() == 4
        assert condition.wait_for(lambda: loop.time() >= 6, 8) is False or loop.time() >= 6


def test_a_deadlock_is_named_instead_of_hanging(loop):
    never = asyncio.Event()

    async def waits_forever():
        await never.wait()

    task = loop.create_task(waits_forever(), name="episode-7")
    with pytest.raises(SimulationError, match=r"no timer is set, and episode-7 waits in .*waits_forever"):
        loop.run_until(task.done)
    with pytest.raises(SimulationError, match="stop after 0 s"):
        VirtualCondition(loop).wait()


def test_an_error_in_a_callback_reaches_the_trainer(loop):
    def fail():
        raise ValueError("broken")

    loop.call_later(1, fail)
    with pytest.raises(ValueError, match="broken"):
        loop.run_for(2)
