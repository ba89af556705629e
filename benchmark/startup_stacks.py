"""Where a trainer rank is, function by function, from the start of its process to its first update. Prints a tree.

    python benchmark/startup_stacks.py [--starts 2] [--min-s 0.1] -- \\
        --config examples/arealite/configs/gsm8k_grpo.yaml actor.path=FOLDER total_train_steps=1 …

Starts `gsm8k_grpo.py` with the local launcher and the given arguments, and samples the stack of rank 0's main thread
every few milliseconds. A function whose time lies almost entirely in one call is left out. The trial name of each start
gets a number, so that no start recovers another one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE_ENV, MIN_ENV = "STACKS_FILE", "STACKS_MIN_S"
INTERVAL_S = 0.004
# A function is left out if one call has more than this share of its time.
SAME_SHARE = 0.93


@dataclass
class Node:
    """A function in the tree of calls, and the seconds in which it was on the stack."""

    name: str = ""
    seconds: float = 0.0
    calls: dict[str, Node] = field(default_factory=dict)

    def add(self, names: list[str], seconds: float) -> None:
        node = self
        node.seconds += seconds
        for name in names:
            node = node.calls.setdefault(name, Node(name))
            node.seconds += seconds

    def lines(self, min_s: float, depth: int = 0) -> Iterator[str]:
        """Yield a line for each function with at least `min_s` seconds."""
        below = sorted((node for node in self.calls.values() if node.seconds >= min_s), key=lambda n: -n.seconds)
        is_passage = bool(below) and below[0].seconds > SAME_SHARE * self.seconds
        if not is_passage:
            yield f"{self.seconds:7.2f}  {'  ' * depth}{self.name}"
        for node in below:
            yield from node.lines(min_s, depth + (not is_passage))


def stack_of(frame: FrameType | None) -> list[str]:
    """Return the functions of a stack, outermost first, without those of the import system."""
    names = []
    while frame is not None:
        code = frame.f_code
        if "importlib" not in code.co_filename:
            folder, file = os.path.split(code.co_filename)
            function = f"import of {frame.f_globals.get('__name__')}" if code.co_name == "<module>" else code.co_name
            names.append(f"{function} ({os.path.basename(folder)}/{file})")
        frame = frame.f_back
    return names[::-1]


class Sampler:
    """Samples the stack of the main thread in a thread of its own."""

    def __init__(self) -> None:
        self.root = Node("all")
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        last = time.perf_counter()
        while not self._stop.wait(INTERVAL_S):
            names = stack_of(sys._current_frames().get(self._main or 0))
            now = time.perf_counter()
            self.root.add(names, now - last)
            last = now


def run_script(path: Path, min_s: float) -> None:
    """As a trainer rank: run the example, and write the tree after the first step."""
    sampler = Sampler()
    sampler.start()
    sys.path.insert(0, str(ROOT / "examples" / "arealite"))
    script: Any = importlib.import_module("gsm8k_grpo")
    run: Any = importlib.import_module("arealite.trainer.run")
    take = run.take_startup_stats

    def take_and_write(*args):
        found = take(*args)
        if found:
            sampler.stop()
            path.write_text("\n".join(sampler.root.lines(min_s)) + "\n")
        return found

    run.take_startup_stats = take_and_write
    script.run_main(script.main)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--min-s", type=float, default=0.1, help="shortest time of a function that is printed")
    parser.add_argument("arguments", nargs="+", help="of the run, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.starts):
            path = Path(folder) / f"stacks{number}.txt"
            command = [sys.executable, "-m", "arealite.launcher.local", __file__, *options.arguments]
            command += [f"trial_name=stacks{number}-{os.getpid()}"]
            python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            env = {**os.environ, FILE_ENV: str(path), MIN_ENV: str(options.min_s), "PYTHONPATH": python_path}
            result = subprocess.run(command, env=env, capture_output=True, text=True)
            if result.returncode:
                raise SystemExit(f"the run failed:\n{result.stdout}{result.stderr}")
            print(f"\nstart {number + 1}")
            print(*(line for line in result.stdout.splitlines() if "first update after" in line), sep="\n")
            print(path.read_text(), end="", flush=True)


if __name__ == "__main__":
    if FILE_ENV in os.environ and "RANK" in os.environ:
        run_script(Path(os.environ[FILE_ENV]), float(os.environ[MIN_ENV]))
    else:
        main()
