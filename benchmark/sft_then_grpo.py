"""Fine-tunes a small model on worked solutions, then trains it by GRPO: what does each stage add?

    python benchmark/sft_then_grpo.py --model FOLDER --gsm8k FOLDER --mawps FOLDER --out FOLDER [--steps 120]
        [--samples 8] [--sft KEY=VALUE]… [KEY=VALUE ...]

Stage 1 is `gsm8k_sft.py` with its configuration on GSM8K's `train.jsonl`. Stage 2 is `learning.py`, GRPO on easier
questions, which a model of 135M parameters can solve at times: `mawps_multiarith.jsonl` and `mawps_singleop.jsonl`.
Held out are GSM8K's `test.jsonl`, and the questions of `mawps_addsub.jsonl` and `mawps_singleeq.jsonl` that are not
trained on, nor nearly the same as one that is. `--sft` changes the configuration of stage 1, `KEY=VALUE` that of
stage 2.
"""

import argparse
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "arealite"
TRAINED, HELD_OUT = ("multiarith", "singleop"), ("addsub", "singleeq")
# A small model learns faster at a higher rate; its answers are short, so compilation does not pay.
SMALL = ("actor.compile=false", "gconfig.max_new_tokens=384", "actor.optimizer.lr=5e-6", "recover.mode=disabled")


def read_mawps(folder: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    paths = [folder / f"mawps_{name}.jsonl" for name in names]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def find_keys(row: dict[str, Any]) -> set[Any]:
    """What nearly equal questions share: letters and digits; or first word, numbers and answer."""
    question = row["input"]
    numbers = tuple(sorted(re.findall(r"\d+\.?\d*", question)))
    return {re.sub(r"[^a-z0-9]", "", question.lower()), (question.split()[0], numbers, row["target"])}


def split(mawps: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return questions to train on, and questions that are held out, without near duplicates."""
    trained = read_mawps(mawps, TRAINED)
    random.Random(1).shuffle(trained)
    known = {key for row in trained for key in find_keys(row)}
    held_out = []
    for row in read_mawps(mawps, HELD_OUT):
        if known.isdisjoint(keys := find_keys(row)):
            held_out.append(row)
            known |= keys
    return trained, held_out


def write_data(gsm8k: Path, mawps: Path, folder: Path) -> None:
    """Write the folder that `learning.py` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    trained, held_out = split(mawps)
    rows = [{"question": row["input"], "answer": f"#### {row['target']:g}"} for row in trained]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mawps_held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    (folder / "test.jsonl").write_bytes((gsm8k / "test.jsonl").read_bytes())
    print(f"{len(trained)} questions to train on, {len(held_out)} of MAWPS held out")


def fine_tune(model: Path, train: Path, runs: Path, overrides: list[str]) -> Path:
    """Run the example of supervised training; return its last checkpoint."""
    command = [sys.executable, "-m", "arealite.launcher.local", str(EXAMPLES / "gsm8k_sft.py")]
    command += ["--config", str(EXAMPLES / "configs" / "gsm8k_sft.yaml"), "allocation_mode=d1", "saver.freq_epochs=8"]
    command += [f"model.path={model}", f"train_dataset.path={train}", f"cluster.fileroot={runs}"]
    subprocess.run([*command, "experiment_name=sft-then-grpo-sft", *overrides], check=True, cwd=ROOT)
    return max((runs / "sft-then-grpo-sft" / "trial0" / "checkpoints").glob("step*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "gsm8k", "mawps", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--samples", type=int, default=8, help="answers per question for pass@k; 0: none")
    parser.add_argument("--sft", action="append", default=[], metavar="KEY=VALUE", help="configuration of stage 1")
    parser.add_argument("overrides", nargs="*", help="further configuration of GRPO")
    args = parser.parse_args()
    out, runs = args.out.resolve(), args.out.resolve() / "runs"
    write_data(args.gsm8k, args.mawps, out / "data")
    tuned = fine_tune(args.model.resolve(), (args.gsm8k / "train.jsonl").resolve(), runs, args.sft)
    command = [sys.executable, str(ROOT / "benchmark" / "learning.py"), "--model", str(tuned), "--data"]
    command += [str(out / "data"), "--out", str(out / "grpo"), "--runs", str(runs), "--steps", str(args.steps)]
    command += ["--eval-every", str(args.steps // 2), "--samples", str(args.samples), "saver.freq_epochs=null"]
    subprocess.run([*command, f"saver.freq_steps={args.steps}", *SMALL, *args.overrides], check=True)


if __name__ == "__main__":
    main()
