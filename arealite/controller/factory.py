"""`make_engine`, with which scripts make engines so that they also run in controller mode.

To a type checker the result is the engine, so its methods can be followed from the script.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from arealite.api.errors import ConfigError
from arealite.controller.driver import current_driver

P = ParamSpec("P")
T = TypeVar("T")


def make_engine(cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `cls(*args, **kwargs)`, or in the driver of controller mode a controller of its ranks.

    A controller has the methods and attributes of the engine. It is no instance of `cls`.
    """
    driver = current_driver()
    if driver is None:
        return cls(*args, **kwargs)
    if not isinstance(cls, type):
        raise ConfigError(
            f"make_engine needs an engine class in controller mode, and got {cls!r}: pass the class itself"
        )
    return cast(T, driver.place(cls, args, kwargs))
