"""Time that the help of each command takes, and how many modules it imports. Prints a table and a JSON line.

    python benchmark/command.py [--rounds 5]

Medians over rounds, in processes that start one after the other. `plain python` is the interpreter alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arealite.cli.entry import COMMANDS  # noqa: E402
from benchmark.common import describe_machine, print_table  # noqa: E402

COUNT = """
import sys
from arealite.cli import entry
sys.argv = ["arealite", *sys.argv[1:]]
try:
    entry.main()
finally:
    print(len(sys.modules), file=sys.stderr)
"""


def measure(argv: list[str], rounds: int) -> float:
    """Return the median of the seconds that a process takes."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run(argv, cwd=ROOT, capture_output=True, check=True)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def count_modules(argv: list[str]) -> int:
    """Return how many modules the help of a command has imported at its end."""
    done = subprocess.run([sys.executable, "-c", COUNT, *argv], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stderr.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each command")
    rounds = parser.parse_args().rounds
    results = {"plain python": {"seconds": measure([sys.executable, "-c", ""], rounds)}}
    for name in ("", *COMMANDS):
        argv = [*name.split(), "--help"]
        seconds = measure([sys.executable, "-m", "arealite.cli.entry", *argv], rounds)
        results[" ".join(["arealite", *argv])] = {"seconds": seconds, "modules": count_modules(argv)}
    rows = [[name, f"{found['seconds']:.2f}", str(found.get("modules", ""))] for name, found in results.items()]
    print_table(["command", "seconds", "modules"], rows)
    print(json.dumps({"benchmark": "command", **describe_machine(), "results": results}))


if __name__ == "__main__":
    main()
