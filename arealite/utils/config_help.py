"""Describes the keys of config dataclasses as text: help in parts, nearest names, types and defaults.

Used by `config` for `--help` and error messages, and by the commands that show configurations. Imports nothing that
computes, so that help is shown at once.
"""

import dataclasses
import difflib
import shutil
import textwrap
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from arealite.api.config_field import MISSING
from arealite.api.errors import ConfigError
from arealite.utils.yaml_reader import dataclass_of, is_union, named_sections

USAGE = "[--config FILE.yaml]... [key=value]... [--help [PART]]"
# What nearly every run sets, in this order. A key of a nested tree (`trainer.grpo.actor.path`) is found by its end.
_ESSENTIALS = (
    "trainer.type", "experiment_name", "trial_name", "actor.path", "model.path", "train_dataset.path",
    "valid_dataset.path", "reward", "workflow", "train_dataset.max_length", "gconfig.max_new_tokens",
    "actor.algorithm", "actor.optimizer.lr", "model.optimizer.lr", "train_dataset.batch_size", "gconfig.n_samples",
    "actor.max_tokens_per_mb", "model.max_tokens_per_mb", "rollout.max_head_offpolicyness", "total_train_epochs",
    "total_train_steps", "mode", "allocation_mode", "cluster.fileroot",
)  # fmt: skip
# A part with more keys is shown as its own keys and a list of its parts.
_MAX_KEYS = 60
# Name of the part with the keys that are in no section.
_PLAIN = "run"
_MAX_WIDTH = 160
# On a terminal narrower than this, or with less room than this beside keys and values, help stands below each key.
_MIN_TABLE_WIDTH, _MIN_HELP_WIDTH = 100, 40


class Key(NamedTuple):
    """One value of a configuration: path, type and default as text, line of help, words that it may be."""

    path: str
    kind: str
    default: str
    text: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandHelp:
    """What `--help` shows around the keys: usage, what the command does, examples with a remark."""

    usage: str = f"python SCRIPT.py {USAGE}"
    text: str = ""
    examples: Sequence[tuple[str, str]] = (
        ("--config run.yaml actor.optimizer.lr=1e-6", "a file, and one value changed"),
        ("--help actor", "the keys of one part"),
        ("--help lr", "all keys with a word in their name"),
    )


def keys_of(cls: type, prefix: str = "", defaults: Any = None) -> Iterator[Key]:
    """Yield every value of a config class; an optional section also has a row of its own.

    `defaults` is the instance that the class above has by default, if it differs from `cls()`.
    """
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, path = kinds[field.name], f"{prefix}{field.name}"
        text, default = field.metadata.get("help", ""), getattr(defaults, field.name, _default_of(field))
        child = dataclass_of(kind)
        if child is None:
            words = field.metadata.get("words", ())
            text += f" ({' | '.join(words)})" if words else ""
            yield Key(path, type_name(kind), _default_text(default), text, words)
            if (named := named_sections(kind)) is not None:
                yield from keys_of(named, f"{path}.NAME.")
            continue
        if kind is not child and field.default is None:
            yield Key(path, type_name(kind), "null", text)
        yield from keys_of(child, f"{path}.", default)


def parts_of(cls: type, prefix: str = "") -> Iterator[tuple[str, type, str]]:
    """Yield (path, class, help) of every section, each before its own sections."""
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        child = dataclass_of(kinds[field.name])
        if child is not None:
            path = f"{prefix}{field.name}"
            yield path, child, field.metadata.get("help", "")
            yield from parts_of(child, f"{path}.")


def help_text(cls: type, part: str = "", about: CommandHelp | None = None) -> str:
    """Return the help of a config class, for the width of the terminal.

    Without a part: the essential keys and a list of parts. `part` is `all`, the path of a section or its end, or a word
    that names of keys contain. Raises `ConfigError` for one that is nowhere.
    """
    about = about or CommandHelp()
    if part:
        return "\n".join(_lines_of_part(cls, part))
    lines = [f"usage: {about.usage}", "", fill_text(about.text or cls.__doc__ or ""), ""]
    rows = list(keys_of(cls))
    if len(rows) <= _MAX_KEYS:
        lines += ["keys:", *_table(rows)]
    else:
        own = _own_keys(cls, rows)
        lines += [f"keys of {cls.__name__}:", *_table(own), ""] if own else []
        lines += ["essential keys:", *_table(_essentials(rows)), "", *_part_list(cls, ""), ""]
        lines += [f"--help PART shows the keys of a part, --help all every one of the {len(rows)} keys."]
    if about.examples:
        width = max(len(command) for command, _ in about.examples)
        lines += ["", "examples:", *(f"  {c:<{width}}  {remark}".rstrip() for c, remark in about.examples)]
    return "\n".join(lines)


def fill_text(text: str) -> str:
    """Wrap the paragraphs of a text for the terminal; indented ones stay as they are."""
    paragraphs = textwrap.dedent(text).strip("\n").split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else textwrap.fill(p, _terminal_width()) for p in paragraphs)


def nearest_text(name: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """Return "did you mean …?" with the nearest of the known names; empty if none is near."""
    near = difflib.get_close_matches(name, known, n=2, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else ""


def nearest_key(key: str, cls: type, prefix: str, root: type) -> str:
    """Return which key was probably meant: of a section, inside it, elsewhere; or all of the section."""
    siblings = [field.name for field in dataclasses.fields(cls)]
    # The key may have been written in another section: search for its name in nested ones, then everywhere.
    inside, everywhere = _by_name(keys_of(cls, prefix)), _by_name(keys_of(root))
    like = [prefix + name for name in difflib.get_close_matches(key, siblings, n=1)]
    close = [inside[name] for name in difflib.get_close_matches(key, inside, n=1, cutoff=0.8)]
    near = list(inside.get(key) or like or (close or [everywhere.get(key, ())])[0])[:3]
    return f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(siblings)}"


def _by_name(keys: Iterator[Key]) -> dict[str, dict[str, None]]:
    """Return the paths of all keys and of their sections by the last name."""
    found: dict[str, dict[str, None]] = {}
    for path in (part for key in keys for part in accumulate(key.path.split("."), "{}.{}".format)):
        found.setdefault(path.rpartition(".")[2], {})[path] = None
    return found


def type_name(kind: Any) -> str:
    """Return a type as text: `int | null`."""
    if is_union(kind):
        return " | ".join(type_name(option) for option in typing.get_args(kind))
    if kind is type(None):
        return "null"
    if named_sections(kind) is not None:
        return "dict[str, section]"
    return str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind))


def _lines_of_part(cls: type, part: str) -> Iterator[str]:
    rows, parts = list(keys_of(cls)), list(parts_of(cls))
    if part in ("all", _PLAIN):
        yield from _table(rows if part == "all" else _plain_keys(cls, ""))
        return
    found = [each for each in parts if each[0] == part] or [each for each in parts if each[0].endswith(f".{part}")]
    for path, section, text in found:
        own = [row for row in rows if row.path.startswith(f"{path}.")]
        yield f"{path}: {text}"
        if len(own) > _MAX_KEYS:
            plain = {row.path for row in _plain_keys(section, f"{path}.")}
            # Rows of the whole class: a section may have other defaults in it than by itself.
            yield from _table([row for row in own if row.path in plain])
            yield from _part_list(section, f"{path}.")
        else:
            yield from _table(own)
    if not found:
        named = [row for row in rows if part.lower() in row.path.lower()]
        if not named:
            names = {path.rsplit(".", 1)[-1]: None for path in (*(each[0] for each in parts), *(r.path for r in rows))}
            known = ", ".join(path for path, *_ in parts if "." not in path)
            near = nearest_text(part, list(names)) or f"parts are {known}"
            raise ConfigError(f"no part and no key is named {part!r}: {near}")
        yield f"keys with {part!r} in their name:"
        yield from _table(named)


def _plain_keys(cls: type, prefix: str) -> list[Key]:
    """Return the keys of a class that are in none of its sections."""
    kinds = typing.get_type_hints(cls)
    outside = {name for name, kind in kinds.items() if dataclass_of(kind) is None}
    return [row for row in keys_of(cls, prefix) if row.path.removeprefix(prefix).split(".")[0] in outside]


def _part_list(cls: type, prefix: str) -> list[str]:
    """List the sections of a class with their number of keys."""
    direct = [each for each in parts_of(cls, prefix) if "." not in each[0].removeprefix(prefix)]
    parts = [(path, sum(1 for _ in keys_of(section)), text) for path, section, text in direct]
    if not prefix:
        parts.insert(0, (_PLAIN, len(_plain_keys(cls, "")), "Keys that belong to no other part."))
    width = max((len(path) for path, *_ in parts), default=0)
    rows = [f"  {path:<{width}}  {count:>4}  {text}" for path, count, text in parts]
    return ["parts, with their number of keys:", *rows] if rows else []


def _own_keys(cls: type, rows: list[Key]) -> list[Key]:
    """Return the keys that a class of the user's own adds."""
    names = () if cls.__module__.startswith("arealite.") else vars(cls).get("__annotations__", ())
    return [row for row in rows if row.path.split(".")[0] in names]


def _essentials(rows: list[Key]) -> list[Key]:
    found = []
    for name in _ESSENTIALS:
        end = f".{name}" if "." in name else None
        found += [row for row in rows if row.path == name or (end and row.path.endswith(end))][:1]
    return found


def _table(rows: list[Key]) -> list[str]:
    """Return the rows in three columns, or with the help below each key where there is no room beside it."""
    width = _terminal_width()
    path_width = max((len(row.path) for row in rows), default=0)
    values = [f"{row.kind} = {row.default}" for row in rows]
    value_width = min(max(map(len, values), default=0), 28)
    indent = path_width + value_width + 6
    is_table = width >= max(_MIN_TABLE_WIDTH, indent + _MIN_HELP_WIDTH)
    lines: list[str] = []
    for row, value in zip(rows, values, strict=True):
        if not is_table:
            lines.append(f"  {row.path}  {value}")
            lines += textwrap.wrap(row.text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
            continue
        first = f"  {row.path:<{path_width}}  {value:<{value_width}}  "
        texts = textwrap.wrap(row.text, width - indent) or [""]
        if len(first) > indent:
            lines += [first.rstrip(), *(" " * indent + text for text in texts if text)]
        else:
            lines += [(first + texts[0]).rstrip(), *(" " * indent + text for text in texts[1:])]
    return lines


def _terminal_width() -> int:
    return min(shutil.get_terminal_size((120, 24)).columns, _MAX_WIDTH)


def _default_of(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def _default_text(default: Any) -> str:
    if isinstance(default, str):
        return "(required)" if default == MISSING else default or "''"
    if isinstance(default, bool):
        return str(default).lower()
    return "null" if default is None else str(default)
