"""Where the milliseconds of a training step go, in one run or in two beside each other. Prints a table and a JSON line.

    python benchmark/step_table.py [NAME=]RUN [[NAME=]RUN] [--skip 5]

RUN is a run directory or a file like its `stats.jsonl`. Means over all steps after the first ones, in which code is
compiled and buffers fill, and without those that take more than three times the median (checkpoints, evaluations); how
many these are is printed. For example, the run of `benchmark/results/step_before.jsonl` and a new one:

    python benchmark/step_table.py before=benchmark/results/step_before.jsonl after=runs/gsm8k-grpo/trial0
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, median

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmark.common import describe_machine, print_table  # noqa: E402

# Steps that take so many times the median are not counted.
LONG = 3.0
# Phases in their order, and what each of them is.
PHASES = {
    "rollout": "wait for rollouts",
    "logp": "log-probs",
    "update": "advantages and update",
    "weights": "weight update",
    "evaluate": "evaluation",
    "save": "checkpoints",
}
SHARES = {"idle/trainer": "trainer idle", "idle/server": "server idle", "mfu": "update: share of the GPU's peak"}


def read_steps(path: Path, skip: int) -> list[dict[str, float]]:
    """Return the statistics of the steps to count; of all steps if there are no more than `skip`."""
    file = path / "stats.jsonl" if path.is_dir() else path
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    # Evaluations have lines of their own.
    steps = [row for row in rows if "time/step" in row]
    if not steps:
        raise SystemExit(f"{file} has no finished step")
    steps = [row for row in steps if row["step"] >= skip] or steps
    usual_s = median(row["time/step"] for row in steps)
    kept = [row for row in steps if row["time/step"] <= LONG * usual_s]
    if len(kept) < len(steps):
        print(f"{file}: {len(steps) - len(kept)} of {len(steps)} steps took longer than {LONG * usual_s:.1f} s")
    return kept


def count_minibatches(path: Path) -> int:
    """Return the minibatches of a step by the run's configuration; 0 if it is not there."""
    file = path / "config.yaml"
    config = yaml.safe_load(file.read_text()) if path.is_dir() and file.exists() else {}
    return (config.get("actor") or {}).get("ppo_n_minibatches", 0)


def measure(path: Path, skip: int) -> dict[str, float]:
    """Return the mean milliseconds of each part of a step, shares, and the speed."""
    steps = read_steps(path, skip)

    def mean(key: str) -> float | None:
        found = [row[key] for row in steps if row.get(key) is not None]
        return sum(found) / len(steps) if key.startswith("time/") else fmean(found) if found else None

    names = {key.removeprefix("time/") for row in steps for key in row if key.startswith("time/")}
    names = {name for name in names if not name.startswith("startup") and name != "step"}
    # A phase that a file does not have is part of `other`, not 0.
    order = [*(name for name in PHASES if name in names), *sorted(names - PHASES.keys())]
    found = {name: 1000 * (mean(f"time/{name}") or 0.0) for name in order}
    found["step"] = 1000 * (mean("time/step") or 0.0)
    found["other"] = found["step"] - sum(took for name, took in found.items() if name != "step")
    minibatches, tokens, speed = count_minibatches(path), mean("num_tokens"), mean("train_tokens_per_s")
    if minibatches and tokens and speed:
        found["update/passes"] = 1000 * minibatches * tokens / speed
        found["update/around"] = found["update"] - found["update/passes"]
    found |= {key: value for key in [*SHARES, "tokens_per_s"] if (value := mean(key)) is not None}
    return found | {"num_steps": len(steps)}


def rows_of(results: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return the rows of the table: milliseconds and shares of the step, then other shares and the speed."""
    parts = {name for found in results.values() for name in found}
    own = sorted(parts - PHASES.keys() - SHARES.keys() - {"step", "other", "num_steps", "tokens_per_s"})
    order = {**PHASES, **{name: name for name in own if "/" not in name}, "other": "other", "step": "step"}
    if "update/passes" in parts:
        order = _insert(order, {"update/passes": "  its passes", "update/around": "  around them"})
    rows = []
    for name, text in order.items():
        if any(found.get(name) for found in results.values()):
            cells = (
                [f"{f[name]:.0f}", f"{f[name] / f['step']:.0%}"] if name in f else ["", ""] for f in results.values()
            )
            rows.append([text, *(cell for pair in cells for cell in pair)])
    for name, text in SHARES.items():
        if name in parts:
            cells = (f"{f[name]:.0%}" if name in f else "" for f in results.values())
            rows.append([text, *(part for cell in cells for part in ("", cell))])
    speeds = (f"{f['tokens_per_s']:,.0f}" if "tokens_per_s" in f else "" for f in results.values())
    rows.append(["trained tokens/s", *(part for cell in speeds for part in (cell, ""))])
    return rows


def _insert(order: dict[str, str], parts: dict[str, str]) -> dict[str, str]:
    """Put the parts of the update behind it."""
    items = list(order.items())
    place = [name for name, _ in items].index("update") + 1
    return dict([*items[:place], *parts.items(), *items[place:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="run directory, or a file of statistics")
    parser.add_argument("--skip", type=int, default=5, help="steps that are not counted")
    options = parser.parse_args()
    named = [run.partition("=") for run in options.runs]
    paths = {name if path else Path(name).name: Path(path or name) for name, _, path in named}
    results = {name: measure(path, options.skip) for name, path in paths.items()}
    header = ["", *(cell for name in results for cell in (f"{name}, ms", "share"))]
    print_table(header, rows_of(results))
    print(json.dumps({"benchmark": "step_table", **describe_machine(), "results": results}))


if __name__ == "__main__":
    main()
