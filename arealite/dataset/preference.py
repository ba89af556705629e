"""Preferences as tokens, and batches of them: pairs, and for KTO single answers with a label.

Three layouts of pairs are read: texts with a `prompt` column; whole dialogues in `chosen` and `rejected`, as in
HH-RLHF; and messages (`[{"role": …, "content": …}]`), with or without a `prompt`, which go through the tokenizer's
chat template. Reward models also take whole texts without a prompt. A single answer is a `prompt`, a `completion`
(texts or messages) and a `label`. It becomes a pair with one side: `chosen` if the label is true, else `rejected`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from arealite.api.cli_args import BaseExperimentConfig, DPOConfig
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
    require_columns,
    with_system,
)
from arealite.dataset.sft import collate_sft, fill_prompt, load_tokens, refuse_template, tokenize_sft

_SIDES = ("chosen", "rejected")
_ASSISTANT_TURN = "\n\nAssistant:"
# Values of `label`; in .csv files they are text.
_LABELS = {"true": "chosen", "1": "chosen", "false": "rejected", "0": "rejected"}


def loss_of(config: BaseExperimentConfig) -> str:
    """Return the loss that a run on preferences is trained with: `model.loss`, or rw for reward models."""
    return config.model.loss if isinstance(config, DPOConfig) else "rw"


def preference_loader(config: BaseExperimentConfig) -> Callable[..., Sequence[Row]]:
    """Return `get_preferences` for the rows that the loss of a run takes."""
    return partial(get_preferences, loss=loss_of(config))


def get_preferences(
    config: DataSourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path | None = None,
    raw: Sequence[Row] | None = None,
    loss: str = "dpo",
) -> Sequence[Row]:
    """Load pairs: `chosen` and `rejected`, each with `input_ids` and a `loss_mask` on the answer.

    `raw`: rows that are in memory, to make them of. `loss`: for kto a row may have one answer, which is one of both;
    for rw, texts need no prompt.
    """

    def make(row: Row) -> list[Row]:
        return [_tokenize_pair(read_preference(row, config, loss), tokenizer)]

    return load_tokens(config, make, tokenizer, cache, raw)


def read_preference(raw: Row, config: DataSourceConfig, loss: str) -> Row:
    """Return `prompt`, `chosen` and `rejected` of a row, or one of the two; raises `ValueError`."""
    row = apply_columns(raw, config.columns)
    refuse_images(row)
    if row.get("completion") is not None and all(row.get(side) is None for side in _SIDES):
        # A table with pairs in other rows has their columns here too.
        row = {name: value for name, value in row.items() if name not in _SIDES}
    missing = [side for side in _SIDES if side not in row]
    if missing and loss == "kto" and ("label" in row or "completion" in row):
        return _read_answer(row, config)
    if missing and "label" in row:
        raise ValueError(
            f"it has one answer with a `label`, and {'a reward model' if loss == 'rw' else f'model.loss={loss}'} "
            "compares two: use the DPO trainer with model.loss=kto, or make rows with a `prompt`, an answer whose "
            "label is true as `chosen`, and one to the same prompt whose label is false as `rejected`"
        )
    return _read_pair(row, config, missing, loss)


def _read_answer(row: Row, config: DataSourceConfig) -> Row:
    """Return `prompt` and the side that the `label` names, of a row with one answer."""
    require_columns(row, "prompt", "completion", "label")
    prompt, answer, label = row["prompt"], row["completion"], row["label"]
    side = _LABELS.get(str(label).lower())
    if side is None:
        raise ValueError(f"`label` must be true (a good answer) or false, not {str(label)[:40]!r}")
    if isinstance(answer, list) or isinstance(prompt, list):
        refuse_template(config)
        answer = _check_messages("completion", answer)
        if answer[0]["role"] != "assistant":
            raise ValueError(
                f"`completion` begins with a message of {answer[0]['role']!r}: put the messages before the assistant's "
                "answer into `prompt`"
            )
        return {"prompt": with_system(_to_messages(prompt), config.system_prompt), side: answer, **read_tools(row)}
    _require_texts(prompt=prompt, completion=answer)
    return {"prompt": fill_prompt(config.prompt_template or "{prompt}", prompt, config), side: answer}


def _read_pair(row: Row, config: DataSourceConfig, missing: list[str], loss: str) -> Row:
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
    _require_texts(prompt="" if prompt is None else prompt, chosen=chosen, rejected=rejected)
    if prompt is None:
        # A reward model scores a text as a whole, so that it needs no border between prompt and answer.
        is_dialogue = loss != "rw" or _ASSISTANT_TURN in chosen + rejected
        prompt, chosen, rejected = split_dialogues(chosen, rejected) if is_dialogue else ("", chosen, rejected)
        template = "{prompt}"
    else:
        template = config.prompt_template or "{prompt}"
    prompt = fill_prompt(template, prompt, config)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _require_texts(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"`{name}` must be text or a list of messages, not {type(value).__name__}")


def collate_pairs(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Make one padded batch of the sides of all pairs; `pair_ids` and `is_chosen` tell the rows apart."""
    sides = [(number, side) for number, row in enumerate(rows) for side in _SIDES if side in row]
    batch = collate_sft([rows[number][side] for number, side in sides], tokenizer)
    ids, chosen = [number + 1 for number, _ in sides], [int(side == "chosen") for _, side in sides]
    return batch | {"pair_ids": torch.tensor(ids), "is_chosen": torch.tensor(chosen)}


def _tokenize_pair(pair: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    if isinstance(pair["prompt"], list):
        return _tokenize_messages(pair, tokenizer)
    return {side: tokenize_sft(pair["prompt"], pair[side], tokenizer) for side in _SIDES if side in pair}


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
        return _to_messages(prompt), sides[0], sides[1]
    # Both sides are whole dialogues; a `prompt` beside them repeats their beginning.
    shared = 0
    while shared < min(map(len, sides)) - 1 and sides[0][shared] == sides[1][shared]:
        shared += 1
    if shared == 0 or any(side[shared]["role"] != "assistant" for side in sides):
        raise ValueError("`chosen` and `rejected` must be the same messages up to an answer of the assistant")
    return sides[0][:shared], sides[0][shared:], sides[1][shared:]


def _to_messages(prompt: Any) -> Messages:
    """Return the checked messages of a prompt; one that is plain text becomes the user's message."""
    return check_messages("prompt", [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def _check_messages(name: str, messages: Any) -> Messages:
    """Return checked messages; an answer that is plain text becomes the assistant's message."""
    if isinstance(messages, str):
        return [{"role": "assistant", "content": messages}]
    return check_messages(name, messages)


def _tokenize_messages(pair: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    sides, prompt = {}, pair["prompt"]
    for side in (side for side in _SIDES if side in pair):
        rows = tokenize_chat(prompt + pair[side], tokenizer, start=len(prompt), tools=pair.get("tools"))
        if len(rows) > 1:
            raise ValueError(
                f"`{side}` has several turns of the assistant, and the tokenizer's chat template changes earlier ones: "
                "put all but the last one into the prompt"
            )
        sides[side] = rows[0]
    return sides
