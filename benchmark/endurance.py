"""Sends many small requests to a server and checks that memory, throughput and answers stay the same.

Some requests are aborted, cancelled or invalid, and weights are updated meanwhile.

    python benchmark/endurance.py requests=100000

Random weights of the smallest shape on the CPU; prompts differ, so that the prefix cache fills and evicts. Fails unless
every request gets its answer and no KV cache block is lost. Prints the server's resident memory after each tenth of the
requests, then one JSON line. The first tenth fills caches and does not count.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from common import describe_machine
from inference import Options, make_model

from arealite.utils.config import load_config

UPDATE_EVERY = 1000  # requests
TIMEOUT = aiohttp.ClientTimeout(total=120)


@dataclass
class Endurance:
    """Options of the benchmark."""

    requests: int = field(default=100_000, metadata={"help": "Number of requests."})
    concurrency: int = field(default=128, metadata={"help": "Requests at once."})
    seed: int = field(default=0, metadata={"help": "Seed of the requests."})


class Client:
    """Sends requests of several kinds and counts how they end."""

    def __init__(self, session: aiohttp.ClientSession, options: Endurance, folder: str):
        self.session, self.folder = session, folder
        self.rng = random.Random(options.seed)
        self.concurrency = options.concurrency
        self.ends: Counter[str] = Counter()
        self.asked = 0

    async def ask_until(self, count: int) -> None:
        async def work() -> None:
            while self.asked < count:
                self.asked += 1
                number = self.asked
                if number % UPDATE_EVERY == 0:
                    await self.update()
                await self.ask(f"request-{number}")

        await asyncio.gather(*(work() for _ in range(self.concurrency)))

    async def ask(self, rid: str) -> None:
        rng = self.rng
        kind = rng.choices(("wait", "abort", "cancel", "invalid"), (90, 4, 4, 2))[0]
        length = 1000 if kind in ("abort", "cancel") else rng.randint(1, 6)
        params = {"max_new_tokens": length, "ignore_eos": True, "n": rng.choice((1, 1, 1, 4))}
        prompt = [rng.randrange(32) for _ in range(rng.randint(1, 60))]
        if kind == "invalid":
            prompt.append(32)
        body = {"rid": rid, "input_ids": prompt, "sampling_params": params, "return_logprob": True}
        asking = asyncio.ensure_future(self.post("/generate", body))
        if kind in ("abort", "cancel"):
            await asyncio.wait([asking], timeout=0.05 * rng.random())
        if kind == "cancel" and not asking.done():
            asking.cancel()
            self.ends["cancelled"] += 1
            return
        if kind == "abort":
            await self.post("/abort_request", {"rid": rid})
        status, answer = await asking
        self.ends[self.check(rid, kind, params["n"], status, answer)] += 1

    def check(self, rid: str, kind: str, n: int, status: int, answer: dict | list) -> str:
        """Check an answer; returns how the request ended."""
        if kind == "invalid":
            assert status == 400 and "outside the vocabulary" in str(answer), (status, answer)
            return "rejected"
        samples = answer if isinstance(answer, list) else [answer]
        assert status == 200 and len(samples) == n, (status, answer)
        assert all(sample["meta_info"]["id"].startswith(rid) for sample in samples), answer
        kinds = {sample["meta_info"]["finish_reason"]["type"] for sample in samples}
        assert kinds <= ({"length", "abort"} if kind == "abort" else {"length"}), kinds
        return "aborted" if "abort" in kinds else "complete"

    async def update(self) -> None:
        body = {"model_path": self.folder, "flush_cache": self.rng.random() < 0.5}
        status, answer = await self.post("/update_weights_from_disk", body)
        assert status == 200, answer
        self.ends["weight updates"] += 1

    async def post(self, path: str, body: dict) -> tuple[int, dict | list]:
        async with self.session.post(path, json=body) as answer:
            return answer.status, await answer.json()

    async def settled(self) -> dict:
        """Return the server's counters once all cancelled requests have ended."""
        deadline = time.monotonic() + 30
        while True:
            async with self.session.get("/server_info") as answer:
                info = await answer.json()
            if not (info["running"] or info["waiting"]) or time.monotonic() > deadline:
                return info
            await self.ask("settling")  # a round trip through the engine


def main() -> None:
    options = load_config(sys.argv[1:], Endurance)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Options(shape="tiny", device="cpu"), "cpu").save_pretrained(folder)
        command = [sys.executable, "-m", "arealite.cli.serve", f"model_path={folder}"]
        command += ["device=cpu", "max_total_tokens=16384", "context_length=1100"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            url = server.stdout.readline().split()[-1]
            rows, ends, info = asyncio.run(run(options, url, server.pid, folder))
        finally:
            server.terminate()
            server.wait(30)
    growth = (rows[-1][1] - rows[0][1]) / max(1, rows[-1][0] - rows[0][0])
    print(f"{1e5 * growth / 2**20:.2f} MiB per 100,000 requests after the first tenth")
    print(dict(ends))
    lost = info["total_blocks"] - info["free_blocks"]
    line = {"benchmark": "endurance", **describe_machine(), **vars(options), "rss": rows}
    line |= {"bytes_per_request": growth, "ends": ends, "lost_blocks": lost}
    print(json.dumps(line | {"preemptions": info["preemptions"]}))
    if lost or info["running"] or info["waiting"]:
        sys.exit(f"requests or blocks are left on the server: {info}")


async def run(options: Endurance, url: str, pid: int, folder: str) -> tuple[list[tuple[int, int]], Counter[str], dict]:
    rows, part = [], options.requests // 10
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=TIMEOUT) as session:
        client = Client(session, options, folder)
        for done in range(part, options.requests + 1, part):
            begin = time.monotonic()
            await client.ask_until(done)
            rate = part / (time.monotonic() - begin)
            status = Path(f"/proc/{pid}/status").read_text()
            size = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) << 10
            rows.append((done, size))
            print(f"{done:8} requests {size / 2**20:8.1f} MiB {rate:7.0f} requests/s", flush=True)
        ended = sum(client.ends.values()) - client.ends["weight updates"]
        assert ended == client.asked, (ended, client.asked)
        return rows, client.ends, await client.settled()


if __name__ == "__main__":
    main()
