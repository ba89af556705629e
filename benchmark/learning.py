"""Trains a real model on GSM8K with the settings of the example, and evaluates it before, meanwhile and after.

    python benchmark/learning.py --model FOLDER --data FOLDER --out FOLDER [--steps 240] [--samples 8]
        [KEY=VALUE ...]

FOLDER of `--data` has GSM8K's `train.jsonl` and `test.jsonl`; other `*.jsonl` files in it (columns `input`, `target`,
such as MAWPS) are held-out sets. The command of the README is run, with server and trainer on one GPU. A run that was
interrupted goes on if the same command is given again. With `--samples`, the first and the last model also answer
GSM8K's test set that many times at temperature 1. Writes to `--out`: `stats.jsonl`, `samples.jsonl`, `curve.png`,
`config.yaml` and `results.md` with a table of all sets before and after, from the answers that the run keeps.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from common import describe_machine
from matplotlib.figure import Figure

from arealite.algo.eval_metrics import interval
from arealite.trainer.answers import Answer, read_answers

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE = REPOSITORY / "examples/arealite"
KEPT = (
    "step", "time", "reward", "answer_len", "truncated_share", "zero_advantage_share", "entropy", "prox_kl",
    "behav_kl/k3", "ratio/max", "clip_share", "grad_norm", "lr", "staleness", "staleness/max", "skipped_minibatches",
    "alarms", "tokens_per_s", "mfu", "idle/trainer", "idle/server", "time/step", "time/rollout", "time/logp",
    "time/update", "time/weights", "time/save", "time/evaluate", "num_seqs", "seq_len",
)  # fmt: skip


def prepare_data(data: Path, folder: Path) -> dict[str, Path]:
    """Return the validation sets by name; held-out sets are rewritten in the layout of GSM8K."""
    folder.mkdir(parents=True, exist_ok=True)
    sets = {"gsm8k": data / "test.jsonl"}
    for source in sorted(data.glob("*.jsonl")):
        if source.name in ("train.jsonl", "test.jsonl"):
            continue
        rows = [json.loads(line) for line in source.read_text().splitlines()]
        converted = [{"question": row["input"], "answer": f"#### {row['target']}"} for row in rows]
        sets[source.stem] = folder / source.name
        sets[source.stem].write_text("".join(json.dumps(row) + "\n" for row in converted))
    return sets


def train(args: argparse.Namespace, sets: dict[str, Path]) -> Path:
    """Run the example to its end; return the run directory."""
    name = args.out.name
    command = [sys.executable, "-m", "arealite.launcher.local", str(EXAMPLE / "gsm8k_grpo.py")]
    command += ["--config", str(EXAMPLE / "configs/gsm8k_grpo.yaml"), "allocation_mode=embedded.d1p1t1+d1p1t1"]
    command += [f"actor.path={args.model}", f"train_dataset.path={args.data / 'train.jsonl'}"]
    command += [f"cluster.fileroot={args.runs}", f"experiment_name={name}", f"total_train_steps={args.steps}"]
    command += ["rollout.weight_update=shm", "actor.compile=true", "gconfig.max_new_tokens=512"]
    command += ["recover.mode=auto", "recover.freq_steps=50", f"evaluator.freq_steps={args.eval_every}"]
    command += [f"valid_datasets.{key}.path={path}" for key, path in sets.items()]
    subprocess.run([*command, *args.overrides], check=True, cwd=REPOSITORY)
    return args.runs / name / "trial0"


def evaluate_samples(args: argparse.Namespace, run: Path, test: Path) -> dict[str, dict[str, float]]:
    """Return the statistics of sampled answers, before and after training."""
    last = max((run / "checkpoints").glob("*step*"), key=lambda folder: folder.stat().st_mtime)
    started = {}
    for name, model in (("before", args.model), ("after", last)):
        command = [sys.executable, "-m", "arealite.cli.main", "trainer.type=null", f"trainer.grpo.actor.path={model}"]
        command += [f"valid_dataset.path={test}", "valid_dataset.task=gsm8k"]
        command += [f"trainer.grpo.eval_gconfig.n_samples={args.samples}"]
        command += ["trainer.grpo.eval_gconfig.temperature=1.0", "trainer.grpo.gconfig.max_new_tokens=512"]
        command += ["trainer.grpo.server.mem_fraction=0.3"]
        command += [f"cluster.fileroot={args.runs}", f"experiment_name={args.out.name}-{name}", "trial_name=samples"]
        started[name] = subprocess.Popen(command, cwd=REPOSITORY)
    found = {}
    for name, process in started.items():
        if process.wait():
            raise SystemExit(f"the evaluation {name} training failed with code {process.returncode}")
        found[name] = read_stats(args.runs / f"{args.out.name}-{name}" / "samples")[-1]
    return found


def write_samples(found: dict[str, dict[str, float]], count: int, out: Path) -> None:
    """Add pass@1, pass@k and maj@k of sampled answers to results.md, and all their statistics as samples.jsonl."""
    rows = [{"model": name, **stats} for name, stats in found.items()]
    (out / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        "",
        f"GSM8K test, {count} answers per question at temperature 1:",
        "",
        "| | before | after |",
        "|---|---|---|",
    ]
    for metric in ("pass@1", f"pass@{count}", f"maj@{count}"):
        key = f"eval/valid/{metric}"
        spans = [f"{x[key]:.1%} ({x[f'{key}/low']:.1%} to {x[f'{key}/high']:.1%})" for x in found.values()]
        lines.append(f"| {metric} | {' | '.join(spans)} |")
    print("\n".join(lines))
    with (out / "results.md").open("a") as file:
        file.write("\n".join(lines) + "\n")


def read_stats(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]


def versions(answers: list[Answer]) -> str:
    """Return after how many steps the weights were that answered: several, if training went on meanwhile."""
    low, high = min(answer.version for answer in answers), max(answer.last_version for answer in answers)
    return f"{low}" if low == high else f"{low} to {high}"


def describe(answers: list[Answer]) -> dict[str, float]:
    """Accuracy with its interval, and the part of it that is format: the share of answers with a box."""
    solved = [float(answer.is_solved) for answer in answers]
    boxed = [answer for answer in answers if "\\boxed" in answer.answer]
    low, high = interval(solved, len(solved))
    return {
        "accuracy": fmean(solved),
        "low": low,
        "high": high,
        "boxed": len(boxed) / len(answers),
        "accuracy_of_boxed": fmean(float(answer.is_solved) for answer in boxed) if boxed else 0.0,
        "length": fmean(answer.length for answer in answers),
    }


def write_table(run: Path, sets: dict[str, Path], stats: list[dict[str, float]], out: Path) -> None:
    """Write results.md: accuracy of each set at the first and the last evaluation."""
    folders = sorted((run / "evaluations").glob("step*"))
    first, last = folders[0], folders[-1]
    machine = describe_machine()
    lines = [
        f"# {out.name}: GRPO on GSM8K, {last.name.removeprefix('step').lstrip('0')} steps",
        "",
        ", ".join(f"{key} {value}" for key, value in machine.items() if value) + ".",
        "",
        f"Greedy, all questions; before: {first.name}, after: {last.name}. Intervals are 95%. Steps are those of the "
        "weights that answered.",
        "",
        "| set | questions | before | after | steps before | after | with a box before | after "
        "| accuracy of those before | after |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sets:
        before, after = (read_answers(folder / f"{name}.jsonl") for folder in (first, last))
        old, new = describe(before), describe(after)
        spans = [f"{x['accuracy']:.1%} ({x['low']:.1%} to {x['high']:.1%})" for x in (old, new)]
        spans += [versions(before), versions(after)]
        rest = [f"{x[key]:.1%}" for key in ("boxed", "accuracy_of_boxed") for x in (old, new)]
        lines.append(f"| {name} | {len(before)} | {' | '.join(spans)} | {' | '.join(rest)} |")
    steady = [row for row in stats if row["step"] >= 3 and "num_seqs" in row]
    if steady:
        lines += ["", describe_speed(steady)]
    (out / "results.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def describe_speed(steps: list[dict[str, float]]) -> str:
    tokens = sum(row["num_seqs"] * row["seq_len"] for row in steps)
    parts = {key: fmean(row[f"time/{key}"] for row in steps) for key in ("step", "rollout", "update", "weights")}
    return (
        f"Trained tokens per second after the third step: {tokens / sum(row['time/step'] for row in steps):,.0f}. "
        "Seconds of a step: " + ", ".join(f"{key} {value:.2f}" for key, value in parts.items()) + "."
    )


def draw(stats: list[dict[str, float]], sets: dict[str, Path], path: Path) -> None:
    """Draw reward of training and accuracy of the validation sets by step."""
    figure = Figure(figsize=(10, 4), dpi=120, layout="tight")
    left, right = figure.subplots(1, 2)
    trained = [row for row in stats if "reward" in row]
    left.plot([row["step"] + 1 for row in trained], [row["reward"] for row in trained], alpha=0.5)
    left.set(xlabel="step", ylabel="reward of training samples")
    for name in sets:
        key = f"eval/{name}/pass@1"
        points = [row for row in stats if key in row]
        # An evaluation has the step that it follows; -1 is before the first.
        steps = [row["step"] + 1 for row in points]
        right.plot(steps, [row[key] for row in points], marker="o", label=name)
        if points and name == "gsm8k":
            right.fill_between(steps, *([row[f"{key}/{end}"] for row in points] for end in ("low", "high")), alpha=0.2)
    right.set(xlabel="step", ylabel="accuracy, greedy")
    right.legend(fontsize=7)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run directories")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--eval-every", type=int, default=60)
    parser.add_argument("--samples", type=int, default=0, help="answers per question for pass@k; 0: none")
    parser.add_argument("overrides", nargs="*", help="further configuration")
    args = parser.parse_args()
    args.data, args.out, args.runs = args.data.resolve(), args.out.resolve(), args.runs.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    sets = prepare_data(args.data, args.runs / f"{args.out.name}-data")
    run = train(args, sets)
    write_results(args, run, sets)
    if args.samples:
        write_samples(evaluate_samples(args, run, sets["gsm8k"]), args.samples, args.out)


def write_results(args: argparse.Namespace, run: Path, sets: dict[str, Path]) -> None:
    """Write everything to `--out`."""
    stats = read_stats(run)
    kept = [{k: v for k, v in row.items() if k in KEPT or k.startswith("eval/")} for row in stats]
    (args.out / "stats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    shutil.copy(run / "config.yaml", args.out / "config.yaml")
    draw(stats, sets, args.out / "curve.png")
    write_table(run, sets, stats, args.out)


if __name__ == "__main__":
    main()
