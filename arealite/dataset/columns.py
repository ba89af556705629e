"""The column map: from the columns of a dataset to the names that workflows and rewards expect.

`columns` maps a name (`prompt`, `messages`, `answer`, …) to a column, to a value inside one (`answers.text.0`), or to a
text with `{column}` fields. What is wrong with a row is a `ValueError`; `map_rows` adds where it is.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arealite.api.errors import DatasetError
from arealite.utils.images.encoded import has_images

Row = dict[str, Any]
Messages = list[dict[str, Any]]
# Functions that an assistant may call, in OpenAI's form.
Tools = list[dict[str, Any]] | None
# Braces around anything else, as in \boxed{}, are text.
_FIELD = re.compile(r"\{([A-Za-z_][\w.-]*)\}")
_MISSING = object()
_SYSTEM_ROLES = ("system", "developer")
_SHAREGPT = "write `from` as `role` (human as user, gpt as assistant) and `value` as `content`"


def apply_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Return a row with the columns of the map; the row itself if the map is empty."""
    return {name: _value(row, spec, f"columns.{name}") for name, spec in columns.items()} if columns else row


def fill_template(template: str, row: Row, key: str) -> str:
    """Return a text with its `{column}` fields filled in. `key` is the template's name in errors."""
    return _FIELD.sub(lambda match: _text(row, match[1], key), template)


def require_columns(row: Row, *columns: str) -> Row:
    """Return the row if it has these columns; raises `ValueError`."""
    missing = [column for column in columns if column not in row]
    if missing:
        raise ValueError(
            f"it needs the columns {', '.join(columns)}; it lacks {', '.join(missing)} and has "
            f"{', '.join(map(str, row)) or 'none'}. Set `columns` to what they are called here"
        )
    return row


def require_text(row: Row, *columns: str) -> Row:
    """Return the row if it has these columns, all of them text; raises `ValueError`."""
    require_columns(row, *columns)
    for column in columns:
        if not isinstance(row[column], str):
            raise ValueError(f"`{column}` must be text, not {type(row[column]).__name__}")
    return row


def without_empty(raw: Row, *layouts: str) -> Row:
    """Return a row without columns that are None beside another of `layouts`.

    Tables of rows in several layouts have them: .parquet files, a `datasets.Dataset`.
    """
    missing = [name for name in layouts if name in raw and raw[name] is None]
    has_other = any(raw.get(name) is not None for name in layouts)
    return {name: value for name, value in raw.items() if name not in missing} if missing and has_other else raw


def check_messages(name: str, messages: Any) -> Messages:
    """Return a list of messages; raises `ValueError` for anything else."""
    if not isinstance(messages, list) or not messages:
        kinds = "a list of messages" if name == "messages" else "text or a list of messages"
        raise ValueError(f"`{name}` must be {kinds}, not {str(messages)[:40] or type(messages)!r}")
    for message in messages:
        if not _is_message(message):
            advice = f": {_SHAREGPT}" if _is_sharegpt(message) else ""
            raise ValueError(
                f"`{name}` has a message that is not {{'role': text, 'content': text}}: {str(message)[:80]}{advice}"
            )
    return messages


def advise_messages(row: Row) -> str | None:
    """Return what to do about a conversation that has another name or layout; None if the row has none."""
    for name, value in row.items():
        first = value[0] if isinstance(value, list) and value else {}
        if _is_sharegpt(first):
            return f"`{name}` has `from` and `value`, as ShareGPT: {_SHAREGPT}, as the column `messages`"
        # One that begins with the assistant is an answer.
        if _is_message(first) and first["role"] != "assistant":
            return f"Set columns.messages={name}, or rename that column to `messages`"
    return None


def read_tools(row: Row) -> Row:
    """Return `tools` of a row, which may be JSON, or nothing if it has none; raises `ValueError`."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"`tools` must be a list of schemas of functions, or JSON of one: {error}") from error
    if not tools:
        return {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"`tools` must be a list of schemas of functions, not {str(tools)[:80]!r}")
    return {"tools": tools}


def refuse_images(row: Row) -> None:
    """Raise `ValueError` for a row with images, which training on texts would leave out."""
    if has_images(row):
        name = "images" if row.get("images") else "image"
        raise ValueError(
            f"it has `{name}`, and this trainer reads texts only: remove the column, or train with a script and "
            "collate_vision_sft (docs/vision.md)"
        )


def _is_sharegpt(message: Any) -> bool:
    return isinstance(message, dict) and "role" not in message and {"from", "value"} <= message.keys()


def _is_message(message: Any) -> bool:
    """Whether it has a role, and text, parts (of images) or tool calls."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str | list) or bool(message.get("tool_calls"))


def with_system(messages: Messages, system: str | None, examples: Sequence[Row] = ()) -> Messages:
    """Return a conversation with one system message, and worked examples between that and the rest.

    Its own system message wins over the configured one.
    """
    rest = without_system(messages)
    own = messages[: len(messages) - len(rest)]
    first = own or ([{"role": "system", "content": system}] if system else [])
    return [*first, *examples, *rest]


def without_system(messages: Messages) -> Messages:
    """Return a conversation without the system message that it begins with, if any."""
    return messages[1:] if messages and messages[0]["role"] in _SYSTEM_ROLES else messages


def join_texts(messages: Messages) -> Messages:
    """Return a conversation whose parts are all text with one text per message, as servers read it.

    Templates of text models expect that. A conversation with any other part stays as it is.
    """
    joined: Messages = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            texts = [_text_part(part) for part in content]
            if None in texts:
                return messages
            message = {**message, "content": "".join(map(str, texts))}
        joined.append(message)
    return joined


def _text_part(part: Any) -> str | None:
    """Return the text of a part of a message; None if it is another kind of part."""
    is_text = isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)
    return part["text"] if is_text else None


def map_rows(rows: Sequence[Row], make: Callable[[Row], Row | None], source: str) -> list[Row]:
    """Return what `make` returns for each row, without None. Its `ValueError` names the row."""
    made = (make_row(row, number, make, source) for number, row in enumerate(rows, 1))
    return [row for row in made if row is not None]


def make_row(row: Row, number: int, make: Callable[[Row], Row | None], source: str) -> Row | None:
    """Return `make(row)`; its `ValueError` becomes a `DatasetError` with the row's number, from 1."""
    try:
        return make(row)
    except ValueError as error:
        raise DatasetError(f"{source}, row {number}: {error}") from error


def _value(row: Row, spec: str, key: str) -> Any:
    found = _look_up(row, spec)
    if found is not _MISSING:
        return found
    if not _FIELD.search(spec):
        raise ValueError(f"{key}={spec} names no column; {_describe(row)}. Set {key} to one of them")
    return fill_template(spec, row, key)


def _text(row: Row, name: str, key: str) -> str:
    value = _look_up(row, name)
    if value is _MISSING:
        raise ValueError(f"{key} has the field {{{name}}}, which is not a column; {_describe(row)}. Change {key}")
    if isinstance(value, dict | list) or value is None:
        raise ValueError(f"{key} has the field {{{name}}}, whose value is {type(value).__name__}, not text or a number")
    return str(value)


def _look_up(row: Row, name: str) -> Any:
    """Return a column, or a value inside one (`a.b.0`)."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return _MISSING
    return value


def _describe(row: Row) -> str:
    return f"its columns are {', '.join(map(str, row)) or 'none'}"
