"""Preference pairs (a prompt with a chosen and a rejected answer) as tokens, and batches of them.

Three layouts are read: texts with a `prompt` column; whole dialogues in `chosen` and `rejected`, as in HH-RLHF; and
messages (`[{"role": …, "content": …}]`), with or without a `prompt`, which go through the tokenizer's chat template.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from arealite.api.dataset_args import DataSourceConfig
from arealite.api.io_struct import Batch
from arealite.dataset.chat import tokenize_chat
from arealite.dataset.columns import (
    Messages,
    Row,
    apply_columns,
    check_messages,
    read_tools,
    refuse_images,
    with_system,
)
from arealite.dataset.sft import collate_sft, fill_prompt, load_tokens, refuse_template, tokenize_sft

_SIDES = ("chosen", "rejected")
_ASSISTANT_TURN = "\n\nAssistant:"


def get_preferences(
    config: DataSourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path | None = None,
    raw: Sequence[Row] | None = None,
) -> Sequence[Row]:
    """Load pairs: `chosen` and `rejected`, each with `input_ids` and a `loss_mask` on the answer.

    `raw`: rows that are in memory, to make them of.
    """

    def make(row: Row) -> list[Row]:
        return [_tokenize_pair(read_pair(row, config), tokenizer)]

    return load_tokens(config, make, tokenizer, cache, raw)


def read_pair(raw: Row, config: DataSourceConfig) -> Row:
    """Return `prompt`, `chosen` and `rejected` of a row; raises `ValueError` for a malformed one."""
    row = apply_columns(raw, config.columns)
    refuse_images(row)
    missing = [side for side in _SIDES if side not in row]
    if missing:
        raise ValueError(
            f"a pair needs the columns {' and '.join(_SIDES)}; it lacks {' and '.join(missing)} and has "
            f"{', '.join(map(str, row)) or 'none'}. Set columns.{missing[0]}"
        )
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if isinstance(chosen, list) or isinstance(prompt, list):
        refuse_template(config)
        prompt, chosen, rejected = _split_messages(prompt, chosen, rejected)
        prompt = with_system(prompt, config.system_prompt)
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **read_tools(row)}
    for name, value in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        if not isinstance(value, str) and not (name == "prompt" and value is None):
            raise ValueError(f"`{name}` must be text or a list of messages, not {type(value).__name__}")
    if prompt is None:
        prompt, chosen, rejected = split_dialogues(chosen, rejected)
        template = "{prompt}"
    else:
        template = config.prompt_template or "{prompt}"
    prompt = fill_prompt(template, prompt, config)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def collate_pairs(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Make one padded batch of both sides of each pair; `pair_ids` and `is_chosen` tell the rows apart."""
    batch = collate_sft([row[side] for row in rows for side in _SIDES], tokenizer)
    number = torch.arange(2 * len(rows))
    return batch | {"pair_ids": number // 2 + 1, "is_chosen": 1 - number % 2}


def _tokenize_pair(pair: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    if isinstance(pair["prompt"], list):
        return _tokenize_messages(pair, tokenizer)
    return {side: tokenize_sft(pair["prompt"], pair[side], tokenizer) for side in _SIDES}


def split_dialogues(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two dialogues behind the last `Assistant:` that they share into prompt and answers."""
    length = len(chosen)
    while not rejected.startswith(chosen[:length]) or not chosen[:length].endswith(_ASSISTANT_TURN):
        position = chosen.rfind(_ASSISTANT_TURN, 0, length - 1)
        if position < 0:
            raise ValueError(
                "there is no `prompt`, and `chosen` and `rejected` do not begin with the same dialogue up to a turn "
                f"{_ASSISTANT_TURN!r}: add the column `prompt`"
            )
        length = position + len(_ASSISTANT_TURN)
    return chosen[:length], chosen[length:], rejected[length:]


def _split_messages(prompt: Any, chosen: Any, rejected: Any) -> tuple[Messages, Messages, Messages]:
    """Return the messages of the prompt, and those of the two answers."""
    sides = [_check_messages(name, side) for name, side in zip(_SIDES, (chosen, rejected), strict=True)]
    if all(side[0]["role"] == "assistant" for side in sides):
        if prompt is None:
            raise ValueError("`chosen` and `rejected` begin with the assistant's message, and there is no `prompt`")
        as_messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return _check_messages("prompt", as_messages), sides[0], sides[1]
    # Both sides are whole dialogues; a `prompt` beside them repeats their beginning.
    shared = 0
    while shared < min(map(len, sides)) - 1 and sides[0][shared] == sides[1][shared]:
        shared += 1
    if shared == 0 or any(side[shared]["role"] != "assistant" for side in sides):
        raise ValueError("`chosen` and `rejected` must be the same messages up to an answer of the assistant")
    return sides[0][:shared], sides[0][shared:], sides[1][shared:]


def _check_messages(name: str, messages: Any) -> Messages:
    """Return checked messages; an answer that is plain text becomes the assistant's message."""
    if isinstance(messages, str) and name != "prompt":
        return [{"role": "assistant", "content": messages}]
    return check_messages(name, messages)


def _tokenize_messages(pair: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    sides, prompt = {}, pair["prompt"]
    for side in _SIDES:
        rows = tokenize_chat(prompt + pair[side], tokenizer, start=len(prompt), tools=pair.get("tools"))
        if len(rows) > 1:
            raise ValueError(
                f"`{side}` has several turns of the assistant, and the tokenizer's chat template changes earlier ones: "
                "put all but the last one into the prompt"
            )
        sides[side] = rows[0]
    return sides
