"""Code of users that a configuration names as `package.module:name`: workflows, trainers, rewards."""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from arealite.api.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]


def load_object(name: str, key: str) -> Callable[..., Any]:
    """Import the class or function that the configuration `key` names; raises `ConfigError`.

    Modules in the working directory are found too.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{key}={name!r} does not name code: write package.module:Class, such as my_game:Workflow")
    # Ranks are started as a script, whose folder and not the working directory is searched. Beside a loop that ships
    # are modules whose names (`tasks`, `custom`, `rw`) users have too.
    sys.path[:] = [path for path in sys.path if not Path(path).is_relative_to(_PACKAGE)]
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{key}={name}: there is no module {error.name!r}. Run from the folder that contains it, install "
                "it, or add its folder to PYTHONPATH"
            ) from error
        raise ConfigError(f"{key}={name}: importing {module_name} failed: {error}") from error
    # A module may raise anything while it is imported.
    except Exception as error:
        raise ConfigError(f"{key}={name}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(
            f"{key}={name}: the module {module_name} has no {attribute!r}{suggest(attribute, vars(module))}"
        )
    if not callable(found):
        raise ConfigError(f"{key}={name} is a {type(found).__name__}; it must be a class or a function")
    return found


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown `name`: what was meant, if that can be guessed."""
    module, _, attribute = name.rpartition(".")
    near = [f"{module}:{attribute}"] if module else difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def call_with(
    target: Callable[..., Any], name: str, arguments: Mapping[str, Any], offered: Mapping[str, Any], key: str
) -> Any:
    """Call `target` with all `arguments`, and those of `offered` that it takes."""
    return target(**accepted(target, name, arguments, offered, key))


def accepted(
    target: Callable[..., Any], name: str, arguments: Mapping[str, Any], offered: Mapping[str, Any], key: str
) -> dict[str, Any]:
    """Return what `call_with` passes; raises `ConfigError` if arguments are missing or unknown."""
    named, takes_all = _parameters(target)
    unknown = sorted(arguments.keys() - named.keys()) if not takes_all else []
    if unknown:
        near = difflib.get_close_matches(unknown[0], named, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; it takes {', '.join(named) or 'none'}"
        raise ConfigError(f"{key}={name} takes no argument {unknown[0]!r} ({key}_args){hint}")
    given = {k: v for k, v in offered.items() if k in named} | dict(arguments)
    missing = [p.name for p in named.values() if p.default is p.empty and p.name not in given]
    if missing:
        raise ConfigError(
            f"{key}={name} needs {', '.join(missing)}: set {key}_args.{missing[0]}=… (it gets by name: "
            f"{', '.join(offered) or 'nothing'})"
        )
    return given


def _parameters(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the named parameters, and whether any others are taken too.

    A constructor that passes `**kwargs` on takes those of its base class.
    """
    inits = (
        [vars(cls)["__init__"] for cls in target.__mro__ if "__init__" in vars(cls)] if inspect.isclass(target) else []
    )
    named: dict[str, inspect.Parameter] = {}
    for function in inits or [target]:
        own = list(inspect.signature(function).parameters.values())[bool(inits) :]
        named = {p.name: p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} | named
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            return named, False
    return named, True
