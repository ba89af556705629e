"""Tokenizers, rows for supervised training (a prompt and its answer as tokens), and batches of them."""

import math
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from arealite.api.errors import ConfigError, DatasetError
from arealite.api.io_struct import Batch

Row = dict[str, Any]


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder or a hub name. Raises `ConfigError`."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"cannot load a tokenizer from {path}: give a folder that holds one (tokenizer.json and "
            "tokenizer_config.json) or a hub name as tokenizer_path=…, or as the model's path. transformers says: "
            f"{reason}"
        ) from error


def tokenize_sft(prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = True) -> Row:
    """Tokenize prompt, answer and end token; `loss_mask` is 1 on the answer and the end token.

    `add_special_tokens=False` is for prompts that contain them already, as a chat template writes them.
    """
    if tokenizer.eos_token_id is None:
        raise DatasetError("the tokenizer has no end-of-text token, so an answer could never end")
    # Separately, so that no token spans the border between prompt and answer.
    head = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    body = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    return {"input_ids": head + body, "loss_mask": [0] * len(head) + [1] * len(body)}


def collate_sft(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Make one padded batch, [B, T], of rows with `input_ids` and `loss_mask`."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    pads = {"input_ids": pad, "attention_mask": 0, "loss_mask": 0}
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    parts = {k: [torch.tensor(row[k], dtype=torch.long) for row in rows] for k in pads}
    return {k: pad_sequence(parts[k], True, padding_value=fill) for k, fill in pads.items()}


def within_length(rows: list[Row], max_length: int | None, source: str) -> list[Row]:
    """Keep rows (or pairs) of at most `max_length` tokens. Raises `DatasetError` if none is left."""
    limit = math.inf if max_length is None else max_length
    sides = ([row] if "input_ids" in row else row.values() for row in rows)
    lengths = [max(len(side["input_ids"]) for side in each) for each in sides]
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
    if not kept:
        raise DatasetError(f"all {len(rows)} rows of {source} are longer than {max_length=} tokens")
    return kept
