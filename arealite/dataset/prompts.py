"""Rows for reinforcement learning and evaluation: a prompt, and the columns that its reward needs.

A prompt is a chat (`messages`) if the tokenizer has a chat template, else plain text (`prompt`). `PromptMaker` makes
one row; `load_prompts` those of a dataset.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from arealite.api.dataset_args import DataSourceConfig
from arealite.api.errors import DatasetError
from arealite.dataset.chat import render
from arealite.dataset.columns import (
    Messages,
    Row,
    advise_messages,
    apply_columns,
    check_messages,
    join_texts,
    map_rows,
    with_system,
    without_empty,
    without_system,
)
from arealite.dataset.rows import load_dataset, report_long_rows
from arealite.dataset.streamed import map_lazily, open_streamed
from arealite.utils.images.encoded import has_images

QUESTION = "Question: {prompt}\nAnswer:"
# Tokens by which a text may differ from its tokens within a chat.
_MARGIN = 16


@dataclass(frozen=True)
class PromptFormat:
    """What the columns of a dataset mean, and how its prompts read.

    `adapt` changes a row before the column map. `instruction` follows each prompt, unless worked examples or a
    `prompt_template` say what is wanted. `plain` is the text around a prompt for models without a chat template.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[Row], Row] | None = None
    instruction: str = ""
    plain: str = "{prompt}"


# For rows that already have the names that workflows and rewards expect.
AS_THEY_ARE = PromptFormat()


class PromptMaker:
    """Makes rows of a dataset; without a tokenizer only to check them."""

    def __init__(
        self,
        config: DataSourceConfig,
        how: PromptFormat,
        tokenizer: PreTrainedTokenizerBase | None,
        examples: list[Row],
    ):
        self.config, self.tokenizer = config, tokenizer
        self.columns, self.adapt = config.columns or how.columns, how.adapt if not config.columns else None
        # A template of the user's is the whole prompt.
        self.instruction = "" if config.few_shot or config.prompt_template else how.instruction
        self.template = config.prompt_template or (QUESTION if config.few_shot and not how.columns else how.plain)
        has_template = tokenizer is None or bool(tokenizer.chat_template)
        self.is_chat = has_template and config.prompt_template is None
        self._turns, self._shown = self._show(map_rows(examples, self._map, config.path))
        # What stands before the prompt of a row that has no messages before it.
        self._before = with_system([], config.system_prompt, self._turns)
        # Tokens of a chat around the text of its last message; counted at the first use.
        self._num_around: int | None = None

    def __call__(self, raw: Row) -> Row | None:
        """Return a row, or None if its prompt is too long. Raises `ValueError` for what cannot be a prompt."""
        row = self._map(raw)
        messages, prompt = row.pop("messages", None), row.pop("prompt", None)
        if "input_ids" in row:
            return row if self._fits(len(row["input_ids"])) else None
        if messages is not None:
            made: Row = {"messages": with_system(join_texts(messages), self.config.system_prompt, self._turns)}
        elif self.is_chat:
            user = {"role": "user", "content": prompt + self.instruction}
            made = {"messages": [*self._before, user]}
        else:
            made = {"prompt": self._shown + self._to_plain(prompt + self.instruction)}
        return {**made, **row} if self._fits(self._count_tokens(made)) else None

    def _map(self, raw: Row) -> Row:
        """Return a row with `messages`, `prompt` or `input_ids`, checked, and the columns of the reward."""
        own = apply_columns(self.adapt(raw) if self.adapt else raw, self.columns)
        row = dict(without_empty(own, "prompt", "messages"))
        _check_seed(row)
        if self.config.few_shot and has_images(row):
            # Examples are text: the images of the row would come first, and so belong to the first of them.
            raise ValueError(
                f"it has images, and few_shot={self.config.few_shot} shows rows without theirs: leave few_shot out"
            )
        if "messages" in row and "prompt" in row:
            # A task may give both.
            del row["prompt" if self.is_chat else "messages"]
        if "messages" in row:
            check_messages("messages", row["messages"])
            if self.tokenizer is not None and not self.is_chat:
                reason = (
                    "prompt_template is set" if self.config.prompt_template else "the tokenizer has no chat template"
                )
                raise ValueError(f"it has `messages`, and {reason}: give a text as columns.prompt")
        elif "prompt" in row:
            if not isinstance(row["prompt"], str) or not row["prompt"].strip():
                kind = "empty" if isinstance(row["prompt"], str) else type(row["prompt"]).__name__
                advice = advise_messages({self.columns.get("prompt", "prompt"): row["prompt"]})
                advice = advice or "set columns.prompt to a column with text"
                raise ValueError(f"`prompt` must be text, not {kind}: {advice}")
        elif "input_ids" not in row:
            advice = advise_messages(row) or (
                "Set columns.prompt to the column of the question (and columns.answer to that of the answer), or "
                "`task` to a built-in one"
            )
            raise ValueError(
                f"it has no `prompt` and no `messages`; its columns are {', '.join(map(str, row))}. {advice}"
            )
        return row

    def _show(self, examples: list[Row]) -> tuple[Messages, str]:
        """Return worked examples as messages and as plain text."""
        turns: Messages = []
        text = ""
        for row in examples:
            answer = row.get("answer")
            answer = answer[0] if isinstance(answer, list) and answer else answer
            if not isinstance(answer, str | int | float) or "input_ids" in row:
                raise DatasetError(
                    f"few_shot={self.config.few_shot} shows rows of {self.config.path} with their `answer`, which must "
                    f"be text or a number, not {type(answer).__name__}: set columns.answer, or leave few_shot out"
                )
            asked = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
            turns += [*without_system(asked), {"role": "assistant", "content": str(answer)}]
            if "prompt" in row:
                text += f"{self._to_plain(row['prompt'])} {answer}\n\n"
        return turns, self.config.system_prompt + "\n\n" + text if self.config.system_prompt else text

    def _to_plain(self, prompt: str) -> str:
        return self.template.replace("{prompt}", prompt)

    def _count_tokens(self, row: Row) -> int:
        if self.config.max_length is None or self.tokenizer is None:
            return 0
        if "prompt" in row:
            return self._count_text(row["prompt"], 0, add_special_tokens=True)
        *before, last = row["messages"]
        if not isinstance(last.get("content"), str) or before != self._before:
            return self._count_chat(row["messages"])
        # Rendering takes a hundred times as long as counting: only where it may decide.
        if self._num_around is None:
            self._num_around = self._count_chat([*before, {**last, "content": ""}])
        about = self._num_around + self._count_text(last["content"], self._num_around, add_special_tokens=False)
        return about if abs(about - self.config.max_length) > _MARGIN else self._count_chat(row["messages"])

    def _count_text(self, text: str, num_around: int, add_special_tokens: bool) -> int:
        """Return the number of tokens of a text, or an upper bound if the text certainly fits.

        Encoding every prompt takes a second or two for a dataset like GSM8K.
        """
        assert self.config.max_length is not None and self.tokenizer is not None
        # Each token has at least one character, besides special ones. Normalization lengthens no ASCII.
        most = len(text) + _MARGIN
        if text.isascii() and num_around + most + _MARGIN < self.config.max_length:
            return most
        return len(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _count_chat(self, messages: Messages) -> int:
        assert self.tokenizer is not None
        return len(self.tokenizer.encode(render(messages, self.tokenizer, True), add_special_tokens=False))

    def _fits(self, length: int) -> bool:
        return self.config.max_length is None or length <= self.config.max_length


def _check_seed(row: Row) -> None:
    """Raise `ValueError` for a `seed` that samples cannot be drawn with. A row without a value has none."""
    if "seed" in row and row["seed"] is None:
        del row["seed"]
    elif "seed" in row and type(row["seed"]) is not int:
        raise ValueError(
            f"its column `seed` is taken as the seed with which its answers are sampled, a whole number, and is "
            f"{type(row['seed']).__name__}: give it another name, or leave it out, with `columns`"
        )


def load_prompts(
    config: DataSourceConfig,
    how: PromptFormat,
    tokenizer: PreTrainedTokenizerBase | None = None,
    raw: Sequence[Row] | None = None,
    cache: Path | None = None,
) -> Sequence[Row]:
    """Load the rows that `config` names, or make them of the rows `raw`. Raises `DatasetError`."""
    if raw is None:
        raw = open_streamed(config, cache) if config.streaming else load_dataset(config)
    examples = [raw[i] for i in range(min(config.few_shot, len(raw)))]
    if len(examples) == len(raw):
        raise DatasetError(f"few_shot={config.few_shot} takes all {len(raw)} rows of {config.path}: lower it")
    make = PromptMaker(config, how, tokenizer, examples)
    if config.streaming:
        return map_lazily(raw, make, config, describe(tokenizer), cache, config.few_shot)
    return without_long(map_rows(raw[config.few_shot :], make, config.path), len(raw) - config.few_shot, config)


def without_long(rows: list[Row], num_all: int, config: DataSourceConfig) -> list[Row]:
    """Say how many rows are too long. Raises `DatasetError` if none is left."""
    if not rows:
        raise DatasetError(f"all {num_all} rows of {config.path} are longer than max_length={config.max_length} tokens")
    report_long_rows(num_all - len(rows), num_all, config)
    return rows


def describe(tokenizer: Any) -> str:
    """Return a text that changes with the tokenizer."""
    return f"{getattr(tokenizer, 'name_or_path', '')} {getattr(tokenizer, 'chat_template', '')}"
