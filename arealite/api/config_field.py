"""How a configuration is declared: a field with its line of help and its limits, and the `check` of a section.

Used by the config dataclasses only. A condition on several fields is a `require` in the section's own `check`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any

from omegaconf import MISSING

from arealite.api.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Where a number must lie; `above` leaves `low` itself out."""

    low: float
    high: float = inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.high < inf:
            mark = "in ({:g}, {:g}]" if self.above else "from {:g} to {:g}"
            return mark.format(self.low, self.high)
        if self.above:
            return f"larger than {self.low:g}" if self.low else "positive"
        return f"at least {self.low:g}"


NOT_NEGATIVE, POSITIVE, AT_LEAST_1, SHARE = Range(0), Range(0, above=True), Range(1), Range(0, 1)


def help_field(text: str, default: Any = MISSING, limits: Range | None = None) -> Any:
    """A dataclass field with its line of help and its range; mutable defaults are given as a factory (a class or lambda)."""
    metadata = {"help": text, "limits": limits}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def choice_field(text: str, *words: str) -> Any:
    """A field that is one of these words, the first by default."""
    return field(default=words[0], metadata={"help": text, "words": words})


def require(condition: Any, message: str) -> None:
    if not condition:
        raise ConfigError(message)


class Section:
    """Base of config dataclasses. A subclass with conditions of its own extends `check`."""

    def check(self) -> None:
        """Raise a ConfigError for the first value outside its limits, here or in a section inside."""
        for each in fields(self):  # type: ignore[arg-type] - subclasses are dataclasses
            name, value = each.name, getattr(self, each.name)
            words, limits = each.metadata.get("words"), each.metadata.get("limits")
            if hasattr(value, "check"):
                check_section(name, value)
            elif words is not None:
                require(value in words, f"{name} is {value!r}; use one of {words}")
            elif limits is not None and value is not None:
                require(value in limits, f"{name} must be {limits}, got {value}")


def check_section(name: str, section: Any) -> None:
    """Check a section; what is wrong is told with the section's name."""
    try:
        section.check()
    except ConfigError as error:
        told = str(error)
        is_key = re.split(r"\W", told, maxsplit=1)[0] in vars(section)
        prefix = "" if told.startswith(f"{name}.") else f"{name}." if is_key else f"{name}: "
        raise ConfigError(prefix + told) from error
