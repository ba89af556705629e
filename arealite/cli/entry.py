"""The `arealite` command: one entry for all command-line tools of the package.

Imports a tool only when it is called, and nothing at all for its own help, so that `arealite --help`, `--version` and
completions take no time.
"""

import difflib
import importlib
import os
import select
import sys
from typing import NamedTuple, NoReturn

from arealite import __version__
from arealite.api.errors import AReaLiteError, ConfigError

# Exit code of a command whose output is read no further: as if SIGPIPE had ended it.
_READER_GONE = 141


class Command(NamedTuple):
    """A command: its module (its `main(argv)` runs it), one line of help, and where help lists it."""

    module: str
    text: str
    group: str


_RUN, _LOOK, _SET_UP = "train and serve", "look at runs", "set up"
COMMANDS = {
    "train": Command("arealite.cli.main", "train from a configuration alone", _RUN),
    "eval": Command("arealite.cli.eval", "evaluate a model from a configuration alone", _RUN),
    "serve": Command("arealite.cli.serve", "serve a model over HTTP with the embedded engine", _RUN),
    "launch local": Command("arealite.launcher.local", "run a script on this machine", _RUN),
    "launch torchrun": Command("arealite.launcher.torchrun", "run a script with torchrun", _RUN),
    "launch ray": Command("arealite.launcher.ray", "run a script on a Ray cluster", _RUN),
    "launch slurm": Command("arealite.launcher.slurm", "run a script on a Slurm cluster", _RUN),
    "dashboard": Command("arealite.cli.dashboard", "show runs in a browser, during a run and afterwards", _LOOK),
    "report": Command("arealite.cli.report", "show steps, times and rollouts of a run", _LOOK),
    "replay": Command("arealite.cli.replay", "run a run again and find the first bit that differs", _LOOK),
    "evaluate": Command("arealite.cli.evaluate", "evaluate the checkpoints of a run, also while it goes on", _LOOK),
    "init": Command("arealite.cli.init", "write a small project that trains as it is", _SET_UP),
    "config": Command("arealite.cli.config", "show a configuration with origins, its help, differences", _SET_UP),
    "plan": Command("arealite.cli.plan", "predict a run, or print what a script would start", _SET_UP),
    "completion": Command("arealite.cli.completion", "print a script for the completion of your shell", _SET_UP),
    "doctor": Command("arealite.cli.doctor", "say why a run hangs or died; without one, check this machine", _SET_UP),
}
_EXAMPLES = """examples:
  arealite train trainer.grpo.actor.path=Qwen/Qwen2-0.5B --dry-run
  arealite init my-task
  arealite report runs/arealite/grpo

arealite COMMAND --help explains a command."""


def usage() -> str:
    """Return the help text: one line per command, in groups."""
    lines = ["usage: arealite COMMAND [arguments]", "       arealite --version"]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{group}:"]
        lines += [f"  {name:<16} {command.text}" for name, command in COMMANDS.items() if command.group == group]
    return "\n".join([*lines, "", _EXAMPLES])


def run_command(argv: list[str]) -> int | None:
    """Run the command that `argv` names; returns its exit code."""
    if argv[:1] == ["help"] and len(argv) > 1:
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"arealite {__version__}")
        return 0
    launchers = [name for name in COMMANDS if name.startswith("launch ")]
    if argv[0] == "launch" and argv[1:] in (["-h"], ["--help"]):
        print("usage: arealite launch LAUNCHER SCRIPT.py [--config FILE.yaml]... [key=value]... [--dry-run]\n")
        print("\n".join(f"  {name:<16} {COMMANDS[name].text}" for name in launchers))
        return 0
    size = 2 if argv[0] == "launch" else 1
    name = " ".join(argv[:size])
    if name == "launch":
        raise ConfigError(
            f"launch needs a launcher and a script: {', '.join(f'`arealite {each}`' for each in launchers)}"
        )
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=2)
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"unknown command {name!r}: {guess}`arealite --help` lists all")
    return importlib.import_module(COMMANDS[name].module).main(argv[size:])


def _run_for_reader(argv: list[str]) -> int | None:
    """Run a command; end quietly if the reader of its output (such as `head`) has gone."""
    try:
        code = run_command(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        # It may also be the pipe of another process, which is an error.
        if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
            raise
        # What is left is written nowhere at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
    except OSError as error:
        if error.filename is not None and _reads_runs(argv):
            raise AReaLiteError(
                f"cannot use {error.filename}: {error.strerror}. Look at its owner, its permissions and its disk"
            ) from error
        if error.filename is not None or _can_write():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        text = f"error: cannot write the output: {error.strerror}. Free space there, or send the output elsewhere"
        print(text, file=sys.stderr, flush=True)
        return 1


def _reads_runs(argv: list[str]) -> bool:
    """Whether a command looks at files of runs, which may belong to another user."""
    return argv[0] == "config" or (argv[0] in COMMANDS and COMMANDS[argv[0]].group == _LOOK)


def _can_write() -> bool:
    """Whether standard output takes a line."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def main() -> NoReturn:
    """Entry point of the console script."""
    argv = sys.argv[1:]
    if argv and argv[0] in ("-h", "--help", "-V", "--version"):
        raise SystemExit(_run_for_reader(argv))
    importlib.import_module("arealite.utils.config").run_main(_run_for_reader, argv)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    main()
