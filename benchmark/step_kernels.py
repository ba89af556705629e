"""What the GPU does for the trainer in each phase of a step, and how long it waits for the host. Prints tables.

    python benchmark/step_kernels.py [--first 8] [--steps 4] -- \\
        --config examples/arealite/configs/gsm8k_grpo.yaml actor.path=FOLDER …

Starts `gsm8k_grpo.py` with the local launcher and the given arguments, and profiles some steps of rank 0, after which
the run ends. Kernels are counted in the phase in which they run: each phase ends with a synchronization, without which
the work of a phase would run in the next one. A server on the same GPU is another process, whose kernels are not seen;
trainer kernels take longer beside it. Without a GPU the table has the times of the phases only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
FILE_ENV, STEPS_ENV = "KERNELS_FILE", "KERNELS_STEPS"
# The first pattern that the name of a kernel contains decides.
KINDS = {
    "copies": r"memcpy|memset|copy",
    "attention": r"flash|fmha|attention|sdpa",
    "matrix products": r"gemm|cutlass|nvjet|xmma|cublas|splitk",
    "compiled by torch": r"triton",
    "optimizer and norms": r"multi_tensor|foreach|adam|norm",
}
REST, TOP = "other kernels", 12


class Interval(NamedTuple):
    name: str
    begin_ns: int
    end_ns: int


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), REST)


def busy_ns(intervals: Iterable[Interval]) -> int:
    """Return the time that at least one interval covers."""
    total, end = 0, 0
    for _, begin, finish in sorted(intervals, key=lambda i: i.begin_ns):
        total += max(0, finish - max(begin, end))
        end = max(end, finish)
    return total


def summarize(phases: list[Interval], kernels: list[Interval], num_steps: int) -> dict[str, Any]:
    """Return milliseconds of a step: by phase and kind of kernel, and of the longest kernels."""
    table: dict[str, Counter[str]] = {}
    for phase in phases:
        inside = [k for k in kernels if phase.begin_ns <= k.begin_ns < phase.end_ns]
        row = table.setdefault(phase.name, Counter())
        row["time"] += phase.end_ns - phase.begin_ns
        busy = busy_ns(inside)
        row["GPU waits"] += phase.end_ns - phase.begin_ns - busy
        for kernel in inside:
            row[kind_of(kernel.name)] += kernel.end_ns - kernel.begin_ns
    longest: Counter[str] = Counter()
    for kernel in kernels:
        longest[kernel.name[:90]] += kernel.end_ns - kernel.begin_ns
    scale = 1e-6 / num_steps
    return {
        "phases": {name: {k: round(v * scale, 2) for k, v in row.items()} for name, row in table.items()},
        "longest": {name: round(took * scale, 2) for name, took in longest.most_common(TOP)},
        "launches": round(len(kernels) / num_steps),
    }


def run_script(path: Path, first: int, num_steps: int) -> None:
    """As a trainer rank: run the example, profile the steps from `first` on, and write their summary."""
    sys.path.insert(0, str(ROOT / "examples" / "arealite"))
    script: Any = importlib.import_module("gsm8k_grpo")
    run: Any = importlib.import_module("arealite.trainer.run")
    torch: Any = importlib.import_module("torch")
    kind = "CUDA" if torch.cuda.is_available() else "CPU"
    profiler = torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)])
    phases: list[Interval] = []
    steps, phase = run.Run.steps, run.Run.phase

    def synchronize() -> None:
        if kind == "CUDA":
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def timed_phase(self, name):
        begin = time.time_ns()
        with phase(self, name):
            yield
            synchronize()
        phases.append(Interval(name, begin, time.time_ns()))

    def profiled_steps(self):
        for step in steps(self):
            if step == first:
                phases.clear()
                synchronize()
                began = time.time_ns()
                profiler.start()
            elif step == first + num_steps:
                phases.append(Interval("whole step", began, time.time_ns()))
                profiler.stop()
                found = [
                    e for e in profiler.profiler.kineto_results.events() if str(e.device_type()) == "DeviceType.CUDA"
                ]
                kernels = [Interval(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in found]
                path.write_text(json.dumps(summarize(phases, kernels, num_steps)))
            yield step

    run.Run.steps, run.Run.phase = profiled_steps, timed_phase
    script.run_main(script.main)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=8, help="steps before the profile")
    parser.add_argument("--steps", type=int, default=4, help="steps that are profiled")
    parser.add_argument("arguments", nargs="+", help="of the run, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.json"
        command = [sys.executable, "-m", "arealite.launcher.local", __file__, *options.arguments]
        command += [f"trial_name=kernels-{os.getpid()}", f"total_train_steps={options.first + options.steps + 1}"]
        python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        steps = f"{options.first} {options.steps}"
        env = {**os.environ, FILE_ENV: str(path), STEPS_ENV: steps, "PYTHONPATH": python_path}
        result = subprocess.run(command, env=env, capture_output=True, text=True)
        if result.returncode or not path.exists():
            raise SystemExit(f"the run failed:\n{result.stdout}{result.stderr}")
        found = json.loads(path.read_text())
    common = importlib.import_module("benchmark.common")
    columns = ["time", "GPU waits", *KINDS, REST]
    rows = [[name, *(f"{row.get(key, 0.0):.1f}" for key in columns)] for name, row in found["phases"].items()]
    common.print_table(["ms of a step", *columns], rows)
    print(f"\n{found['launches']} kernels in a step; the longest, ms of a step:")
    for name, took in found["longest"].items():
        print(f"{took:8.1f}  {name}")
    print(json.dumps({"benchmark": "step_kernels", **common.describe_machine(), "results": found}))


if __name__ == "__main__":
    if FILE_ENV in os.environ and "RANK" in os.environ:
        run_script(Path(os.environ[FILE_ENV]), *map(int, os.environ[STEPS_ENV].split()))
    else:
        main()
