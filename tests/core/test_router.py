"""The router: least load, affinity, waiting for a server."""

import asyncio
import random
import time

import pytest

from arealite.api.errors import WaitTimeout
from arealite.core.waits import NamedWait
from arealite.engine.remote.server import AFFINITY_SLACK, Router


def wait(timeout_s=5.0):
    return NamedWait("a test", "a server", timeout_s)


def add_open(router, address):
    server = router.add(address)
    router.open(server)
    return server


def test_least_load_then_affinity_until_it_costs_too_much():
    async def main():
        router = Router()
        add_open(router, "a"), add_open(router, "b")
        one = await router.acquire(wait(), weight=8, affinity="x")
        two = await router.acquire(wait(), weight=8, affinity="y")
        assert {one.address, two.address} == {"a", "b"}
        assert await router.acquire(wait(), weight=1, affinity="x") is one
        one.load = two.load + AFFINITY_SLACK + 1
        assert await router.acquire(wait(), affinity="x") is two
        router.release(two)

    asyncio.run(main())


def test_waiting_ends_when_a_server_opens_or_joins_and_not_otherwise():
    async def main():
        router = Router()
        router.close(add_open(router, "a"))
        with pytest.raises(WaitTimeout, match=r"a: updating its weights"):
            await router.acquire(wait(0.05))
        waiting = asyncio.ensure_future(router.acquire(wait()))
        await asyncio.sleep(0)
        router.open(router.servers["a"])
        assert (await waiting).address == "a"
        router.remove("a")
        waiting = asyncio.ensure_future(router.acquire(wait()))
        await asyncio.sleep(0)
        add_open(router, "b")
        assert (await waiting).address == "b"

    asyncio.run(main())


def test_a_server_that_opens_just_as_the_wait_for_it_ends_is_taken():
    async def stand_still():
        router = Router()
        server = router.add("a:1")
        task = asyncio.create_task(router.acquire(NamedWait("a test", "a server", 0.05)))
        await asyncio.sleep(0)
        time.sleep(0.1)  # the loop: both happen in its next turn
        asyncio.get_running_loop().call_soon(router.open, server)
        return await task is server

    assert asyncio.run(stand_still())


def test_the_choice_is_that_of_a_scan_over_all_servers():
    """Least load first, the server that must be avoided last, then the one that was added first."""
    rng, router, taken = random.Random(1), Router(), []
    for number in range(7):
        add_open(router, f"s{number}")
    for turn in range(3000):
        action = rng.random()
        server = router.servers[rng.choice(list(router.servers))]
        if action < 0.05:
            router.close(server)
        elif action < 0.12:
            router.open(server)
        elif action < 0.14:
            router.remove(server.address)
            add_open(router, f"new-{turn}")
        elif action < 0.5 and taken:
            router.release(*taken.pop(rng.randrange(len(taken))))
        else:
            avoid, weight = rng.choice([None, server]), rng.randint(1, 4)
            usable = [s for s in router.servers.values() if s.is_open]
            expected = min(usable, key=lambda s, avoid=avoid: (s is avoid, s.load), default=None)
            assert router.try_acquire(weight, avoid=avoid) is expected
            if expected is not None:
                taken.append((expected, weight))
