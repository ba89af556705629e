"""Trains a real model with an example of several turns, tools or a black-box agent: does it learn?

    python benchmark/agents_learn.py TASK --model FOLDER --out FOLDER [--data GSM8K_FOLDER] [--steps 60] [KEY=VALUE ...]

| TASK | example | rows |
|---|---|---|
| `countdown` | `countdown.py`: one turn | the script's own |
| `tool` | `tool_math.py`: a call of the Python tool, then the answer | arithmetic with 3 and 4 digits |
| `multi_turn` | `multi_turn_math.py`: a second answer after a wrong one | GSM8K's `train.jsonl` of `--data` |
| `openai_agent` | `openai_agent.py`: two turns of the official client | GSM8K's `train.jsonl` of `--data` |

The example runs with its own configuration and what `TASKS` below adds: 64 prompts, 8 answers each, shorter answers.
Server and trainer share one GPU; later values win, so `KEY=VALUE` changes anything. Writes to `--out`: `stats.jsonl`,
`curve.png`, `config.yaml`, `versions.json`, and `result.txt` with the line `TASK reward_before reward_after steps
seconds`: the mean rewards of training samples in the first and the last five steps. All of them are new prompts as
long as no epoch ends (256 steps of countdown and of tool, 116 of GSM8K).

`openai_agent` needs the client: `openai`, and of what it depends on `pydantic`, `pydantic-core`, `annotated-types`,
`typing-inspection`, `jiter`, `httpx2`, `httpcore2`, `truststore`, `sniffio` (besides `anyio`, `idna`, `h11`,
`typing-extensions`).
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from common import describe_machine
from learning import EXAMPLE, KEPT, REPOSITORY, read_stats
from matplotlib.figure import Figure

COMMON = [
    "allocation_mode=embedded.d1p1t1+d1p1t1", "rollout.weight_update=shm", "total_train_epochs=10",
    "train_dataset.batch_size=64", "gconfig.n_samples=8", "saver.freq_epochs=null",
]  # fmt: skip
ROWS = 16_384
# Statistics of workflows.
OWN = ("turns", "success", "tool_calls", "tool_failures", "tool_timeouts", "branches", "drift_calls", "failed_attempts")


@dataclass(frozen=True)
class Task:
    """An example, what it is run with beside its configuration, and whether it reads GSM8K."""

    example: str
    overrides: tuple[str, ...]
    gsm8k: bool = True


TASKS = {
    "countdown": Task("countdown", ("gconfig.max_new_tokens=256",), gsm8k=False),
    "tool": Task("tool_math", ("gconfig.max_new_tokens=256",), gsm8k=False),
    "multi_turn": Task("multi_turn_math", ("gconfig.max_new_tokens=384",)),
    "openai_agent": Task("openai_agent", ("gconfig.max_new_tokens=384",)),
}


def write_arithmetic(path: Path) -> Path:
    """Write rows in the layout of GSM8K that are hard to compute without a tool."""
    rng, rows = random.Random(1), []
    for _ in range(ROWS):
        a, b, c = rng.randint(100, 9999), rng.randint(100, 9999), rng.randint(100, 9999)
        text, value = rng.choice(
            (
                (f"{a} * {b} + {c}", a * b + c),
                (f"{a} * {b} - {c}", a * b - c),
                (f"({a} + {b}) * {c}", (a + b) * c),
                (f"({a} - {b}) * {c}", (a - b) * c),
            )
        )
        rows.append({"question": f"What is {text}?", "answer": f"#### {value}"})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(args: argparse.Namespace, task: Task) -> Path:
    """Run the example to its end; return the run directory."""
    command = [sys.executable, "-m", "arealite.launcher.local", str(EXAMPLE / f"{task.example}.py")]
    command += ["--config", str(EXAMPLE / f"configs/{task.example}.yaml"), f"actor.path={args.model}"]
    command += [f"cluster.fileroot={args.runs}", f"experiment_name={args.out.name}", f"total_train_steps={args.steps}"]
    if task.gsm8k:
        command.append(f"train_dataset.path={args.data / 'train.jsonl'}")
    elif args.task == "tool":
        command.append(f"train_dataset.path={write_arithmetic(args.runs / 'arithmetic.jsonl')}")
    subprocess.run([*command, *COMMON, *task.overrides, *args.overrides], check=True, cwd=REPOSITORY)
    return args.runs / args.out.name / "trial0"


def write_results(args: argparse.Namespace, run: Path, seconds: float) -> None:
    """Write everything to `--out` and print the line."""
    rows = [row for row in read_stats(run) if "reward" in row]
    kept = [{k: v for k, v in row.items() if k in KEPT or k.rpartition("/")[2] in OWN} for row in rows]
    (args.out / "stats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    shutil.copy(run / "config.yaml", args.out / "config.yaml")
    (args.out / "versions.json").write_text(json.dumps({**describe_machine(), "command": sys.argv}, indent=1) + "\n")
    rewards = [row["reward"] for row in rows]
    draw(args.task, rewards, args.out / "curve.png")
    line = f"{args.task} {fmean(rewards[:5]):.3f} {fmean(rewards[-5:]):.3f} {len(rows)} {seconds:.0f}"
    (args.out / "result.txt").write_text(line + "\n")
    print(line, flush=True)


def draw(task: str, rewards: list[float], path: Path) -> None:
    """Draw the reward by step, and its mean over the last ten steps."""
    figure = Figure(figsize=(6, 4), dpi=120, layout="tight")
    axes = figure.subplots()
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, alpha=0.4)
    axes.plot(steps, [fmean(rewards[max(0, step - 10) : step]) for step in steps])
    axes.set(xlabel="step", ylabel="reward of training samples", title=task)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder with GSM8K's train.jsonl")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run directories")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("overrides", nargs="*", help="further configuration")
    args = parser.parse_intermixed_args()
    task = TASKS[args.task]
    if task.gsm8k and args.data is None:
        parser.error(f"{args.task} needs --data")
    args.out, args.runs = args.out.resolve(), args.runs.resolve()
    args.data = args.data and args.data.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    run = train(args, task)
    write_results(args, run, time.monotonic() - began)


if __name__ == "__main__":
    main()
