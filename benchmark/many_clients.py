"""How do the name service and the ledger behave with 10,000 clients?

    python benchmark/many_clients.py [--clients 10000] [--processes 4] [--folder FOLDER]

Names: the clients are spread over processes, as servers are over machines. Each publishes its lease; all compete for
1,000 claims; leases are renewed; one reader lists all of them, as rank 0 does every second. Ledger: each client records
one episode as running, buffered and trained, all at the same time on one event loop, with a commit every 100 episodes.
Nothing may be lost, and nothing may come twice. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sqlite3
import tempfile
import time
from collections import Counter
from contextlib import closing
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

from common import describe_machine, print_table

from arealite.core.ledger.store import EpisodeRow, Ledger
from arealite.utils.names import FileNames

NUM_CLAIMS = 1_000
COMMIT_EVERY = 100
TTL_S = 600.0


async def _each(clients: range, act: Any) -> None:
    """Run all clients of this process at the same time."""

    async def one(client: int) -> None:
        await asyncio.sleep(0)
        act(client)

    await asyncio.gather(*map(one, clients))


def _name_clients(folder: str, clients: range, start: Barrier, end: Event, results: Any) -> None:
    """Publish, claim and renew for some of the clients; put (published_s, claimed_s, renewed_s, claims won)."""
    own = {client: FileNames(folder, TTL_S) for client in clients}
    rng, won = random.Random(clients.start), []
    start.wait()
    times = [time.perf_counter()]
    asyncio.run(_each(clients, lambda client: own[client].publish(f"server/{client}", f"10.0.0.1:{client}")))
    times.append(time.perf_counter())
    start.wait()

    def claim(client: int) -> None:
        number = rng.randrange(NUM_CLAIMS)
        if own[client].claim(f"claim/{number}", str(client)):
            won.append((number, client))

    times.append(time.perf_counter())
    asyncio.run(_each(clients, claim))
    times.append(time.perf_counter())
    asyncio.run(_each(clients, lambda client: own[client].renew()))
    times.append(time.perf_counter())
    results.put((times[1] - times[0], times[3] - times[2], times[4] - times[3], won))
    end.wait()


def measure_names(folder: Path, num_clients: int, num_processes: int) -> dict[str, Any]:
    """Return rates, and what was lost or came twice."""
    context = multiprocessing.get_context("spawn")
    start, end, results = context.Barrier(num_processes), context.Event(), context.Queue()
    shares = [
        range(i * num_clients // num_processes, (i + 1) * num_clients // num_processes) for i in range(num_processes)
    ]
    processes = [
        context.Process(target=_name_clients, args=(str(folder), share, start, end, results)) for share in shares
    ]
    for process in processes:
        process.start()
    try:
        answers = [results.get(timeout=600) for _ in processes]
        reader = FileNames(folder, TTL_S)
        began = time.perf_counter()
        servers = reader.list("server/")
        listed_s = time.perf_counter() - began
        claims = reader.list("claim/")
        reader.close()
    finally:
        end.set()
        for process in processes:
            process.join(60)
    won = [claim for *_, claims_won in answers for claim in claims_won]
    wanted = {f"server/{client}": f"10.0.0.1:{client}" for client in range(num_clients)}
    return {
        "publish_per_s": round(num_clients / max(a[0] for a in answers)),
        "claim_per_s": round(num_clients / max(a[1] for a in answers)),
        "renew_per_s": round(num_clients / max(a[2] for a in answers)),
        "list_s": round(listed_s, 3),
        "names_lost": len(wanted.items() - servers.items()),
        "claims_won_twice": sum(count - 1 for count in Counter(number for number, _ in won).values()),
        "claims_of_another": sum(claims.get(f"claim/{number}") != str(client) for number, client in won),
    }


def measure_ledger(path: Path, num_clients: int) -> dict[str, Any]:
    """Return the rate of episodes, and what was lost, came twice or is in a wrong state."""
    ledger, ended, rng = Ledger(path), [], random.Random(1)

    async def client(number: int) -> None:
        ledger.record(EpisodeRow(number, "running", start_version=0, source="submitted"))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        ledger.record(EpisodeRow(number, "buffered", start_version=0, samples=1, source="submitted"))
        await asyncio.sleep(0)
        ledger.record(EpisodeRow(number, "trained", start_version=0, step=0, samples=1, source="submitted"))
        ended.append(number)
        if len(ended) % COMMIT_EVERY == 0:
            ledger.commit()

    async def all_clients() -> None:
        await asyncio.gather(*map(client, range(num_clients)))

    began = time.perf_counter()
    asyncio.run(all_clients())
    recorded_s = time.perf_counter() - began
    ledger.close()
    written_s = time.perf_counter() - began
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT id, state FROM episodes").fetchall()
    ids = Counter(number for number, _ in rows)
    return {
        "episodes_recorded_per_s": round(num_clients / recorded_s),
        "episodes_written_per_s": round(num_clients / written_s),
        "episodes_lost": len(set(range(num_clients)) - set(ids)),
        "episodes_twice": sum(count - 1 for count in ids.values()),
        "wrong_state": sum(state != "trained" for _, state in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--folder", help="where the shared folder would be mounted; a temporary one by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        names = measure_names(Path(folder) / "names", options.clients, options.processes)
        ledger = measure_ledger(Path(folder) / "run.sqlite", options.clients)
    found = names | ledger
    print_table(["measure", "value"], [[key.replace("_", " "), f"{value:,}"] for key, value in found.items()])
    settings = {"clients": options.clients, "processes": options.processes}
    print(json.dumps({"benchmark": "many_clients", **settings, **found, **describe_machine()}))


if __name__ == "__main__":
    main()
