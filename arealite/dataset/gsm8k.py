"""GSM8K (columns `question` and `answer`, the answer ending in `#### number`): rows for supervised and reinforcement learning.

The same functions read any file with these two columns.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from arealite.api.cli_args import DatasetConfig
from arealite.dataset.rows import load_dataset, require_columns
from arealite.dataset.sft import tokenize_sft, within_length

Row = dict[str, Any]
INSTRUCTION = "\nPlease put your final answer within \\boxed{}."


def get_gsm8k_sft(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Rows with `input_ids` and `loss_mask`: the worked answer is what is learned."""
    rows = _load(config)
    tokens: list[Row] = [
        tokenize_sft(f"{row['question']}\n", row["answer"], tokenizer) for row in rows
    ]
    return within_length(tokens, config.max_length, config.path)


def get_gsm8k_rl(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Rows with `messages` (a question as a chat) and `answer` for the reward; questions over `max_length` tokens are left out."""
    rows = []
    for row in _load(config):
        question = row["question"] + INSTRUCTION
        rows.append(
            {
                "messages": [{"role": "user", "content": question}],
                "answer": row["answer"],
                "input_ids": tokenizer.encode(question) if config.max_length else [],
            }
        )
    kept = within_length(rows, config.max_length, config.path)
    return [{key: row[key] for key in ("messages", "answer")} for row in kept]


def _load(config: DatasetConfig) -> list[Row]:
    rows = load_dataset(config)
    require_columns(rows, ["question", "answer"], config.path)
    return rows
