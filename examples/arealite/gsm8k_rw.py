"""A reward model for GSM8K: it learns to tell worked answers from the same answers with wrong numbers.

    python -m arealite.launcher.local examples/arealite/gsm8k_rw.py \
        --config examples/arealite/configs/gsm8k_rw.yaml model.path=/path/to/model
"""

import random
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from arealite.api.cli_args import DatasetConfig, RWConfig
from arealite.dataset import load_dataset, load_tokenizer, map_rows, require_text, tokenize_sft
from arealite.trainer.rw import RWTrainer
from arealite.utils.config import load_config, run_main

Row = dict[str, Any]


def make_pairs(data: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Return each worked answer as `chosen`, and with every result changed as `rejected`."""
    rows = map_rows(load_dataset(data), lambda row: require_text(row, "question", "answer"), data.path)
    pairs = []
    for row in rows:
        sides = {"chosen": row["answer"], "rejected": change_results(row["answer"])}
        pairs.append({side: tokenize_sft(f"{row['question']}\n", text, tokenizer) for side, text in sides.items()})
    limit = data.max_length or 10**9
    return [pair for pair in pairs if max(len(side["input_ids"]) for side in pair.values()) <= limit]


def change_results(answer: str) -> str:
    """Return an answer with other numbers behind each `=`, `>>` and `####`."""
    draw = random.Random(answer)
    return re.sub(r"(=|>>|# )(-?\d+)", lambda match: f"{match[1]}{int(match[2]) + draw.randint(1, 9)}", answer)


def main(argv: list[str]) -> None:
    config = load_config(argv, RWConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.model.path)
    rows = make_pairs(config.train_dataset, tokenizer)
    valid_rows = {name: make_pairs(data, tokenizer) for name, data in config.validation_sets.items()}
    RWTrainer(config, rows, tokenizer, valid_rows).train()


if __name__ == "__main__":
    run_main(main)
