"""Time to solve the demo's task: asynchronous, synchronous, and TRL's GRPOTrainer where it is installed.

    python benchmark/demo.py [--runs 3] [--trl-python PATH]

All start from the same supervised weights and use the same batch, group size, learning rate, clipping and number of
optimizer steps; each run has its own seed. Runs alternate, so that other load on the machine affects all. CPU seconds
are those of all processes of a run, with their start; other load changes them little. Prints a table of medians and one
JSON line. `--trl-python` names an interpreter that has TRL. Without it TRL is left out, unless this interpreter has it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import describe_machine, print_table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "arealite"))
from demo import HERE as EXAMPLES  # noqa: E402
from demo import supervise  # noqa: E402
from reverse import make_model  # noqa: E402

GOAL, SMOOTH = 0.9, 3
SAMPLES_PER_STEP = 64 * 8
ETA = {"asynchronous": 1, "synchronous": 0}


def run_arealite(name: str, model: Path, work: Path, seed: int) -> list[tuple[float, float]]:
    """Run once through the launcher. Returns (seconds so far, reward) of each step."""
    command = [sys.executable, "-m", "arealite.launcher.local", str(EXAMPLES / "reverse_grpo.py")]
    command += ["--config", str(EXAMPLES / "configs" / "demo.yaml"), f"actor.path={model}"]
    command += [f"rollout.max_head_offpolicyness={ETA[name]}", f"cluster.fileroot={work}"]
    command += [f"trial_name={name}", f"seed={seed}", "stats_logger.console=false"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=900)
    curve, seconds = [], 0.0
    for line in (work / "demo" / name / "stats.jsonl").read_text().splitlines():
        step = json.loads(line)
        seconds += step["time/step"]
        curve.append((seconds, step["reward"]))
    return curve


def run_trl(python: str, model: Path, work: Path, seed: int) -> list[tuple[float, float]]:
    """Run TRL once in a process of its own. Returns (seconds so far, reward) of each step."""
    out = work / "trl.jsonl"
    script = Path(__file__).with_name("trl_reverse.py")
    log = (work / "trl.log").open("w")
    subprocess.run([python, script, model, out, str(seed)], check=True, timeout=900, stdout=log, stderr=log)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return [(row["seconds"], row["reward"]) for row in rows]


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds_to_goal(curve: list[tuple[float, float]]) -> float:
    """Seconds until the mean reward of the last few batches first reached the goal; infinity if it never did."""
    for i in range(SMOOTH - 1, len(curve)):
        if sum(reward for _, reward in curve[i - SMOOTH + 1 : i + 1]) / SMOOTH >= GOAL:
            return curve[i][0]
    return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trl-python", default=sys.executable if importlib.util.find_spec("trl") else None)
    args = parser.parse_args()
    names = [*ETA, *(["TRL"] if args.trl_python else [])]
    curves: dict[str, list] = {name: [] for name in names}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_model(work / "random", seed=1)
        supervise(work / "random", work / "model", seed=1)
        for seed in range(1, args.runs + 1):
            for name in names:
                before = cpu_seconds_of_children()
                if name == "TRL":
                    curves[name].append(run_trl(args.trl_python, work / "model", work, seed))
                else:
                    curves[name].append(run_arealite(name, work / "model", work, seed))
                cpu_seconds[name].append(cpu_seconds_of_children() - before)
    result = {}
    for name, runs in curves.items():
        result[name] = {
            "seconds_to_0.9": [round(seconds_to_goal(run), 1) for run in runs],
            "steps_to_0.9": [sum(when <= seconds_to_goal(run) for when, _ in run) for run in runs],
            "total_seconds": [round(run[-1][0], 1) for run in runs],
            "cpu_seconds": [round(seconds, 1) for seconds in cpu_seconds[name]],
            "samples_per_s": [round(len(run) * SAMPLES_PER_STEP / run[-1][0]) for run in runs],
            "final_reward": [round(statistics.mean(r for _, r in run[-5:]), 3) for run in runs],
        }
    columns = ["seconds_to_0.9", "steps_to_0.9", "total_seconds", "cpu_seconds", "samples_per_s", "final_reward"]
    print_table(
        ["median of runs", *columns],
        [[name, *(f"{statistics.median(row[c]):g}" for c in columns)] for name, row in result.items()],
    )
    print(json.dumps({"benchmark": "demo", "runs": args.runs, **describe_machine(), "result": result}))


if __name__ == "__main__":
    main()
