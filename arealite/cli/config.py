"""Shows and compares configurations.

    arealite config show [TARGET] [--set] [--config FILE.yaml]… [key=value]…    values, each with its origin
    arealite config help [TARGET] [PART]                                       keys, as `--help` of a run shows them
    arealite config diff A B                                                   two runs, or two files

TARGET is a script (SCRIPT.py), a run directory, or one of train (the default: what `arealite train` reads), grpo, sft,
rw, dpo, eval and serve. `show` checks the configuration like a run does, and prints YAML that `--config` reads; with
--set only values that are not defaults. `diff` exits with 1 if there are differences. Only reads.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from arealite.api.cli_args import DPOConfig, EvalConfig, GRPOConfig, RWConfig, ServerConfig, SFTConfig
from arealite.api.errors import ConfigError
from arealite.cli.main import HELP, MainConfig
from arealite.launcher.launch_config import find_config_class, resolve_config
from arealite.utils.config import hide_secrets, load_config, load_plain, print_to_pipe, read_sources, run_main, to_yaml
from arealite.utils.config_help import fill_text, help_text, nearest_text
from arealite.utils.rundir import RunDir

CLASSES: dict[str, type] = {
    "train": MainConfig,
    "grpo": GRPOConfig,
    "sft": SFTConfig,
    "rw": RWConfig,
    "dpo": DPOConfig,
    "eval": EvalConfig,
    "serve": ServerConfig,
}
ACTIONS = ("show", "help", "diff")
_EXAMPLES = """examples:
  arealite config show --config run.yaml seed=2
  arealite config show train.py --set --config config.yaml
  arealite config help actor
  arealite config diff runs/gsm8k/trial0 runs/gsm8k/trial1"""
_USAGE = "usage: arealite config show|help|diff ..."
# Where the origin of a value is written.
_COMMENT_COLUMN = 56


def main(argv: list[str]) -> int:
    action = argv[0] if argv else ""
    if action in ("", "-h", "--help") or (action in ("show", "diff") and {"-h", "--help"} & set(argv)):
        print(f"{_USAGE}\n\n{fill_text(__doc__ or '')}\n\n{_EXAMPLES}")
        return 0 if action else 2
    if action == "show":
        print_to_pipe("\n".join(show(argv[1:])))
        return 0
    if action == "help":
        return _help([word for word in argv[1:] if word not in ("-h", "--help")])
    if action == "diff":
        return _diff(argv[1:])
    raise ConfigError(f"unknown action {action!r}: {nearest_text(action, ACTIONS) or 'use show, help or diff'}")


def show(argv: list[str]) -> list[str]:
    """Return the lines of `config show`."""
    only_set = "--set" in argv
    argv = [argument for argument in argv if argument != "--set"]
    target = argv[0] if argv and not _is_option(argv[0]) else "train"
    rest = argv[1:] if argv and not _is_option(argv[0]) else argv
    if Path(target).is_dir():
        values, origins = _read_run(target, rest)
    else:
        cls = _class_of(target)
        text = resolve_config(target, rest) if target.endswith(".py") else to_yaml(load_config(rest, cls or MainConfig))
        values: Any = OmegaConf.to_container(OmegaConf.create(text))
        origins = {}
        for source, part in read_sources(rest, cls):
            name = "command line" if source.startswith("override ") else source
            origins |= dict.fromkeys(flatten(OmegaConf.to_container(part)), name)
    return list(_yaml_lines(hide_secrets(values), origins, only_set))


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested values by path; lists and empty sections are values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        found |= flatten(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return found


def _is_option(argument: str) -> bool:
    return argument.startswith("-") or "=" in argument


def _class_of(target: str) -> type | None:
    """Return the config class of a target; None for a script with a class of its own."""
    if target.endswith(".py"):
        return find_config_class(target)
    if target not in CLASSES:
        near = nearest_text(target, list(CLASSES)) or f"use one of {', '.join(CLASSES)}"
        raise ConfigError(f"{target!r} is not a script, run directory or kind of configuration: {near}")
    return CLASSES[target]


def _read_run(folder: str, argv: list[str]) -> tuple[Any, dict[str, str]]:
    """Return the values of a run, and which of them differ from the default: a run writes all of them."""
    if argv:
        raise ConfigError(f"the configuration of a run does not change: leave {argv[0]!r} out")
    path = _config_file(folder)
    values: Any = _read_file(path)
    classes = (GRPOConfig, DPOConfig, SFTConfig, EvalConfig)
    cls = next((c for c in classes if values.keys() <= vars(c)["__dataclass_fields__"].keys()), None)
    defaults = {} if cls is None else flatten(OmegaConf.to_container(OmegaConf.structured(cls)))
    missing = object()
    changed = [key for key, value in flatten(values).items() if defaults.get(key, missing) != value]
    return values, dict.fromkeys(changed, path.name)


def _config_file(where: str) -> Path:
    path = RunDir(where).config_path if Path(where).is_dir() else Path(where)
    if not path.is_file():
        raise ConfigError(f"there is no configuration at {where}: give a run directory or a YAML file")
    return path


def _read_file(path: Path) -> Any:
    return OmegaConf.to_container(load_plain(["--config", str(path)]))


def _yaml_lines(values: Any, origins: dict[str, str], only_set: bool, prefix: str = "") -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            inner = list(_yaml_lines(value, origins, only_set, f"{path}."))
            yield from [f"{indent}{key}:", *inner] if inner else []
            continue
        origin = _origin(path, origins)
        if only_set and origin == "default":
            continue
        text = _yaml_value(value)
        yield f"{f'{indent}{key}: {text}':<{_COMMENT_COLUMN}}  # {origin}"


def _origin(path: str, origins: dict[str, str]) -> str:
    """Return the origin of a value, or of the section around it."""
    while path not in origins and "." in path:
        path = path.rpartition(".")[0]
    return origins.get(path, "default")


def _yaml_value(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 20)
    return text.removesuffix("\n...\n").strip()


def _help(argv: list[str]) -> int:
    """Print keys: `[TARGET] [PART]`."""
    target = ""
    if argv and (argv[0].endswith(".py") or argv[0] in CLASSES):
        target, *argv = argv
    if len(argv) > 1:
        raise ConfigError(f"config help takes a target and a part, not {argv[1]!r} too")
    part = argv[0] if argv else ""
    if target.endswith(".py") and find_config_class(target) is None:
        # A class of the script's own: the script shows it.
        resolve_config(target, ["--help", *argv])
        return 0
    cls = _class_of(target) if target else MainConfig
    print_to_pipe(help_text(cls or MainConfig, part, HELP if cls is MainConfig else None))
    return 0


def _diff(argv: list[str]) -> int:
    """Print the values in which two configurations differ; returns 1 if there are any."""
    if len(argv) != 2:
        raise ConfigError(f"config diff takes two run directories or files, got {len(argv)}")
    paths = [_config_file(where) for where in argv]
    sides = []
    for path in paths:
        values = hide_secrets(_read_file(path))
        sides.append({key: _yaml_value(value) for key, value in flatten(values).items()})
    first, second = sides
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    rows = [("key", *argv), *((key, first.get(key, "(absent)"), second.get(key, "(absent)")) for key in keys)]
    if keys:
        print_to_pipe("\n".join(_columns(rows)))
    return 1 if keys else 0


def _columns(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    """Align rows; values too long for the terminal stand on lines of their own."""
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    is_table = sum(widths) + 4 <= shutil.get_terminal_size((160, 24)).columns
    for key, left, right in rows:
        if is_table:
            yield f"{key:<{widths[0]}}  {left:<{widths[1]}}  {right}".rstrip()
        else:
            yield from (key, f"  - {left}", f"  + {right}")


if __name__ == "__main__":
    run_main(main)
