"""Runs a Python program on a small disk or with few open files, in a process that has imported torch already.

`python -m tests.chaos.within disk=FOLDER:SIZE -m MODULE …`: only the program and what it starts see the small disk.
`python -m tests.chaos.within files=COUNT -m MODULE …`: the hard limit on open files.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys

from tests.machines import run_program

PROGRAM = ("-m", "tests.chaos.within")
_CLONE_NEWNS = 0x20000


def why_no_disk() -> str:
    """Return why a small disk cannot be made here; empty if it can."""
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    return f"mounting a small disk is not permitted here: {tried.stderr.strip()}" if tried.returncode else ""


def _mount_disk(folder: str, size: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    # The folder may be below the new disk.
    os.chdir(os.getcwd())


if __name__ == "__main__":
    kind, _, value = sys.argv[1].partition("=")
    if kind == "disk":
        _mount_disk(*value.rsplit(":", 1))
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(value), int(value)))
    run_program(sys.argv[2:])
