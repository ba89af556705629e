"""Check mode of scripts, for `--dry-run`: a script runs up to where its engines would start.

A launcher sets `CHECK_SCRIPT_ENV` for one child process. In it `make_engine` returns an `UnstartedEngine`, and the
process ends at the script's `Run`, or at an engine that it makes without `make_engine`. What is wrong with packages,
tokenizer, data and workflow has been raised by then, as in a real run. Nothing is downloaded.
"""

import os
from typing import Any

# Set by a launcher.
CHECK_SCRIPT_ENV = "AREALITE_CHECK_SCRIPT"
# Start of the line that says why the rest was not checked.
UNCHECKED = "not checked further: "


def is_check() -> bool:
    """Whether this process only checks its script."""
    return CHECK_SCRIPT_ENV in os.environ


def end_check(unchecked: str = "") -> None:
    """End the process if it only checks its script: nothing wrong was found.

    `unchecked` says what could not be checked.
    """
    if is_check():
        if unchecked:
            print(f"{UNCHECKED}{unchecked}", flush=True)
        raise SystemExit(0)


class UnstartedEngine:
    """Stands in for an engine in check mode: its methods do nothing and return None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None
