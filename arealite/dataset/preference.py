"""Preference rows: a prompt with a chosen and a rejected answer, as tokens, and batches of such pairs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from arealite.api.cli_args import DatasetConfig
from arealite.api.io_struct import Batch
from arealite.dataset.rows import load_dataset, require_columns
from arealite.dataset.sft import collate_sft, tokenize_sft, within_length

Row = dict[str, Any]


def get_preferences(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Rows with the columns `prompt`, `chosen` and `rejected` (texts), each side tokenized with its prompt."""
    rows = load_dataset(config)
    require_columns(rows, ["prompt", "chosen", "rejected"], config.path)
    pairs = [
        {side: tokenize_sft(row["prompt"], row[side], tokenizer) for side in ("chosen", "rejected")} for row in rows
    ]
    return within_length(pairs, config.max_length, config.path)


def collate_pairs(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Both sides of each pair as rows of one padded batch; `pair_ids` and `is_chosen` say which is which."""
    batch = collate_sft([row[side] for row in rows for side in ("chosen", "rejected")], tokenizer)
    number = torch.arange(2 * len(rows))
    return batch | {"pair_ids": number // 2 + 1, "is_chosen": 1 - number % 2}
