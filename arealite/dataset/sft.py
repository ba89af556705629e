"""Tokenizers, rows for supervised training (conversations, or prompts and answers), and batches."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from arealite.api.dataset_args import DataSourceConfig
from arealite.api.errors import ConfigError, DatasetError
from arealite.api.io_struct import Batch
from arealite.dataset.chat import tokenize_chat
from arealite.dataset.columns import (
    Row,
    advise_messages,
    apply_columns,
    check_messages,
    map_rows,
    read_tools,
    refuse_images,
    with_system,
    without_empty,
)
from arealite.dataset.hub import check_hub
from arealite.dataset.prompts import AS_THEY_ARE, PromptFormat, describe, without_long
from arealite.dataset.rows import load_dataset
from arealite.dataset.streamed import map_lazily, open_streamed
from arealite.utils.script_check import end_check


def load_tokenizer(path: str, for_chat: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder or a hub name. Raises `ConfigError`.

    `for_chat`: it must have a chat template, because an agent or a workflow sends messages.
    """
    advice = (
        f"cannot load a tokenizer from {path}: give a folder that holds one (tokenizer.json and tokenizer_config.json) "
        "or a hub name as tokenizer_path=…, or as the model's path. "
    )
    check_hub(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        if not Path(path).is_dir():
            end_check(f"the tokenizer {path} is not downloaded")
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{advice}transformers says: {reason}") from error
    # For a folder with config.json alone transformers makes one that knows special tokens only.
    if len(tokenizer) - len(set(tokenizer.all_special_ids)) < 2:
        raise ConfigError(f"{advice}There is none: transformers made one with a vocabulary of {len(tokenizer)}")
    if for_chat and not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {path} has no chat template, and messages are sent here: use an instruct model, or set "
            "tokenizer_path=… to the tokenizer of one"
        )
    return tokenizer


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


def get_sft(
    config: DataSourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    how: PromptFormat = AS_THEY_ARE,
    cache: Path | None = None,
    raw: Sequence[Row] | None = None,
) -> Sequence[Row]:
    """Load rows with `input_ids` and a `loss_mask` of 1 on what the assistant says.

    Conversations (`messages`, perhaps `tools`) are trained on all turns of the assistant. Other rows have a `prompt`
    and a `response`, which is trained: both are messages, or texts. With a chat template, and without
    `prompt_template`, texts become a conversation of two turns.
    `raw`: rows that are in memory.
    """
    return load_tokens(config, lambda row: _tokenize_row(row, config, how, tokenizer), tokenizer, cache, raw)


def read_sft(raw: Row, config: DataSourceConfig, how: PromptFormat) -> Row:
    """Return a row with `messages`, or with `prompt` and `response`; raises `ValueError`.

    A `completion` is a response. Of `messages` that were given in two parts, the first `num_given` are the prompt.
    """
    adapted = how.adapt(raw) if how.adapt and not config.columns else raw
    row = without_empty(apply_columns(adapted, config.columns or how.columns), "messages", "prompt")
    refuse_images(row)
    if "completion" in row and row.get("response") is None:
        row = {**row, "response": row["completion"]}
    if "messages" in row:
        check_messages("messages", row["messages"])
        # Some conversations have their first message as `prompt` too.
        if "prompt" not in row or "response" not in row:
            refuse_template(config)
            return {"messages": row["messages"], **read_tools(row)}
    missing = [name for name in ("prompt", "response") if name not in row]
    if missing:
        advice = advise_messages(row) if "prompt" in missing else None
        raise ValueError(
            "supervised training needs `messages`, or `prompt` and `response`; its columns are "
            f"{', '.join(map(str, row))}. {advice or f'Set columns.{missing[0]}'}"
        )
    if isinstance(row["prompt"], list) and isinstance(row["response"], list):
        refuse_template(config)
        prompt, response = (check_messages(name, row[name]) for name in ("prompt", "response"))
        return {"messages": [*prompt, *response], "num_given": len(prompt), **read_tools(row)}
    for name in ("prompt", "response"):
        if not isinstance(row[name], str):
            raise ValueError(f"`{name}` must be text, not {type(row[name]).__name__}")
    made = {name: row[name] for name in ("messages", "prompt", "response") if name in row}
    return {**made, **read_tools(row)} if "messages" in row else made


def refuse_template(config: DataSourceConfig) -> None:
    """Raise `ValueError` if `prompt_template` is set, for a row that is made of messages."""
    if config.prompt_template is not None:
        raise ValueError("it is made of messages, and prompt_template is set, which is for texts: leave it out")


def fill_prompt(template: str, prompt: str, config: DataSourceConfig) -> str:
    """Return a plain text prompt, behind the system prompt if there is one."""
    text = template.replace("{prompt}", prompt)
    return f"{config.system_prompt}\n\n{text}" if config.system_prompt else text


def _tokenize_row(
    raw: Row, config: DataSourceConfig, how: PromptFormat, tokenizer: PreTrainedTokenizerBase
) -> list[Row]:
    row = read_sft(raw, config, how)
    num_given: int = row.get("num_given", 0)
    template = config.prompt_template or how.plain
    if "prompt" in row and not (tokenizer.chat_template and config.prompt_template is None):
        row.pop("messages", None)
    if "messages" not in row:
        # A task that says how its prompts read as plain text is trained so, as base models are.
        is_plain = config.prompt_template is not None or how.plain != PromptFormat.plain
        if is_plain or not tokenizer.chat_template:
            prompt = fill_prompt(template, row["prompt"], config)
            return [tokenize_sft(prompt, row["response"], tokenizer)]
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
        row = {"messages": turns}
    messages = with_system(row["messages"], config.system_prompt)
    start = num_given + len(messages) - len(row["messages"])
    return tokenize_chat(messages, tokenizer, start, row.get("tools"))


def load_tokens(
    config: DataSourceConfig,
    make: Callable[[Row], list[Row]],
    tokenizer: PreTrainedTokenizerBase,
    cache: Path | None = None,
    raw: Sequence[Row] | None = None,
) -> Sequence[Row]:
    """Load rows (or pairs) of at most `max_length` tokens. `make` makes them of one row of the data.

    `raw`: rows that are in memory, instead of those that `config` names.
    """
    if config.streaming:
        lazy = open_streamed(config, cache)
        return map_lazily(lazy, lambda row: _only(make(row), config), config, describe(tokenizer), cache)
    raw = load_dataset(config) if raw is None else raw
    made = map_rows(raw, lambda row: {"rows": make(row)}, config.path)
    rows = [row for each in made for row in each["rows"]]
    return without_long([row for row in rows if _fits(row, config)], len(rows), config)


def _only(rows: list[Row], config: DataSourceConfig) -> Row | None:
    if len(rows) > 1:
        raise ValueError(
            "the tokenizer's chat template changes earlier turns, so that each turn is a row of its own; that cannot "
            "be streamed: leave out `streaming`, or give conversations of one turn"
        )
    return rows[0] if _fits(rows[0], config) else None


def _fits(row: Row, config: DataSourceConfig) -> bool:
    sides = [row] if "input_ids" in row else row.values()
    return max(len(side["input_ids"]) for side in sides) <= (config.max_length or math.inf)
