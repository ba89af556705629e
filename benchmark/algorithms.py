"""Trains a real model for a few steps with every file of `configs/algorithms/`: does each name learn?

    python benchmark/algorithms.py --model FOLDER --data FOLDER --out FOLDER [--teacher FOLDER] [--steps 25]
        [--at-once 4] [--only grpo,ppo] [KEY=VALUE ...]

FOLDER of `--data` has GSM8K's `train.jsonl`. Every run is README's command with the configuration of the example and
the file of the algorithm on top. Servers and trainers share one GPU, `--at-once` runs at a time. Distillation needs
`--teacher`. Prints a table and one JSON line, and writes `results.md`, `stats.jsonl` and the configuration of each run.
The table has the mean reward of training samples in the first and last five steps, with the standard error of the gain.
"""

import argparse
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from common import describe_machine, print_table

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "examples/arealite/configs"
# Loops with a critic or teacher, which the script of the example does not have.
TRAINER = REPOSITORY / "arealite/trainer/ppo.py"
# Smaller than the example: a quarter of the answers' length, half of the prompts, sizes that let runs share a GPU.
SMALL = [
    "allocation_mode=embedded.d1p1t1+d1p1t1", "rollout.weight_update=shm", "gconfig.max_new_tokens=256",
    "server.max_total_tokens=200000", "actor.max_tokens_per_mb=16384", "actor.gradient_checkpointing=false",
]  # fmt: skip


def command_for(name: str, args: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "arealite.launcher.local", str(TRAINER)]
    command += ["--config", str(CONFIGS / "gsm8k_grpo.yaml"), "--config", str(CONFIGS / f"algorithms/{name}.yaml")]
    command += [f"actor.path={args.model}", f"train_dataset.path={args.data / 'train.jsonl'}", *SMALL]
    command += [f"cluster.fileroot={args.runs}", f"experiment_name=algorithms-{name}"]
    command += [f"total_train_steps={args.steps}", f"train_dataset.batch_size={32 * answers_per_prompt(name)}"]
    if "max_answer_length" in read(name):
        command.append("actor.max_answer_length=256")
    if "overlong_buffer" in read(name):
        command.append("actor.overlong_buffer=64")
    if "teacher" in read(name):
        command.append(f"teacher.path={args.teacher}")
    return [*command, *args.overrides]


def read(name: str) -> str:
    return (CONFIGS / f"algorithms/{name}.yaml").read_text()


def answers_per_prompt(name: str) -> int:
    """How many more prompts an algorithm without groups gets, so that all train on equally many answers."""
    return 8 if "n_samples: 1" in read(name) else 1


def run(name: str, args: argparse.Namespace) -> dict:
    log = args.out / f"{name}.log"
    with log.open("w") as file:
        code = subprocess.run(
            command_for(name, args), stdout=file, stderr=subprocess.STDOUT, cwd=REPOSITORY, check=False
        ).returncode
    folder = args.runs / f"algorithms-{name}" / "trial0"
    stats = folder / "stats.jsonl"
    rows = [json.loads(line) for line in stats.read_text().splitlines()] if stats.exists() else []
    trained = [row for row in rows if "reward" in row]
    if code or len(trained) < 10:
        print(f"{name} ended with code {code} after {len(trained)} steps: see {log}", flush=True)
        return {"algorithm": name, "steps": len(trained)}
    with (args.out / "stats.jsonl").open("a") as file:
        kept = ("step", "reward", "answer_len", "entropy", "prox_kl", "behav_kl/k3", "clip_share", "grad_norm")
        file.writelines(json.dumps({"algorithm": name} | {k: row.get(k) for k in kept}) + "\n" for row in trained)
    shutil.copy(folder / "config.yaml", args.out / f"{name}.yaml")
    row = summary(name, trained)
    print(row, flush=True)
    return row


def summary(name: str, trained: list[dict]) -> dict:
    first, last = ([row["reward"] for row in part] for part in (trained[:5], trained[-5:]))
    samples = 5 * trained[0]["num_seqs"]
    errors = [(fmean(part) * (1 - fmean(part)) / samples) ** 0.5 for part in (first, last)]
    gain, error = fmean(last) - fmean(first), sum(e * e for e in errors) ** 0.5
    return {
        "algorithm": name, "steps": len(trained), "first": round(fmean(first), 3), "last": round(fmean(last), 3),
        "gain": round(gain, 3), "standard_error": round(error, 3), "learns": gain > 2 * error,
        "alarms": sum(row.get("alarms", 0) for row in trained),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--teacher", help="Hugging Face folder of a larger model with the same tokenizer")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run directories")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--only", default="", help="algorithms, separated by commas")
    parser.add_argument("overrides", nargs="*", help="further configuration")
    args = parser.parse_args()
    args.data, args.out, args.runs = args.data.resolve(), args.out.resolve(), args.runs.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.only.split(",") if args.only else sorted(file.stem for file in (CONFIGS / "algorithms").glob("*.yaml"))
    if args.teacher is None:
        names = [name for name in names if "teacher" not in read(name)]
    with ThreadPoolExecutor(args.at_once) as pool:
        rows = list(pool.map(lambda name: run(name, args), names))
    header = max((list(row) for row in rows), key=len)
    print_table(header, [[str(row.get(key, "")) for key in header] for row in rows])
    machine = describe_machine()
    print(json.dumps({"benchmark": "algorithms", **machine, "rows": rows}), flush=True)
    table = [header, ["---"] * len(header), *([str(row.get(key, "")) for key in header] for row in rows)]
    described = ", ".join(f"{key} {value}" for key, value in machine.items() if value)
    lines = ["# Every algorithm on a real model", "", described + ".", ""]
    (args.out / "results.md").write_text("\n".join([*lines, *(f"| {' | '.join(row)} |" for row in table)]) + "\n")


if __name__ == "__main__":
    main()
