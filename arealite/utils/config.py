"""Loads a config dataclass from `--config file.yaml` (repeatable), then `key=value` overrides.

Scripts call `load_config(argv, GRPOConfig)`; launchers read the same arguments without a schema with `load_plain`. An
unknown key (reported with the nearest valid one), a value of the wrong type, a missing value and an impossible
combination (`config.check()`) raise `ConfigError` before anything starts. `run_main` prints such errors as one message.
"""

import atexit
import dataclasses
import logging
import os
import re
import signal
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from arealite.api.backends import KEY_REFERENCE
from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import AReaLiteError, CheckpointError, CollapseError, ConfigError, DatasetError, RecordError
from arealite.utils.config_help import USAGE, CommandHelp, help_text, keys_of, nearest_key, nearest_text, type_name
from arealite.utils.network import GROUP_TIMED_OUT
from arealite.utils.settings.nodes import follow_policy, gives_reference_dtype, schema_of, to_node
from arealite.utils.startup import prepare_process
from arealite.utils.text import CleanFormatter, clean, clean_process_output
from arealite.utils.yaml_reader import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    dataclass_of,
    kind_inside,
    named_sections,
    read_yaml,
    without_null,
)

T = TypeVar("T")
# Path, set by a launcher: `load_config` writes the resolved configuration there and ends the process.
CHECK_ONLY_ENV = "AREALITE_CHECK_CONFIG"
# Path of this process's log, set by a launcher.
LOG_FILE_ENV = "AREALITE_LOG_FILE"
# Exit code for an error that would come again; launchers do not restart after it.
REFUSED = 2
# Exit code after `on_collapse`; a restart would collapse again.
COLLAPSED = 3
_PERMANENT = (ConfigError, DatasetError, CheckpointError, RecordError)
# Each is merged on its own, so that an error can name it.
MAX_OVERRIDES = 500
# Keys whose texts are not shown; `tokenizer_path` is none of them.
_HIDDEN = "(hidden)"
_SECRET = re.compile("key|token(?!iz)|secret|password", re.IGNORECASE)
_OPTIONS = ("--config", "--help", "--dry-run")
# Flag of a mapping that replaces the one before, instead of being merged with it.
_REPLACES = "replaces"


def load_config(argv: list[str], cls: type[T], about: CommandHelp | None = None) -> T:
    """Load and check the configuration of the arguments. `--help` prints its keys and exits.

    `about` is what a command's help says besides.
    """
    part = _wanted_help(argv)
    if part is not None:
        print_to_pipe(help_text(cls, part, about))
        raise SystemExit(0)
    config = merge_sources(read_sources(argv, cls), cls)
    if CHECK_ONLY_ENV in os.environ:
        Path(os.environ[CHECK_ONLY_ENV]).write_text(to_yaml(config))
        raise SystemExit(0)
    return config


def merge_sources(sources: Iterable[tuple[str, DictConfig]], cls: type[T]) -> T:
    """Merge sources, each with its name for errors, and check the result."""
    node, is_given = schema_of(cls), False
    for source, values in sources:
        _check_keys(values, cls, source, cls)
        is_given = is_given or gives_reference_dtype(values)
        try:
            node = _merge(node, values, source)
        except OmegaConfBaseException as error:
            raise bad_value(error, source, cls) from error
    if not is_given:
        follow_policy(node)
    config = _to_dataclass(node, cls)
    check = getattr(config, "check", None)
    if check is not None:
        check()
    return config


def _merge(node: Any, values: DictConfig, source: str) -> Any:
    """Return `node` with `values`; a mapping that an override gives whole replaces the one before."""
    _clear_replaced(node, values)
    try:
        # Neither is used again, so that nothing needs to be copied.
        return OmegaConf.unsafe_merge(node, values)
    except TypeError as error:
        raise ConfigError(f"{source} has keys where an earlier value is a list, or a list where it has keys") from error


def _clear_replaced(node: DictConfig, values: DictConfig) -> None:
    for key in values:
        new: Any = values._get_node(key)
        old: Any = node._get_node(key) if key in node else None
        if not all(isinstance(part, DictConfig) and not part._is_none() for part in (old, new)):
            continue
        if new._get_node_flag(_REPLACES):
            node[key] = {}
        elif not new._is_interpolation():
            _clear_replaced(old, new)


def _wanted_help(argv: list[str]) -> str | None:
    """Return the part that `--help` asks for: empty for an overview, None without `--help`."""
    for i, argument in enumerate(argv):
        if argument in ("-h", "--help"):
            after = argv[i + 1] if i + 1 < len(argv) else ""
            return "" if "=" in after or after.startswith("-") else after
        if argument.startswith("--help="):
            return argument.removeprefix("--help=")
    return None


def load_plain(argv: list[str], cls: type | None = None) -> DictConfig:
    """Merge the same arguments without a schema. Values of keys that are text in `cls` stay as written."""
    node = OmegaConf.create({})
    for source, values in read_sources(argv, cls):
        try:
            node = _merge(node, values, source)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{source} contradicts an earlier value: {_first_line(error)}") from error
    assert isinstance(node, DictConfig)
    return node


def to_yaml(config: Any) -> str:
    """Return a configuration as YAML that `--config` reads back, with its API key."""
    return OmegaConf.to_yaml(to_node(config))


def private_yaml(config: Any) -> str:
    """Return a configuration as YAML for its owner; the API key is a reference to the environment."""
    return OmegaConf.to_yaml(_without_key(config))


def _without_key(config: Any) -> Any:
    node = config if isinstance(config, DictConfig) else to_node(config)
    has_key = OmegaConf.select(node, "server.api_key") is not None
    return OmegaConf.merge(node, {"server": {"api_key": KEY_REFERENCE}}) if has_key else node


def public_yaml(config: Any) -> str:
    """Return a configuration as YAML without the values of fields that are marked as secret."""
    values = OmegaConf.to_container(_without_key(config))
    cls = OmegaConf.get_type(config)
    shown = _hide_marked(values, cls if dataclasses.is_dataclass(cls) else GRPOConfig)
    return OmegaConf.to_yaml(OmegaConf.create(shown))


def _hide_marked(values: Any, cls: Any) -> Any:
    """Return a section without its secrets. Of a key that `cls` does not have, the name decides."""
    if not isinstance(values, dict):
        return values
    kinds = typing.get_type_hints(cls)
    marked = {field.name for field in dataclasses.fields(cls) if field.metadata.get("secret")}
    shown = dict(values)
    for name, value in values.items():
        child, named = (dataclass_of(kinds[name]), named_sections(kinds[name])) if name in kinds else (None, None)
        if named is not None and isinstance(value, dict):
            shown[name] = {own: _hide_marked(section, named) for own, section in value.items()}
        elif child is not None:
            shown[name] = _hide_marked(value, child)
        elif name not in kinds or (name in marked and isinstance(value, dict)):
            shown[name] = hide_secrets({name: value})[name]
        elif name in marked and isinstance(value, str) and not value.startswith("${"):
            shown[name] = _HIDDEN
    return shown


def hide_secrets(values: Any, key: str = "") -> Any:
    """Return nested values without the texts of keys and sections that name a secret.

    An API key becomes a reference to the environment, as in `public_yaml`.
    """
    if isinstance(values, dict):
        return {name: hide_secrets(v, key if _SECRET.search(key) else str(name)) for name, v in values.items()}
    if isinstance(values, list):
        return [hide_secrets(value, key) for value in values]
    if not isinstance(values, str) or not _SECRET.search(key):
        return values
    # References to the environment hide nothing.
    return values if values.startswith("${") else KEY_REFERENCE if key == "api_key" else _HIDDEN


def run_main(main: Callable[[list[str]], Any], argv: list[str] | None = None) -> typing.NoReturn:
    """Run the `main` of a command and exit with its code; print known errors without a traceback.

    Exits with 2 after an error that would come again and with 3 after a collapse (launchers then do not restart), with
    1 after other errors, and with 130 after Ctrl+C.
    """
    log_to_file()
    prepare_process()
    try:
        code = main(sys.argv[1:] if argv is None else argv)
    except AReaLiteError as error:
        print(clean(f"error: {error}"), file=sys.stderr, flush=True)
        code = COLLAPSED if isinstance(error, CollapseError) else 1
        raise SystemExit(REFUSED if isinstance(error, _PERMANENT) else code) from None
    except RuntimeError as error:
        if GROUP_TIMED_OUT not in str(error):
            raise
        logging.getLogger("arealite").info("a collective timed out", exc_info=True)
        text = (
            f"error: rank {os.environ.get('RANK', '0')} waited for another rank until the deadline "
            f"(collective_timeout_s of the trained model): {error}\n"
            "  Likely cause: that rank hangs or is very slow; the end of its log shows where"
        )
        print(clean(text), file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    finally:
        # Ctrl+C while Python exits ends the process, without a traceback of a library's exit function.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(code if isinstance(code, int) else 0)


def log_to_file() -> None:
    """Send log records to the launcher's log file; the console shows the table and the last error only.

    Without a launcher, warnings go to standard error. Both contain clean text only.
    """
    clean_process_output()
    path = os.environ.get(LOG_FILE_ENV)
    handler, form = logging.StreamHandler(), "%(message)s"
    if path is not None:
        handler, form = logging.FileHandler(path), "%(asctime)s %(levelname)s %(name)s: %(message)s"
        # A full disk must not print a traceback for each record.
        logging.raiseExceptions = False
        logging.getLogger("arealite").setLevel(logging.INFO)
    handler.setFormatter(CleanFormatter(form))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def read_sources(argv: list[str], cls: type | None) -> Iterator[tuple[str, DictConfig]]:
    """Yield (name of the source, nested values): all files in order, then all overrides."""
    files, overrides = [], []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config":
            path = next(arguments, None)
            if path is None:
                raise ConfigError(f"--config needs a file after it: {USAGE}")
            files.append(path)
        elif argument.startswith("--config="):
            files.append(argument.removeprefix("--config="))
        elif "=" in argument and not argument.startswith("-"):
            overrides.append(argument)
        else:
            near = nearest_text(argument, _OPTIONS, cutoff=0.75) or f"arguments are {USAGE}"
            raise ConfigError(f"cannot read the argument {argument!r}: {near}")
    if len(overrides) > MAX_OVERRIDES:
        raise ConfigError(f"{len(overrides)} overrides are given; at most {MAX_OVERRIDES}. Write a --config file")
    for path in files:
        yield path, _expand_home(_read_file(path, cls))
    for override in overrides:
        try:
            yield f"override {_shorten(override)!r}", _expand_home(_read_override(override, cls))
        except (OmegaConfBaseException, ValueError) as error:
            raise ConfigError(f"cannot read the override {_shorten(override)!r}: {_first_line(error)}") from error


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
    if not all(key.split(".")):
        raise ValueError("a part of its key is empty")
    if key.count(".") >= MAX_DEPTH:
        raise ValueError(f"its key has more than {MAX_DEPTH} parts")
    for name in key.split("."):
        kind = kind_inside(kind, name)
    # Text fields take the value as typed, unless it is null or quoted: `#1`, `a: b` and an empty value are no YAML.
    null = ("~", "null") if kind is str else ("", "~", "null")
    typed = without_null(kind) is str and text not in null and text[:1] not in ("'", '"')
    values = OmegaConf.create({})
    value = text if typed else read_yaml(text, kind)
    OmegaConf.update(values, key, value)
    # Selecting a text would resolve it, and it may refer to keys of other sources.
    if isinstance(value, dict) and get_origin(without_null(kind)) is dict:
        OmegaConf.select(values, key)._set_flag(_REPLACES, True)
    return values


def _read_file(path: str, cls: type | None) -> DictConfig:
    try:
        with open(path, encoding="utf-8") as file:
            # One more than is allowed: `read_yaml` says so.
            values = read_yaml(file.read(MAX_CHARACTERS + 1), cls)
        if not isinstance(values, dict | None):
            raise ValueError(f"it must hold `key: value` pairs at its top level, not a {type(values).__name__}")
        return OmegaConf.create(values or {})
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path} is not a valid configuration: {_first_line(error)}") from error


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _first_line(error: Exception) -> str:
    """Return an error's message; OmegaConf adds lines about its nodes, of which the first names the key."""
    key = getattr(error, "full_key", None)
    lines = str(getattr(error, "msg", None) or error).splitlines() or [type(error).__name__]
    return _shorten(f"{key}: {lines[0]}" if key else lines[0])


def _check_keys(values: DictConfig, cls: type, source: str, root: type, prefix: str = "") -> None:
    """Raise for the first key that the dataclass does not have. Free-form dicts may have any keys."""
    kinds = typing.get_type_hints(cls)
    for key in map(str, values):
        path = f"{prefix}{key}"
        if key not in kinds:
            raise ConfigError(f"unknown key {path!r} in {source}: {nearest_key(key, cls, prefix, root)}")
        child, named = dataclass_of(kinds[key]), named_sections(kinds[key])
        node: Any = values._get_node(key)
        expected = {list: ListConfig, dict: DictConfig}.get(typing.get_origin(without_null(kinds[key])))
        is_open = node._is_none() or node._is_interpolation() or node._is_missing()
        if expected is not None and not isinstance(node, expected) and not is_open:
            form = "[a, b]" if expected is ListConfig else "{a: b}"
            raise ConfigError(f"{path} in {source} must be {type_name(kinds[key])}: write it as {form}")
        if named is not None and isinstance(node, DictConfig) and not node._is_none():
            for name in map(str, node):
                _check_section(node, name, named, source, root, f"{path}.{name}")
        elif child is not None:
            _check_section(values, key, child, source, root, path)


def _check_section(values: DictConfig, key: str, cls: type, source: str, root: type, path: str) -> None:
    """Check the keys of one section of `values`."""
    node: Any = values._get_node(key)
    if OmegaConf.is_interpolation(values, key) or values[key] is None:
        return
    if not isinstance(node, DictConfig):
        inside = ", ".join(f"{path}.{field.name}" for field in dataclasses.fields(cls))
        raise ConfigError(f"{path} in {source} is a section, not one value: set {inside}")
    _check_keys(node, cls, source, root, f"{path}.")


def bad_value(error: OmegaConfBaseException, source: str, cls: type) -> ConfigError:
    """Return the error for a value that OmegaConf rejects: its key, the type it must have, and why."""
    key = error.full_key or "a value"
    kinds = {each.path: each.kind for each in keys_of(cls)}
    expected = f" (expected {kinds[key]})" if key in kinds else ""
    reason = _shorten(str(error.msg or error).splitlines()[0])
    return ConfigError(f"{key} in {source}{expected}: {reason}")


def _to_dataclass(node: Any, cls: type[T]) -> T:
    try:
        missing = sorted(OmegaConf.missing_keys(node))
        config = None if missing else OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise bad_value(error, "the merged configuration", cls) from error
    if missing:
        helps = {key.path: key.text for key in keys_of(cls)}
        lines = "".join(f"\n  {key}=…   {helps.get(key, '')}" for key in missing)
        raise ConfigError(f"values are missing; set them in a file or as key=value:{lines}")
    assert isinstance(config, cls)
    return config


def print_to_pipe(text: str) -> None:
    """Print a text. A reader that closes the pipe early (`--help | head`) is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Discard what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
