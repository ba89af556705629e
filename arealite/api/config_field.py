"""Declares configuration fields (help text, limits) and checks sections.

Used by the config dataclasses only. Every number has a finite range, so NaN and infinity are never accepted. A section
yields what is wrong with several fields together in its `problems`.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, cast

from arealite.api.errors import ConfigError

# OmegaConf's mark of a value that must be set. Not imported: `api` and `weights` also run inside vLLM's environment.
MISSING: Any = "???"


@dataclass(frozen=True)
class Range:
    """The finite range in which a number must lie; `above` excludes `low` itself."""

    low: float
    high: float = 10**9
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"larger than {self.low} and at most {self.high}" if self.above else f"from {self.low} to {self.high}"


NOT_NEGATIVE, POSITIVE, AT_LEAST_1, SHARE = Range(0), Range(0, above=True), Range(1), Range(0, 1)
ANY_NUMBER, SEED, PORT = Range(-(10**9)), Range(0, 2**32 - 1), Range(0, 65535)
# A deadline: up to three years.
SECONDS = Range(0, 10**8, above=True)
# Unicode categories: lone surrogates; those, control characters and line breaks.
_SURROGATES = ("Cs",)
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")


def help_field(
    text: str, default: Any = MISSING, limits: Range | None = None, any_text: bool = False, secret: bool = False
) -> Any:
    """Make a dataclass field with a line of help and a range.

    A callable default is a factory (a class or lambda).

    `any_text` allows control characters, for text that never reaches a command line or file name. A `secret` is hidden
    wherever a configuration is shown or kept for others to read; of a section, what its names call a secret.
    """
    metadata = {"help": text, "limits": limits, "any_text": any_text, "secret": secret}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def choice_field(text: str, *words: str) -> Any:
    """Make a field that is one of these words, by default the first."""
    return field(default=words[0], metadata={"help": text, "words": words})


class Section:
    """Base of config dataclasses. A subclass with conditions on several fields overrides `problems`."""

    def problems(self) -> Iterator[str]:
        """Yield a message for each combination of values that cannot work."""
        yield from ()

    def check(self) -> None:
        """Raise a ConfigError for the first invalid value, here or in a nested section."""
        for each in fields(self):  # type: ignore[arg-type] - subclasses are dataclasses
            name, value = each.name, getattr(self, each.name)
            words, limits = each.metadata.get("words"), each.metadata.get("limits")
            sections = value if isinstance(value, dict) else {}
            if hasattr(value, "check"):
                check_section(name, value)
            elif any(hasattr(inner, "check") for inner in sections.values()):
                for key, inner in sections.items():
                    check_text(name, key)
                    check_section(f"{name}.{key}", inner)
            elif words is not None:
                if value not in words:
                    raise ConfigError(f"{name} is {value!r}; use one of {words}")
            elif limits is not None and value is not None:
                for number in cast(list[Any], value) if isinstance(value, list) else [value]:
                    if not isinstance(number, Real) or number not in limits:
                        raise ConfigError(f"{name} must be a number {limits}, got {number!r}")
            else:
                is_any = each.metadata.get("any_text") or "help" not in each.metadata
                check_text(name, value, _SURROGATES if is_any else _CONTROLS)
        for problem in self.problems():
            raise ConfigError(problem)


def check_section(name: str, section: Any) -> None:
    """Check a section; its error messages get the section's name in front."""
    try:
        section.check()
    except ConfigError as error:
        message = str(error)
        is_key = re.split(r"\W", message, maxsplit=1)[0] in vars(section)
        prefix = "" if message.startswith(f"{name}.") else f"{name}." if is_key else f"{name}: "
        raise ConfigError(prefix + message) from error


def check_text(name: str, value: Any, refused: tuple[str, ...] = _CONTROLS) -> None:
    """Raise for a character of the refused Unicode categories in a text, list or dict.

    Configuration becomes command lines, file names and lines of batch scripts, where control characters have a meaning.
    No file can hold lone surrogates.
    """
    if isinstance(value, str):
        found = next((c for c in value if unicodedata.category(c) in refused), None)
        if found is not None:
            raise ConfigError(f"{name} must not contain the control character {found!r}, got {value[:200]!r}")
    elif isinstance(value, dict):
        for key, inner in cast(dict[Any, Any], value).items():
            check_text(name, str(key), refused)
            check_text(f"{name}.{key}", inner, refused)
    elif isinstance(value, list):
        for inner in cast(list[Any], value):
            check_text(name, inner, refused)
