"""The `arealite` command: one entry for all command-line tools of the package.

Imports a tool only when it is called, so that `arealite --help` and `arealite --version` take no time.
"""

import difflib
import importlib
import sys
from typing import NoReturn

from arealite import __version__
from arealite.api.errors import ConfigError
from arealite.utils.config import run_main

# Module and one line of help of each command.
COMMANDS = {
    "run": ("arealite.cli.main", "train or evaluate from a configuration alone"),
    "train": ("arealite.cli.main", "the same as run"),
    "launch local": ("arealite.launcher.local", "run a script on this machine"),
    "launch torchrun": ("arealite.launcher.torchrun", "run a script with torchrun on one or several machines"),
    "launch ray": ("arealite.launcher.ray", "run a script on a Ray cluster"),
    "launch slurm": ("arealite.launcher.slurm", "run a script on a Slurm cluster"),
    "evaluate": ("arealite.cli.evaluate", "evaluate the checkpoints of a run, also while it goes on"),
    "plan": ("arealite.cli.plan", "print what a configuration would start, and where"),
    "serve": ("arealite.cli.serve", "serve a model over HTTP with the embedded engine"),
    "dashboard": ("arealite.cli.dashboard", "show runs in a browser, during a run and afterwards"),
    "report": ("arealite.cli.report", "show steps, times and rollouts of a run"),
    "doctor": ("arealite.cli.doctor", "check versions, devices and free space of this machine"),
}


def usage() -> str:
    """Return the help text: one line per command."""
    lines = [f"  arealite {name:<16} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: arealite COMMAND [arguments]", "", *lines, "", "arealite COMMAND --help explains a command."]
    )


def run_command(argv: list[str]) -> int | None:
    """Run the command that `argv` names; returns its exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"arealite {__version__}")
        return 0
    size = 2 if argv[0] == "launch" else 1
    name = " ".join(argv[:size])
    if name not in COMMANDS:
        launchers = [command for command in COMMANDS if command.startswith("launch ")]
        near = launchers if name == "launch" else difflib.get_close_matches(name, COMMANDS, n=1) or ["run"]
        raise ConfigError(f"unknown command {name!r}: did you mean {' or '.join(near)}? `arealite --help` lists all")
    return importlib.import_module(COMMANDS[name][0]).main(argv[size:])


def main() -> NoReturn:
    """Entry point of the console script."""
    run_main(run_command, sys.argv[1:])


if __name__ == "__main__":
    main()
