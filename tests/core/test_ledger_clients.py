"""Ten thousand clients of one ledger, and many of one name service: nothing is lost, nothing comes twice."""

import asyncio
import random
import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from arealite.core.ledger.store import EpisodeRow, Ledger
from arealite.utils.names import FileNames

CLIENTS = 10_000


def test_a_ledger_keeps_the_episodes_of_all_clients(tmp_path):
    ledger, rng = Ledger(tmp_path / "run.sqlite"), random.Random(1)

    async def client(number):
        for state in ("running", "buffered", "trained"):
            ledger.record(EpisodeRow(number, state, source="submitted"))
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        if number % 500 == 0:
            ledger.commit()

    async def all_clients():
        await asyncio.gather(*map(client, range(CLIENTS)))

    asyncio.run(all_clients())
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as db:
        assert Counter(db.execute("SELECT id, state FROM episodes")) == {(i, "trained"): 1 for i in range(CLIENTS)}


def test_a_claim_has_one_holder_and_no_lease_is_lost(tmp_path):
    def clients(worker):
        names = FileNames(tmp_path / "names")
        for i in range(40):
            names.publish(f"server/{worker}-{i}", f"{worker}:{i}")
        return [i for i in range(40) if names.claim(f"claim/{i}", str(worker))]

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(clients, range(8)))
    assert Counter(i for claims in won for i in claims) == {i: 1 for i in range(40)}
    reader = FileNames(tmp_path / "names")
    assert reader.list("server/") == {f"server/{w}-{i}": f"{w}:{i}" for w in range(8) for i in range(40)}
    assert reader.list("claim/") == {f"claim/{i}": str(w) for w, claims in enumerate(won) for i in claims}
