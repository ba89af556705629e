"""The `arealite` command."""

import subprocess
import sys

import pytest

from arealite import __version__
from arealite.api.errors import ConfigError
from arealite.cli.entry import COMMANDS, run_command

QUICK = ("plan", "report", "launch local", "launch torchrun", "launch ray", "launch slurm")
HELP = f"""
import importlib, sys
from arealite.cli.entry import COMMANDS, run_command
run_command(["--help"])
for name in {QUICK}:
    importlib.import_module(COMMANDS[name][0])
sys.exit("torch" in sys.modules)
"""


def test_help_and_commands_that_compute_nothing_do_not_import_torch():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"arealite {name} " in done.stdout for name in COMMANDS)


def test_version(capsys):
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"arealite {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["launch", "local", "--help"], "usage: python -m arealite.launcher.local SCRIPT.py"),
        (["plan", "--help"], "usage: python -m arealite.cli.plan SCRIPT.py"),
        (["doctor", "--help"], "python -m arealite.cli.doctor"),
    ],
)
def test_arguments_after_the_command_go_to_it(argv, shown, capsys):
    assert run_command(argv) == 0
    assert shown in capsys.readouterr().out


def test_every_command_has_a_main():
    for module, _ in COMMANDS.values():
        assert callable(__import__(module, fromlist=["main"]).main)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serv"], "did you mean serve"),
        (["launch"], "launch local or launch torchrun"),
        (["launch", "rey"], "launch ray"),
    ],
)
def test_an_unknown_command_names_the_nearest(argv, message):
    with pytest.raises(ConfigError, match=message):
        run_command(argv)
