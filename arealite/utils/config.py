"""Loads a config dataclass from `--config file.yaml` (repeatable), then `key=value` overrides.

Scripts call `load_config(argv, GRPOConfig)`; launchers read the same arguments without a schema with `load_plain`. An
unknown key (reported with the nearest valid one), a value of the wrong type, a missing value and an impossible
combination (`config.check()`) raise `ConfigError` before anything starts. `run_main` prints such errors as one message.
"""

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
# Path, set by a launcher: `load_config` writes the resolved configuration there and ends the process.
CHECK_ONLY_ENV = "AREALITE_CHECK_CONFIG"
# Path of this process's log, set by a launcher.
LOG_FILE_ENV = "AREALITE_LOG_FILE"
# Exit code for an error that would come again; launchers do not restart after it.
REFUSED = 2
_PERMANENT = (ConfigError, DatasetError, CheckpointError)
USAGE = "arguments: [--config FILE.yaml]... [key=value]... [--help]"


def load_config(argv: list[str], cls: type[T]) -> T:
    """Load and check the configuration of the arguments. `--help` prints its keys and exits."""
    if "--help" in argv or "-h" in argv:
        _print_to_pipe(help_text(cls))
        raise SystemExit(0)
    node = OmegaConf.structured(cls)
    for source, values in _sources(argv, cls):
        _check_keys(values, cls, source)
        try:
            node = OmegaConf.merge(node, values)
        except OmegaConfBaseException as error:
            raise _bad_value(error, source, cls) from error
    config = _to_dataclass(node, cls)
    check = getattr(config, "check", None)
    if check is not None:
        check()
    if CHECK_ONLY_ENV in os.environ:
        Path(os.environ[CHECK_ONLY_ENV]).write_text(to_yaml(config))
        raise SystemExit(0)
    return config


def load_plain(argv: list[str], cls: type | None = None) -> DictConfig:
    """Merge the same arguments without a schema. Values of keys that are text in `cls` stay as written."""
    node = OmegaConf.create({})
    for source, values in _sources(argv, cls):
        try:
            node = OmegaConf.merge(node, values)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{source} contradicts an earlier value: {error}") from error
    assert isinstance(node, DictConfig)
    return node


def to_yaml(config: Any) -> str:
    """Return a configuration as YAML that `--config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def run_main(main: Callable[[list[str]], Any], argv: list[str] | None = None) -> typing.NoReturn:
    """Run the `main` of a command and exit with its code; print known errors without a traceback.

    Exits with 2 after an error that would come again (launchers then do not restart), with 1 after others, and with 130
    after Ctrl+C. Raises the limit on open files.
    """
    log_to_file()
    raise_file_limit()
    try:
        code = main(sys.argv[1:] if argv is None else argv)
    except AReaLiteError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(REFUSED if isinstance(error, _PERMANENT) else 1) from None
    except RuntimeError as error:
        if GROUP_TIMED_OUT not in str(error):
            raise
        logging.getLogger("arealite").info("a collective timed out", exc_info=True)
        print(
            f"error: rank {os.environ.get('RANK', '0')} waited for another rank until the deadline "
            f"(collective_timeout_s of the trained model): {error}\n"
            "  Likely cause: that rank hangs or is very slow; the end of its log shows where",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def log_to_file() -> None:
    """Send log records to the launcher's log file; the console shows the table and the last error only."""
    path = os.environ.get(LOG_FILE_ENV)
    if path is not None:
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        # A full disk must not print a traceback for each record.
        logging.raiseExceptions = False
        logging.basicConfig(filename=path, level=logging.WARNING, format=form)
        logging.getLogger("arealite").setLevel(logging.INFO)


def _sources(argv: list[str], cls: type | None) -> Iterator[tuple[str, DictConfig]]:
    """Yield (name of the source, nested values): all files in order, then all overrides."""
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
        yield path, _expand_home(_read_file(path, cls))
    for override in overrides:
        try:
            yield f"override {override!r}", _expand_home(_read_override(override, cls))
        except (OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(f"cannot read the override {override!r}: {error}") from error


def _expand_home(values: DictConfig) -> DictConfig:
    """Expand `~/` at the start of values. A shell does so only at the start of a word, not in `key=~/…`."""
    for key in list(values):
        node: Any = values._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            _expand_home(node)
        elif isinstance(node._value(), str) and node._value().startswith("~/"):
            values[key] = os.path.expanduser(node._value())
    return values


def _read_override(override: str, kind: Any) -> DictConfig:
    key, _, text = override.partition("=")
    for name in key.split("."):
        kind = _kind_inside(kind, name)
    # Text fields take the value as typed, unless it is null or quoted: `#1`, `a: b` and an empty value are no YAML.
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
        raise ConfigError(f"{path} must hold `key: value` pairs at its top level, not a {type(values).__name__}")
    return OmegaConf.create(values or {})


def _read_yaml(text: str, kind: Any) -> Any:
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    _keep_text(node, kind)
    return loader.construct_document(node)


def _keep_text(node: yaml.Node, kind: Any) -> None:
    """Keep values of text fields as written: a trial named 1.10 is not 1.1, one named `on` is not True."""
    kind = _without_null(kind)
    if kind is str and node.tag in (_TAG + "int", _TAG + "float", _TAG + "bool"):
        node.tag = _TAG + "str"
    elif isinstance(node, yaml.SequenceNode) and typing.get_origin(kind) is list:
        for item in node.value:
            _keep_text(item, typing.get_args(kind)[0])
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _keep_text(value, kind if key.value == "<<" else _kind_inside(kind, str(key.value)))


class _Loader(yaml.SafeLoader):
    """YAML in which `24:00:00`, `007` and dates stay text. A repeated key is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        for i, key in enumerate(keys):
            if isinstance(key, str) and key != "<<" and key in keys[:i]:
                raise yaml.MarkedYAMLError(None, None, f"the key {key} appears twice", node.start_mark)
        return node


_NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)",
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


def _check_keys(values: DictConfig, cls: type, source: str, prefix: str = "") -> None:
    """Raise for the first key that the dataclass does not have. Free-form dicts may have any keys."""
    kinds = typing.get_type_hints(cls)
    for key in map(str, values):
        path = f"{prefix}{key}"
        if key not in kinds:
            raise ConfigError(f"unknown key {path!r} in {source}: {_nearest(key, cls, prefix)}")
        child, named, node = _dataclass_of(kinds[key]), _named_sections(kinds[key]), values._get_node(key)
        if named is not None and isinstance(node, DictConfig) and not node._is_none():
            for name in map(str, node):
                _check_section(node, name, named, source, f"{path}.{name}")
        elif child is not None:
            _check_section(values, key, child, source, path)


def _check_section(values: DictConfig, key: str, cls: type, source: str, path: str) -> None:
    """Check the keys of one section of `values`."""
    node: Any = values._get_node(key)
    if OmegaConf.is_interpolation(values, key) or values[key] is None:
        return
    if not isinstance(node, DictConfig):
        inside = ", ".join(f"{path}.{field.name}" for field in dataclasses.fields(cls))
        raise ConfigError(f"{path} in {source} is a section, not one value: set {inside}")
    _check_keys(node, cls, source, f"{path}.")


def _nearest(key: str, cls: type, prefix: str) -> str:
    siblings = [field.name for field in dataclasses.fields(cls)]
    near = [prefix + name for name in difflib.get_close_matches(key, siblings, n=1)]
    # The key may have been written one level too high: search for its name in nested sections.
    near = near or [p for p, *_ in _leaves(cls, prefix) if p.rsplit(".", 1)[-1] == key][:3]
    return f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(siblings)}"


def _bad_value(error: OmegaConfBaseException, source: str, cls: type) -> ConfigError:
    key = error.full_key or "a value"
    kinds = {path: kind for path, kind, *_ in _leaves(cls, "")}
    expected = f" (expected {kinds[key]})" if key in kinds else ""
    reason = str(error.msg or error).splitlines()[0]
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
        raise ConfigError(f"values are missing; set them in a file or as key=value:{lines}")
    assert isinstance(config, cls)
    return config


def help_text(cls: type) -> str:
    """Return all keys as plain text, in the order of declaration: key, type, default, help."""
    rows = [(path, f"{kind} = {default}", text) for path, kind, default, text in _leaves(cls, "")]
    width = max(len(path) for path, *_ in rows)
    middle = max(len(kind) for _, kind, _ in rows)
    lines = [USAGE, "", (cls.__doc__ or "").strip(), ""]
    lines += [f"  {path:<{width}}  {kind:<{middle}}  {text}".rstrip() for path, kind, text in rows]
    return "\n".join(lines)


def _print_to_pipe(text: str) -> None:
    """Print a text. A reader that closes the pipe early (`--help | head`) is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Discard what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _leaves(cls: type, prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield (path, type, default, help) of every value; an optional section also has a row of its own."""
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, path = kinds[field.name], f"{prefix}{field.name}"
        text = field.metadata.get("help", "")
        child = _dataclass_of(kind)
        if child is None:
            words = " | ".join(field.metadata.get("words", ()))
            text += f" ({words})" if words else ""
            yield path, _type_name(kind), _default_text(field), text
            named = _named_sections(kind)
            if named is not None:
                yield from _leaves(named, f"{path}.NAME.")
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
    """Return the dataclass of `X` or `X | None`; None if there is none."""
    kind = _without_null(kind)
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _named_sections(kind: Any) -> type | None:
    """Return the dataclass of `dict[str, X]`; None if there is none."""
    return _dataclass_of(typing.get_args(kind)[1]) if typing.get_origin(kind) is dict else None


def _kind_inside(kind: Any, name: str) -> Any:
    """Return the type of the value `name` of a section; None if it is not known."""
    section = _dataclass_of(kind)
    return typing.get_type_hints(section).get(name) if section else _named_sections(kind)


def _without_null(kind: Any) -> Any:
    """Return `X` for `X` and `X | None`."""
    options = [o for o in typing.get_args(kind) if o is not type(None)] if _is_union(kind) else []
    return options[0] if len(options) == 1 else kind


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _type_name(kind: Any) -> str:
    if _is_union(kind):
        return " | ".join(_type_name(option) for option in typing.get_args(kind))
    if kind is type(None):
        return "null"
    if _named_sections(kind) is not None:
        return "dict[str, section]"
    return str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind))
