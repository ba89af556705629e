"""Reads /proc: state, memory and processor time of processes. None where a process is gone."""

from pathlib import Path
from typing import NamedTuple

import psutil

from arealite.doctor.case import Proc

# Start times are rounded.
_SAME_S = 1.0


class Usage(NamedTuple):
    """What a process has used so far."""

    cpu_s: float
    major_faults: int


def is_same_process(pid: int, started: float) -> bool:
    """Whether a process still lives, and is no other one with its pid."""
    try:
        return abs(psutil.Process(pid).create_time() - started) < _SAME_S
    except (psutil.Error, ValueError, OverflowError):
        return False


def read_proc(pid: int, started: float) -> Proc | None:
    """Return what the kernel says; None if the process is gone or a zombie."""
    if not is_same_process(pid, started):
        return None
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        state = text[text.rindex(")") + 2]
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        limits = Path(f"/proc/{pid}/limits").read_text()
    except (OSError, ValueError):
        return None
    if state in "ZX":
        return None
    address_space = next(line.split()[3] for line in limits.splitlines() if line.startswith("Max address space"))
    return Proc(
        state,
        rss_bytes=_kib(status.get("VmRSS", "")),
        swap_bytes=_kib(status.get("VmSwap", "")),
        virtual_bytes=_kib(status.get("VmSize", "")),
        virtual_limit=int(address_space) if address_space.isdigit() else None,
    )


def read_usage(pid: int) -> Usage:
    """Return the usage of a process; zeros if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return Usage(0.0, 0)
    fields = text[text.rindex(")") + 2 :].split()
    return Usage((int(fields[11]) + int(fields[12])) / 100.0, int(fields[9]))


def _kib(text: str) -> int:
    words = text.split()
    return int(words[0]) * 1024 if words else 0
