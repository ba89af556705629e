"""Trains a reward model, and a policy with each loss of `model.loss`, on real preferences: do they prefer like people?

    python benchmark/preferences.py --model FOLDER --data PAIRS.jsonl.gz --out FOLDER [--at-once 3] [--only dpo,kto]
        [KEY=VALUE ...]

PAIRS has the columns `chosen` and `rejected`, whole dialogues as in HH-RLHF. A fifth of the dialogues is held out: no
question that begins one of them begins one of the others. Every run is an example with its configuration. KTO gets
single answers with a label, one of each pair. Afterwards Hugging Face models, not the engine that trained, score the
held-out pairs. `by ratio` is the share of pairs whose chosen answer has gained more log-probability than the rejected
one, `margin` the mean difference of these gains; `by log-prob` is the share whose chosen answer has more per token, or
for the reward model the higher score.
"""

import argparse
import gzip
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import describe_machine, print_table
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from arealite.algo.eval_metrics import interval
from arealite.api.cli_args import DatasetConfig
from arealite.dataset import load_tokenizer
from arealite.dataset.preference import get_preferences, split_dialogues

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "examples" / "arealite"
LOSSES = ("dpo", "ipo", "kto", "orpo", "simpo")
SIDES = ("chosen", "rejected")
HELD_OUT = 0.2
MAX_LENGTH = 1024


def write_data(source: Path, folder: Path) -> None:
    """Write pairs to train on, the same as single answers, and held-out pairs."""
    with gzip.open(source, "rt") as file:
        rows = [json.loads(line) for line in file]
    openings = sorted({opening(row) for row in rows})
    random.Random(1).shuffle(openings)
    held_out = set(openings[: int(HELD_OUT * len(openings))])
    parts: dict[str, list[dict[str, Any]]] = {"train": [], "single": [], "held_out": []}
    for i, row in enumerate(rows):
        if opening(row) in held_out:
            parts["held_out"].append(row)
            continue
        parts["train"].append(row)
        prompt, chosen, rejected = split_dialogues(row["chosen"], row["rejected"])
        answer = {"completion": chosen, "label": True} if i % 2 else {"completion": rejected, "label": False}
        parts["single"].append({"prompt": prompt, **answer})
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    print({name: len(part) for name, part in parts.items()}, flush=True)


def opening(row: dict[str, Any]) -> str:
    return row["chosen"].split("\n\nAssistant:")[0]


def train(name: str, args: argparse.Namespace) -> Path:
    """Run the example; return its last checkpoint."""
    script = "preference_rw" if name == "rw" else "preference_dpo"
    data = args.out / "data" / ("single.jsonl" if name == "kto" else "train.jsonl")
    command = [sys.executable, "-m", "arealite.launcher.local", str(EXAMPLES / f"{script}.py")]
    command += ["--config", str(EXAMPLES / "configs" / f"{script}.yaml"), "allocation_mode=d1"]
    command += [f"model.path={args.model}", f"train_dataset.path={data}", f"train_dataset.max_length={MAX_LENGTH}"]
    # Several runs share a GPU.
    command.append("model.max_tokens_per_mb=16384")
    command += [f"cluster.fileroot={args.out / 'runs'}", f"trial_name={name}"]
    if name != "rw":
        command.append(f"model.loss={name}")
    with (args.out / f"{name}.log").open("w") as log:
        code = subprocess.call([*command, *args.overrides], stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY)
    if code:
        raise SystemExit(f"{name} ended with code {code}: {(args.out / f'{name}.log').read_text()[-2000:]}")
    return max((args.out / "runs" / script.replace("_", "-") / name / "checkpoints").glob("step*"))


@torch.inference_mode()
def answer_logprobs(folder: Path, pairs: Sequence[dict[str, Any]], device: str) -> torch.Tensor:
    """Return the log-probability of the chosen and the rejected answer of each pair, and both per token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    rows = []
    for pair in pairs:
        row = []
        for side in SIDES:
            ids = torch.tensor(pair[side]["input_ids"], device=device)
            logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            row.append(logp[torch.tensor(pair[side]["loss_mask"][1:], device=device).bool()])
        rows.append([row[0].sum(), row[1].sum(), row[0].mean(), row[1].mean()])
    return torch.tensor(rows)


@torch.inference_mode()
def scores(folder: Path, pairs: Sequence[dict[str, Any]], device: str) -> torch.Tensor:
    """Return the reward of the chosen and the rejected answer of each pair."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    inputs = [[torch.tensor([pair[side]["input_ids"]], device=device) for side in SIDES] for pair in pairs]
    return torch.tensor([[float(model(ids).logits[0, 0]) for ids in row] for row in inputs])


def share(first: torch.Tensor, second: torch.Tensor) -> str:
    """The share of pairs in which the first number is larger, with its 95% interval."""
    larger = (first > second).double().tolist()
    low, high = interval(larger, len(larger))
    return f"{fmean(larger):.1%} ({low:.1%}-{high:.1%})"


def measure(name: str, folder: Path, base: torch.Tensor, pairs: Sequence[dict[str, Any]], device: str) -> list[str]:
    if name == "rw":
        rewards = scores(folder, pairs, device)
        return [share(rewards[:, 0], rewards[:, 1]), "", "", ""]
    after = answer_logprobs(folder, pairs, device)
    gain = after - base
    margin = (gain[:, 0] - gain[:, 1]).mean().item()
    shares = share(after[:, 2], after[:, 3]), share(gain[:, 0], gain[:, 1])
    return [*shares, f"{margin:.2f}", f"{after[:, 2].mean():.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--only", default="", help="of rw, dpo, ipo, kto, orpo and simpo, separated by commas")
    parser.add_argument("overrides", nargs="*", help="further configuration")
    args = parser.parse_args()
    args.model, args.out = args.model.resolve(), args.out.resolve()
    write_data(args.data, args.out / "data")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    held_out = DatasetConfig(path=str(args.out / "data" / "held_out.jsonl"), max_length=MAX_LENGTH)
    pairs = get_preferences(held_out, load_tokenizer(str(args.model)))
    base = answer_logprobs(args.model, pairs, device)
    rows = [["before", "", share(base[:, 2], base[:, 3]), "", "", f"{base[:, 2].mean():.3f}"]]
    measuring = threading.Lock()

    def run(name: str) -> list[str]:
        start = time.perf_counter()
        folder = train(name, args)
        seconds = time.perf_counter() - start
        with measuring:
            row = [name, f"{seconds:.0f}", *measure(name, folder, base, pairs, device)]
        print(row, flush=True)
        return row

    names = args.only.split(",") if args.only else ["rw", *LOSSES]
    with ThreadPoolExecutor(args.at_once) as pool:
        rows += pool.map(run, names)
    print_table(["loss", "seconds", "by log-prob", "by ratio", "margin", "log-prob of a chosen token"], rows)
    print(json.dumps({"benchmark": "preferences", "held_out": len(pairs), **describe_machine(), "rows": rows}))


if __name__ == "__main__":
    main()
