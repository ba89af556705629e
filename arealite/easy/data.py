"""Datasets of a Python caller: lists of dicts, `datasets.Dataset`, dicts of splits, paths and names."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from arealite.api.errors import DatasetError
from arealite.dataset.columns import advise_messages, apply_columns, map_rows, without_empty
from arealite.dataset.rows import check_rows
from arealite.easy.rewards import ASKED

Row = dict[str, Any]
_TRAINING = ("train", "training")


def read_data(data: Any, name: str, split: Sequence[str] = _TRAINING) -> list[Row] | str:
    """Return rows that are in memory, or the path or name of a dataset; raises `DatasetError`.

    Of a dict of splits, such as a `DatasetDict`, the first of `split` is taken.
    """
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, Mapping):
        found = next((word for word in split if word in data), None)
        if found is None and _is_columns(data):
            raise DatasetError(
                f"{name} is a dict of columns ({', '.join(map(str, data))}): give a list of rows, such as "
                "[{'prompt': …, 'answer': …}, …]"
            )
        if found is None:
            raise DatasetError(f"{name} has the splits {', '.join(map(str, data))}: pass the one to use")
        return read_data(data[found], name)
    if isinstance(data, type) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        advice = ""
        if hasattr(data, "take"):
            advice = ": pass list(dataset.take(1000))"
        elif isinstance(data, Iterator):
            advice = ": pass list(…) of it, since training reads rows more than once and in any order"
        raise DatasetError(
            f"{name} is {type(data).__name__}; give a list of dicts, a datasets.Dataset, a path or a name{advice}"
        )
    rows = list(data)
    if not rows:
        raise DatasetError(f"{name} has no rows")
    wrong = next((row for row in rows if not isinstance(row, Mapping)), None)
    if wrong is not None:
        advice = ": pass df.to_dict('records')" if hasattr(data, "columns") else ""
        raise DatasetError(f"a row of {name} is {type(wrong).__name__}, not a dict of columns{advice}")
    try:
        return list(check_rows([dict(row) for row in rows]))
    except ValueError as error:
        raise DatasetError(f"{name}: {error}") from error


def _is_columns(data: Mapping[Any, Any]) -> bool:
    """Whether this holds lists of values, one for each column, and not splits."""
    return any(isinstance(own, list | tuple) and not isinstance(next(iter(own), {}), Mapping) for own in data.values())


def read_eval_data(data: Any) -> dict[str, list[Row] | str]:
    """Return validation sets by name; a single one is `valid`."""
    if data is None:
        return {}
    if isinstance(data, Mapping):
        return {str(name): read_data(own, f"eval_dataset[{name!r}]") for name, own in data.items()}
    return {"valid": read_data(data, "eval_dataset")}


def as_prompts(rows: list[Row], name: str, columns: Mapping[str, str], keeps_prompt: bool) -> list[Row]:
    """Return rows in which a chat is in `messages` and a text in `prompt`; raises `DatasetError`.

    `keeps_prompt` also keeps the prompt as it is, for reward functions of TRL's kind.
    """
    section = "train_dataset" if name == "train_dataset" else "valid_dataset"

    def make(raw: Row) -> Row:
        row = dict(without_empty(apply_columns(raw, columns), "prompt", "messages"))
        asked = row.get("prompt", row.get("messages"))
        if asked is None and "prompt" in row:
            raise ValueError("its `prompt` is None: remove the row, or give it a text or a list of messages")
        if asked is None:
            advice = advise_messages(row) or (
                "Rename the column of the question to `prompt`, or pass "
                f"config={{{section!r}: {{'columns': {{'prompt': …}}}}}}"
            )
            raise ValueError(
                f"it has no `prompt` and no `messages`; its columns are {', '.join(map(str, row)) or 'none'}. {advice}"
            )
        if "prompt" in row:
            # Messages beside a prompt may have its answer.
            row.pop("messages", None)
        if isinstance(row.get("prompt"), list):
            row["messages"] = row.pop("prompt")
        return {**row, ASKED: asked} if keeps_prompt else row

    return map_rows(rows, make, name)
