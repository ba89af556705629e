"""Reads the YAML of configurations: numbers and text as they are written, within limits.

Used by `config` for files and overrides. A text that is not valid, or that would grow beyond the limits (many values,
aliases of aliases, deep nesting), is a `ValueError` of one line before anything is built from it.
"""

import dataclasses
import re
import types
import typing
from typing import Any

import yaml

MAX_CHARACTERS = 1_000_000
# Keys, items and values, with those that aliases repeat. The largest configurations have a few hundred.
MAX_VALUES = 4_000
MAX_DEPTH = 20


def read_yaml(text: str, kind: Any) -> Any:
    """Return the value of a YAML text; `kind` is the type that it is for, or None. Raises `ValueError`."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _keep_text(node, kind)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{place}{error.problem}".splitlines()[0]) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _keep_text(node: yaml.Node, kind: Any) -> None:
    """Keep values of text fields as written: a trial named 1.10 is not 1.1, one named `on` is not True."""
    kind = without_null(kind)
    if kind is str and node.tag in (_TAG + "int", _TAG + "float", _TAG + "bool"):
        node.tag = _TAG + "str"
    elif isinstance(node, yaml.SequenceNode) and typing.get_origin(kind) is list:
        for item in node.value:
            _keep_text(item, typing.get_args(kind)[0])
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            # Names too: a dataset named 2024 is not the number.
            _keep_text(key, str if typing.get_origin(kind) is dict else None)
            _keep_text(value, kind if key.value == "<<" else kind_inside(kind, str(key.value)))


class _Loader(yaml.SafeLoader):
    """YAML in which `24:00:00`, `007` and dates stay text. A repeated key and too many values are errors."""

    def __init__(self, text: str):
        super().__init__(text)
        self._num_values = 0
        # Keys that lead to the current value; a key, an item and the document itself are "".
        self._path: list[str] = []
        # The number of values inside each complete value, by its id.
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                raise _error(f"*{event.anchor} is an alias of a value that holds it", event)
            self._count(self._sizes[id(node)], event)
            return node
        before = self._num_values
        self._path.append(index.value if isinstance(index, yaml.ScalarNode) else "")
        self._count(1, event)
        if len(self._path) > MAX_DEPTH:
            raise _error(f"{self._name()}nested more than {MAX_DEPTH} levels deep", event)
        node = super().compose_node(parent, index)  # pyright: ignore[reportArgumentType]
        self._path.pop()
        self._sizes[id(node)] = self._num_values - before
        return node

    def _count(self, number: int, event: yaml.Event) -> None:
        self._num_values += number
        if self._num_values > MAX_VALUES:
            raise _error(f"{self._name()}more than {MAX_VALUES} keys and values, with those that aliases repeat", event)

    def _name(self) -> str:
        keys = [key for key in self._path[:-1] if key]
        return f"{'.'.join(keys)}: " if keys else ""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise _error(f"the key {key.value} appears twice", key)
                seen.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # A number of thousands of digits, or text that is tagged as a number.
        except ValueError as error:
            raise _error(f"cannot read {str(node.value)[:40]!r}: {error}", node) from error


def _error(problem: str, at: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


_NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][0-9_]*|0b_*[01][01_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*)",
    "float": r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
}
_TAG = "tag:yaml.org,2002:"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag.removeprefix(_TAG) not in (*_NUMBERS, "timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}  # fmt: skip
for _kind, _form in _NUMBERS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_form})$"), list("-+.0123456789"))


def dataclass_of(kind: Any) -> type | None:
    """Return the dataclass of `X` or `X | None`; None if there is none."""
    kind = without_null(kind)
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def named_sections(kind: Any) -> type | None:
    """Return the dataclass of `dict[str, X]`; None if there is none."""
    return dataclass_of(typing.get_args(kind)[1]) if typing.get_origin(kind) is dict else None


def kind_inside(kind: Any, name: str) -> Any:
    """Return the type of the value `name` of a section; None if it is not known."""
    section = dataclass_of(kind)
    if section is not None:
        return typing.get_type_hints(section).get(name)
    return typing.get_args(kind)[1] if typing.get_origin(kind) is dict else None


def without_null(kind: Any) -> Any:
    """Return `X` for `X` and `X | None`."""
    options = [o for o in typing.get_args(kind) if o is not type(None)] if is_union(kind) else []
    return options[0] if len(options) == 1 else kind


def is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)
