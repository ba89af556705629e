"""How a configuration field is declared and a condition required; used by the config dataclasses only."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

from omegaconf import MISSING

from arealite.api.errors import ConfigError


def help_field(text: str, default: Any = MISSING, **kwargs: Any) -> Any:
    """A dataclass field with its line of help; mutable defaults are given as a factory (a class or lambda)."""
    if callable(default):
        return field(default_factory=default, metadata={"help": text, **kwargs})
    return field(default=default, metadata={"help": text, **kwargs})


def require(condition: Any, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def require_within(section: Any, bounds: dict[str, tuple[float, float]], prefix: str = "") -> None:
    """Numbers of a section that must lie in a range; null ones are off."""
    for key, (low, high) in bounds.items():
        value = getattr(section, key)
        limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        require(
            value is None or low <= value <= high, f"{prefix}{key} must be {limits}, got {value}"
        )


def require_one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    require(value in choices, f"{name} is {value!r}; use one of {choices}")
