"""Loading a configuration: `--config file.yaml` (repeatable), then `key=value` overrides, into a plain dataclass.

Scripts call `load_config(argv, GRPOConfig)`; launchers read the same arguments loosely with `load_plain`. Whatever is wrong is
one ConfigError before anything starts: an unknown key (with the nearest valid one), a value of the wrong type, a missing
value, an impossible combination (`config.check()`). `run_main` turns such errors into one message and exit code 2.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from arealite.api.errors import AReaLiteError, CheckpointError, ConfigError, DatasetError
from arealite.utils.network import GROUP_TIMED_OUT
from arealite.utils.process import raise_file_limit

T = TypeVar("T")
# Set by a launcher that wants a script's configuration checked before anything is started: the script writes its
# resolved configuration there and ends.
CHECK_ONLY_ENV = "AREALITE_CHECK_CONFIG"
# Set by a launcher: the log of this process.
LOG_FILE_ENV = "AREALITE_LOG_FILE"
REFUSED = 2
_LASTING = (ConfigError, DatasetError, CheckpointError)
USAGE = "arguments: [--config FILE.yaml]... [key=value]... [--help]"


def load_config(argv: list[str], cls: type[T]) -> T:
    """The configuration that the arguments describe, checked. `--help` prints the tree of `cls` and exits."""
    if "--help" in argv or "-h" in argv:
        _print_to_reader(help_text(cls))
        raise SystemExit(0)
    node = OmegaConf.structured(cls)
    for source, values in _sources(argv, cls):
        _check_keys(values, cls, source)
        try:
            node = OmegaConf.merge(node, values)
        except OmegaConfBaseException as error:
            raise _bad_value(error, source, cls) from error
    config = _to_dataclass(node, cls)
    if hasattr(config, "check"):
        config.check()
    if CHECK_ONLY_ENV in os.environ:
        Path(os.environ[CHECK_ONLY_ENV]).write_text(to_yaml(config))
        raise SystemExit(0)
    return config


def load_plain(argv: list[str], cls: type | None = None) -> DictConfig:
    """The same arguments merged without a schema, for who only needs a few common keys; those of `cls` that are text stay as written."""
    node = OmegaConf.create({})
    for source, values in _sources(argv, cls):
        try:
            node = OmegaConf.merge(node, values)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{source} does not fit what came before it: {error}") from error
    assert isinstance(node, DictConfig)
    return node


def to_yaml(config: Any) -> str:
    """A configuration as YAML that `--config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def run_main(main: Callable[[list[str]], Any], argv: list[str] | None = None) -> typing.NoReturn:
    """Run a command line: errors meant for people are printed without a traceback and exit with 2 if the same command would fail
    again (launchers do not start it again), else with 1; Ctrl+C with 130.
    """
    log_to_file()
    raise_file_limit()
    try:
        code = main(sys.argv[1:] if argv is None else argv)
    except AReaLiteError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(REFUSED if isinstance(error, _LASTING) else 1) from None
    except RuntimeError as error:
        if GROUP_TIMED_OUT not in str(error):
            raise
        logging.getLogger("arealite").info("another rank did not come", exc_info=True)
        print(
            f"error: rank {os.environ.get('RANK', '0')} waited for another rank until the deadline (collective_timeout_s of the trained "
            f"model): {error}\n  Likely cause: that rank hangs or is very slow; its log ends where it is",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def log_to_file() -> None:
    """In a process that a launcher started: what is logged goes to its log file, the console is for the table and the last error."""
    path = os.environ.get(LOG_FILE_ENV)
    if path is not None:
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.raiseExceptions = False  # a full disk costs lines of the log, and no traceback for each
        logging.basicConfig(filename=path, level=logging.WARNING, format=form)
        logging.getLogger("arealite").setLevel(logging.INFO)


# ------------------------------------------------------------------------------------------------- sources


def _sources(argv: list[str], cls: type | None) -> Iterator[tuple[str, DictConfig]]:
    """(where it is from, nested values): all files in order first, then all overrides."""
    files, overrides = [], []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config":
            path = next(arguments, None)
            if path is None:
                raise ConfigError(f"--config needs a file after it\n{USAGE}")
            files.append(path)
        elif argument.startswith("--config="):
            files.append(argument.removeprefix("--config="))
        elif "=" in argument and not argument.startswith("-"):
            overrides.append(argument)
        else:
            raise ConfigError(f"cannot read the argument {argument!r}\n{USAGE}")
    for path in files:
        yield path, _at_home(_read_file(path, cls))
    for override in overrides:
        try:
            yield f"override {override!r}", _at_home(_read_override(override, cls))
        except (OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(f"cannot read the override {override!r}: {error}") from error


def _at_home(values: DictConfig) -> DictConfig:
    """`~/…` in any value means the home folder: a shell expands it only at the start of a word, not in `key=~/…`."""
    for key in list(values):
        node = values._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            _at_home(node)
        elif isinstance(node._value(), str) and node._value().startswith("~/"):
            values[key] = os.path.expanduser(node._value())
    return values


def _read_override(override: str, kind: Any) -> DictConfig:
    key, _, text = override.partition("=")
    for name in key.split("."):
        section = _dataclass_of(kind)
        kind = typing.get_type_hints(section).get(name) if section else None
    # For a field of text what was typed is the text, unless it is null or in quotes: `#1`, `a: b` and nothing at all are not YAML here.
    null = ("~", "null") if kind is str else ("", "~", "null")
    typed = _without_null(kind) is str and text not in null and text[:1] not in ("'", '"')
    values = OmegaConf.create({})
    OmegaConf.update(values, key, text if typed else _read_yaml(text, kind))
    return values


def _read_file(path: str, cls: type | None) -> DictConfig:
    try:
        values = _read_yaml(Path(path).read_text(encoding="utf-8"), cls)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"{path} must hold `key: value` pairs at the top, not a {type(values).__name__}")  # fmt: skip
    return OmegaConf.create(values or {})


def _read_yaml(text: str, kind: Any) -> Any:
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    _keep_text(node, kind)
    return loader.construct_document(node)


def _keep_text(node: yaml.Node, kind: Any) -> None:
    """What stands where the schema has text is text, however it looks: a trial 1.10 is not 1.1, one named `on` not True."""
    kind = _without_null(kind)
    if kind is str and node.tag in (_TAG + "int", _TAG + "float", _TAG + "bool"):
        node.tag = _TAG + "str"
    elif isinstance(node, yaml.SequenceNode) and typing.get_origin(kind) is list:
        for item in node.value:
            _keep_text(item, typing.get_args(kind)[0])
    elif isinstance(node, yaml.MappingNode) and dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        for key, value in node.value:
            _keep_text(value, kind if key.value == "<<" else kinds.get(str(key.value)))


class _Loader(yaml.SafeLoader):
    """YAML whose numbers are those one means: `24:00:00` is not 86400, `007` not 7, a date is text, and 1e-5 is a float. A key given twice is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        for i, key in enumerate(keys):
            if isinstance(key, str) and key != "<<" and key in keys[:i]:
                raise yaml.MarkedYAMLError(None, None, f"the key {key} is there twice", node.start_mark)  # fmt: skip
        return node


_NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)",
    "float": r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
}
_TAG = "tag:yaml.org,2002:"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag.removeprefix(_TAG) not in (*_NUMBERS, "timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}  # fmt: skip
for _kind, _form in _NUMBERS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_form})$"), list("-+.0123456789"))


# -------------------------------------------------------------------------------------------------- checks


def _check_keys(values: DictConfig, cls: type, source: str, prefix: str = "") -> None:
    """Raise for the first key that the dataclass does not have; free-form dicts are not looked into."""
    kinds = typing.get_type_hints(cls)
    for key in map(str, values):
        path = f"{prefix}{key}"
        if key not in kinds:
            raise ConfigError(f"unknown key {path!r} in {source}: {_nearest(key, cls, prefix)}")
        child, node = _dataclass_of(kinds[key]), values._get_node(key)
        if child is None or OmegaConf.is_interpolation(values, key) or values[key] is None:
            continue
        if not isinstance(node, DictConfig):
            inside = ", ".join(f"{path}.{field.name}" for field in dataclasses.fields(child))
            raise ConfigError(f"{path} in {source} is a section, not one value: set {inside}")
        _check_keys(node, child, source, f"{path}.")


def _nearest(key: str, cls: type, prefix: str) -> str:
    siblings = [field.name for field in dataclasses.fields(cls)]
    near = [prefix + name for name in difflib.get_close_matches(key, siblings, n=1)]
    # A key written one level too high: look for its name further down.
    near = near or [p for p, *_ in _leaves(cls, prefix) if p.rsplit(".", 1)[-1] == key][:3]
    return f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(siblings)}"


def _bad_value(error: OmegaConfBaseException, source: str, cls: type) -> ConfigError:
    key = error.full_key or "a value"
    expected = ""
    for path, kind, *_ in _leaves(cls, ""):
        if path == key:
            expected = f" (expected {kind})"
    reason = str(error.msg if error.msg else error).splitlines()[0]
    return ConfigError(f"{key} in {source}{expected}: {reason}")


def _to_dataclass(node: Any, cls: type[T]) -> T:
    try:
        OmegaConf.resolve(node)
        missing = sorted(OmegaConf.missing_keys(node))
        config = None if missing else OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise _bad_value(error, "the merged configuration", cls) from error
    if missing:
        helps = {path: text for path, _, _, text in _leaves(cls, "")}
        lines = "".join(f"\n  {key}=…   {helps.get(key, '')}" for key in missing)
        raise ConfigError(f"these values are missing; set them in a file or as key=value:{lines}")
    assert isinstance(config, cls)
    return config


# ---------------------------------------------------------------------------------------------------- help


def help_text(cls: type) -> str:
    """The whole tree as plain text, in the order of declaration: key, type, default, line of help."""
    rows = [(path, f"{kind} = {default}", text) for path, kind, default, text in _leaves(cls, "")]
    width = max(len(path) for path, *_ in rows)
    middle = max(len(kind) for _, kind, _ in rows)
    lines = [USAGE, "", (cls.__doc__ or "").strip(), ""]
    lines += [f"  {path:<{width}}  {kind:<{middle}}  {text}".rstrip() for path, kind, text in rows]
    return "\n".join(lines)


def _print_to_reader(text: str) -> None:
    """A reader that has seen enough (`--help | head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered goes nowhere


def _leaves(cls: type, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """(path, type, default, help) of every value in the tree; an optional part also has a row of its own."""
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, path = kinds[field.name], f"{prefix}{field.name}"
        text = field.metadata.get("help", "")
        child = _dataclass_of(kind)
        if child is None:
            words = " | ".join(field.metadata.get("words", ()))
            text += f" ({words})" if words else ""
            yield path, _type_name(kind), _default_text(field), text
            continue
        if kind is not child and field.default is None:
            yield path, _type_name(kind), "null", text
        yield from _leaves(child, f"{path}.")


def _default_text(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return str(field.default_factory())
    if field.default is dataclasses.MISSING or field.default == MISSING:
        return "(required)"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return "null" if field.default is None else str(field.default) or "''"


def _dataclass_of(kind: Any) -> type | None:
    """The dataclass in `X` or `X | None`, if there is one."""
    kind = _without_null(kind)
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _without_null(kind: Any) -> Any:
    """`X` of `X` or `X | None`."""
    options = [o for o in typing.get_args(kind) if o is not type(None)] if _is_union(kind) else []
    return options[0] if len(options) == 1 else kind


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _type_name(kind: Any) -> str:
    if _is_union(kind):
        return " | ".join(_type_name(option) for option in typing.get_args(kind))
    if kind is type(None):
        return "null"
    return str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind))
