"""Supervised rows: a prompt and its answer as tokens, and batches of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from arealite.api.errors import DatasetError
from arealite.api.io_struct import Batch

Row = dict[str, Any]


def tokenize_sft(
    prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[int]]:
    """Tokens of prompt, answer and end; `loss_mask` is 1 on the answer and the end."""
    if tokenizer.eos_token_id is None:
        raise DatasetError("the tokenizer has no end-of-text token, so an answer could never end")
    # Each part on its own: joined first, a token could span the border and belong to both.
    head = tokenizer.encode(prompt)
    body = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    return {"input_ids": head + body, "loss_mask": [0] * len(head) + [1] * len(body)}


def collate_sft(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Rows with `input_ids` and `loss_mask` as one padded batch, [B, T]."""
    length = max(len(row["input_ids"]) for row in rows)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    shape = (len(rows), length)
    input_ids = torch.full(shape, pad, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    loss_mask = torch.zeros(shape, dtype=torch.long)
    for i, row in enumerate(rows):
        size = len(row["input_ids"])
        input_ids[i, :size] = torch.tensor(row["input_ids"])
        attention_mask[i, :size] = 1
        loss_mask[i, :size] = torch.tensor(row["loss_mask"])
    return {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}


def within_length(rows: list[Row], max_length: int | None, source: str) -> list[Row]:
    """Rows of at most `max_length` tokens; raises when none is left."""
    kept = [row for row in rows if max_length is None or len(row["input_ids"]) <= max_length]
    if not kept:
        raise DatasetError(
            f"all {len(rows)} rows of {source} are longer than max_length={max_length} tokens"
        )
    return kept
