"""Preference pairs (a prompt with a chosen and a rejected answer) as tokens, and batches of them.

Three layouts are read: texts with a `prompt` column; whole dialogues in `chosen` and `rejected`, as in HH-RLHF; and
messages (`[{"role": …, "content": …}]`), with or without a `prompt`, which go through the tokenizer's chat template.
"""

from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import DatasetError
from arealite.api.io_struct import Batch
from arealite.dataset.rows import load_dataset, require_columns
from arealite.dataset.sft import collate_sft, tokenize_sft, within_length

Row = dict[str, Any]
Messages = list[dict[str, str]]
_SIDES = ("chosen", "rejected")
_ASSISTANT_TURN = "\n\nAssistant:"


def get_preferences(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Load pairs: `chosen` and `rejected`, each with `input_ids` and a `loss_mask` on the answer."""
    rows = load_dataset(config)
    require_columns(rows, list(_SIDES), config.path)
    pairs = []
    for number, row in enumerate(rows, 1):
        try:
            pairs.append(_tokenize_pair(row, tokenizer))
        except ValueError as error:
            raise DatasetError(f"{config.path}, row {number}: {error}") from error
    return within_length(pairs, config.max_length, config.path)


def collate_pairs(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Make one padded batch of both sides of each pair; `pair_ids` and `is_chosen` tell the rows apart."""
    batch = collate_sft([row[side] for row in rows for side in _SIDES], tokenizer)
    number = torch.arange(2 * len(rows))
    return batch | {"pair_ids": number // 2 + 1, "is_chosen": 1 - number % 2}


def _tokenize_pair(row: Row, tokenizer: PreTrainedTokenizerBase) -> Row:
    """Tokenize both sides of a row of any layout. Raises `ValueError` for a malformed row."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if isinstance(chosen, list) or isinstance(prompt, list):
        return _tokenize_messages(*_split_messages(prompt, chosen, rejected), tokenizer)
    for name, value in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        if not isinstance(value, str) and not (name == "prompt" and value is None):
            raise ValueError(f"`{name}` must be text or a list of messages, not {type(value).__name__}")
    if prompt is None:
        prompt, chosen, rejected = _split_dialogues(chosen, rejected)
    return {"chosen": tokenize_sft(prompt, chosen, tokenizer), "rejected": tokenize_sft(prompt, rejected, tokenizer)}


def _split_dialogues(chosen: str, rejected: str) -> tuple[str, str, str]:
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
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`{name}` must be text or a list of messages, not {str(messages)[:40] or type(messages)!r}")
    for message in messages:
        texts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"`{name}` has a message that is not {{'role': text, 'content': text}}: {str(message)[:80]}"
            )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _tokenize_messages(
    prompt: Messages, chosen: Messages, rejected: Messages, tokenizer: PreTrainedTokenizerBase
) -> Row:
    if not tokenizer.chat_template:
        raise ValueError(
            "it is made of messages, and the tokenizer has no chat template: give texts, or another tokenizer"
        )
    head = _render(prompt, tokenizer, add_generation_prompt=True)
    return {
        side: _tokenize_answer(head, _render(prompt + answer, tokenizer), tokenizer)
        for side, answer in zip(_SIDES, (chosen, rejected), strict=True)
    }


def _render(messages: Messages, tokenizer: PreTrainedTokenizerBase, add_generation_prompt: bool = False) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))
    except TemplateError as error:
        raise ValueError(f"the tokenizer's chat template rejects its messages: {error}") from error


def _tokenize_answer(prompt: str, dialogue: str, tokenizer: PreTrainedTokenizerBase) -> Row:
    """Tokens of a dialogue that a chat template wrote; `loss_mask` is 1 on what follows the prompt."""
    if not dialogue.startswith(prompt):
        raise ValueError("the tokenizer's chat template does not write an answer behind its generation prompt")
    answer = dialogue.removeprefix(prompt)
    end = tokenizer.eos_token
    # Templates end a turn with the end token and often a line break, which is not part of the answer.
    if isinstance(end, str) and answer.rstrip().endswith(end):
        answer = answer.rstrip().removesuffix(end)
    return tokenize_sft(prompt, answer, tokenizer, add_special_tokens=False)
