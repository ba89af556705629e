"""Runs programs that import torch as forks of `tests/warm_python.py`, whoever starts them.

Python imports this module when it starts with this folder in PYTHONPATH. Ray, Slurm and torchrun start workers,
servers and ranks by themselves: with `environment()` of `tests/warm_start/__init__.py` in theirs, those save the
imports. The started process stays, passes signals on, and ends with the exit code of the fork; if it is killed, the
fork is killed.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("arealite.cli.serve", "arealite.cli.main", "torch.distributed.run")
FOLDERS = (str(ROOT / "examples"), str(ROOT / "arealite" / "trainer"))
# A test names one more folder of scripts by this variable.
FOLDER_ENV = "AREALITE_TESTS_FORKED_FOLDER"
RAY_WORKER = os.path.join("ray", "_private", "workers", "default_worker.py")


def find_command(argv: list[str]) -> list[str] | None:
    """Return what follows the interpreter and its flags, if it is to run as a fork."""
    position = next((i for i, part in enumerate(argv[1:], 1) if part in ("-c", "-m") or part[0] != "-"), None)
    if position is None or argv[position] == "-c":
        return None
    command = argv[position:]
    if command[0] == "-m":
        return command if command[1] in MODULES else None
    path = os.path.abspath(command[0])
    folders = (*FOLDERS, *filter(None, [os.environ.get(FOLDER_ENV)]))
    return command if path.startswith(folders) or path.endswith(RAY_WORKER) else None


if "AREALITE_TESTS_WARM_PYTHON" in os.environ and (command := find_command(sys.orig_argv)):
    sys.path.insert(0, str(ROOT))
    from tests import warm_python

    # A launcher starts programs as forks by this module. Workers of Ray and torchrun have threads.
    starts_others = {"arealite.cli.main", "torch.distributed.run"} & set(command[:2])
    warm_python.run_in_place(command, can_fork=not starts_others and RAY_WORKER not in command[0])
