"""Imports functions and classes of users that a configuration names as `package.module:name`."""

import importlib
import os
import sys
from typing import Any

from arealite.api.errors import ConfigError


def import_named(where: str, key: str) -> Any:
    """Return what `package.module:name` names; modules in the current folder are found too.

    `key` is the configuration key, for errors (`ConfigError`).
    """
    module, _, name = where.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"cannot import the module of {key}={where}: {error}") from error
    if not name.isidentifier() or not hasattr(found, name):
        raise ConfigError(f"{key}={where}: the module {module} has no {name!r}")
    return getattr(found, name)
