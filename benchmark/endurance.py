"""Does the server's memory stay where it is? Many small requests through HTTP, its resident memory read on the way.

    python benchmark/endurance.py requests=100000

Random weights of the smallest shape on the CPU; prompts differ, so that the prefix cache fills and evicts. Prints memory after each tenth and one JSON line;
the first tenth fills caches and is not counted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import load
import torch
from common import describe_machine
from inference import Options, make_model

from arealite.utils.config import load_config


@dataclass
class Endurance:
    """How much is asked."""

    requests: int = field(default=100_000, metadata={"help": "Requests in all."})
    concurrency: int = field(default=64, metadata={"help": "Requests at once."})


def main() -> None:
    options = load_config(sys.argv[1:], Endurance)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Options(shape="tiny", device="cpu"), "cpu").save_pretrained(folder)
        command = [sys.executable, "-m", "arealite.cli.serve", f"model_path={folder}"]
        command += ["device=cpu", "max_total_tokens=16384", "context_length=256"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            url = server.stdout.readline().split()[-1]
            rows = run(options, url, server.pid)
        finally:
            server.terminate()
            server.wait(30)
    growth = (rows[-1][1] - rows[0][1]) / max(1, rows[-1][0] - rows[0][0])
    print(f"{1e5 * growth / 2**20:.2f} MiB per 100,000 requests after the first tenth")
    line = {"benchmark": "endurance", **describe_machine(), **vars(options), "rss": rows}
    print(json.dumps(line | {"bytes_per_request": growth}))


def run(options: Endurance, url: str, pid: int) -> list[tuple[int, int]]:
    generator = torch.Generator().manual_seed(0)
    rows, part = [], options.requests // 10
    for done in range(part, options.requests + 1, part):
        prompts = torch.randint(0, 32, (part, 24), generator=generator).tolist()
        rate = load.measure(url, "native", [(p, 2) for p in prompts], options.concurrency, 3600)
        size = int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) << 10
        rows.append((done, size))
        print(f"{done:8} requests  {size / 2**20:8.1f} MiB  {rate / 2:7.0f} requests/s", flush=True)
    return rows


if __name__ == "__main__":
    main()
