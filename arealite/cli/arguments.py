"""Options of the commands that are not configured by keys: one form of help and of errors.

The help of a command is the docstring of its module, its arguments and examples, for the width of the terminal.
"""

import argparse
from typing import NoReturn

from arealite.api.errors import ConfigError
from arealite.utils.config_help import fill_text, nearest_text


class ArgumentParser(argparse.ArgumentParser):
    """Reads the arguments of `arealite NAME`; a wrong one is a `ConfigError` with the nearest option."""

    def __init__(self, name: str, doc: str | None, *examples: str):
        text = "\n".join(["examples:", *(f"  {example}" for example in examples)])
        super().__init__(
            prog=f"arealite {name}",
            description=fill_text(doc or ""),
            epilog=text if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        head, _, unknown = message.partition("unrecognized arguments: ")
        near = "" if head or not unknown else nearest_text(unknown.split()[0], list(self._option_string_actions))
        raise ConfigError(f"{message}{f' ({near})' if near else ''}\n{self.format_usage().strip()}")
