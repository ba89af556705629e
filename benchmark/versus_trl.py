"""Compares the whole loop with TRL and vLLM: the same model, data, batch, lengths, optimizer and precision, one GPU.

    python benchmark/versus_trl.py --model FOLDER --train GSM8K_TRAIN.jsonl --trl-python "env PYTHONPATH=… python3"
        [--steps 40] [--trl-steps 20] [--compile-trl] [--out FOLDER]

Our side is README's command with the configuration of the example, TRL's side is trl_gsm8k.py (vLLM in its process).
The sides run one after the other. Prints a table and one JSON line: samples per second after the third step, and the
seconds (of training, without start-up) until the mean reward of the last five batches first reached each level.
"""

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

from common import describe_machine, print_table

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE = REPOSITORY / "examples/arealite"
SAMPLES, SMOOTH, WARM_UP = 512, 5, 3


def run_ours(args: argparse.Namespace) -> list[tuple[float, float]]:
    """Return (seconds so far, reward) of each step."""
    name = f"versus-trl-{int(time.time())}"
    command = [sys.executable, "-m", "arealite.launcher.local", str(EXAMPLE / "gsm8k_grpo.py")]
    command += ["--config", str(EXAMPLE / "configs/gsm8k_grpo.yaml"), "allocation_mode=embedded.d1p1t1+d1p1t1"]
    command += [f"actor.path={args.model}", f"train_dataset.path={args.train}", f"cluster.fileroot={args.out}"]
    command += [f"experiment_name={name}", f"total_train_steps={args.steps}", "gconfig.max_new_tokens=512"]
    command += ["rollout.weight_update=shm", "actor.compile=true", "stats_logger.console=false"]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    rows = [json.loads(line) for line in (args.out / name / "trial0/stats.jsonl").read_text().splitlines()]
    curve, seconds = [], 0.0
    for row in (row for row in rows if "reward" in row):
        seconds += row["time/step"]
        curve.append((seconds, row["reward"]))
    return curve


def run_trl(args: argparse.Namespace) -> list[tuple[float, float]]:
    out = args.out / "trl.jsonl"
    script = str(Path(__file__).with_name("trl_gsm8k.py"))
    options = ["compile"] if args.compile_trl else []
    command = [*shlex.split(args.trl_python), script, args.model, args.train, str(out), str(args.trl_steps), *options]
    # What it wrote until its time limit counts.
    with (args.out / "trl.log").open("w") as log, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, stdout=log, stderr=log, check=False, timeout=args.trl_timeout)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return [(row["seconds"], row["reward"]) for row in rows]


def samples_per_second(curve: list[tuple[float, float]]) -> float:
    (start, _), (end, _) = curve[WARM_UP - 1], curve[-1]
    return SAMPLES * (len(curve) - WARM_UP) / (end - start)


def seconds_to(curve: list[tuple[float, float]], level: float) -> float | None:
    for i in range(SMOOTH, len(curve) + 1):
        if fmean(reward for _, reward in curve[i - SMOOTH : i]) >= level:
            return curve[i - 1][0]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--trl-python", required=True, help="command of an interpreter that has TRL and vLLM")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--trl-steps", type=int, default=20)
    parser.add_argument("--trl-timeout", type=float, default=3600)
    parser.add_argument("--compile-trl", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    curves = {"AReaLite": run_ours(args), "TRL + vLLM": run_trl(args)}
    best = min(max(fmean(r for _, r in c[i - SMOOTH : i]) for i in range(SMOOTH, len(c) + 1)) for c in curves.values())
    levels = [round(best * share, 3) for share in (0.8, 0.9, 1.0)]
    header = ["side", "steps", "samples/s", *(f"seconds to {level}" for level in levels)]
    rows = []
    for side, curve in curves.items():
        times = [seconds_to(curve, level - 5e-4) for level in levels]
        rate = samples_per_second(curve)
        rows.append([side, str(len(curve)), f"{rate:.0f}", *(f"{t:.0f}" if t is not None else "-" for t in times)])
    print_table(header, rows)
    print(json.dumps({"benchmark": "versus_trl", **describe_machine(), "curves": curves}), flush=True)


if __name__ == "__main__":
    main()
