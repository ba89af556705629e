"""Stacks of the run's processes on this machine.

A process that has registered a handler writes its stacks into a file in memory (`utils.status.memory`). For others
py-spy is used, if it is installed. A stopped process writes nothing until it goes on: it is not asked.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path

from arealite.doctor.case import Case, Process
from arealite.doctor.proc import find_busiest_thread
from arealite.utils.status.memory import STACK_SIGNAL

_DUMP_TIMEOUT_S, _PY_SPY_TIMEOUT_S = 2.0, 10.0
_MAX_TEXT = 40_000
# No thread of a process whose status is older runs Python code but one, which keeps the interpreter lock.
_SILENCE_S = 2.0


def read_stacks(case: Case) -> None:
    """Ask all processes of this machine at once, then read what they wrote."""
    others = sorted({process.host for process in case.processes if not process.is_local})
    if others:
        case.notes.append(
            f"stacks of processes on {', '.join(others)} cannot be read from here: run `arealite doctor` there"
        )
    asked = [process for process in case.processes if _ask(process)]
    deadline = time.monotonic() + _DUMP_TIMEOUT_S
    for process in asked:
        process.stacks = _wait_for_dump(process, deadline)
    for process in case.processes:
        if process.proc and not process.stacks and process.proc.state not in "Tt":
            process.stacks = _py_spy(process.pid)


def _file(process: Process) -> Path:
    return Path(f"/proc/{process.pid}/fd/{process.status.get('stacks_fd')}")


def _ask(process: Process) -> bool:
    """Send the signal if the process handles it: any other process would be ended by it."""
    if process.proc is None or process.proc.state in "Tt" or not _handles_signal(process.pid):
        return False
    with contextlib.suppress(OSError):
        os.truncate(_file(process), 0)
        is_hanging = process.is_live and process.age_s > _SILENCE_S
        if not (is_hanging and _ask_thread(process.pid, find_busiest_thread(process.pid, STACK_SIGNAL))):
            os.kill(process.pid, STACK_SIGNAL)
        return True
    return False


def _ask_thread(pid: int, thread: int) -> bool:
    """Send the signal to one thread: stacks name it as the current one, otherwise the main thread."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    return tgkill is not None and tgkill(pid, thread, int(STACK_SIGNAL)) == 0


def _handles_signal(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration, ValueError):
        return False
    return bool(caught >> (STACK_SIGNAL - 1) & 1)


def _wait_for_dump(process: Process, deadline: float) -> str:
    """Return the stacks once they stop growing; empty after the deadline."""
    text = ""
    while time.monotonic() < deadline:
        try:
            now = _file(process).read_text(errors="replace")
        except OSError:
            return text[:_MAX_TEXT]
        if now and now == text:
            return text[:_MAX_TEXT]
        text = now
        time.sleep(0.02)
    return text[:_MAX_TEXT]


def _py_spy(pid: int) -> str:
    command = shutil.which("py-spy")
    if command is None:
        return ""
    try:
        arguments = [command, "dump", "--pid", str(pid)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_PY_SPY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[:_MAX_TEXT] if done.returncode == 0 else ""
