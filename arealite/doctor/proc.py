"""Reads /proc: state, memory and processor time of processes. None where a process is gone."""

import time
from pathlib import Path
from typing import NamedTuple

import psutil

from arealite.doctor.case import Proc

# Start times are rounded.
_SAME_S = 1.0
# Times of threads are counted in hundredths of a second.
_THREAD_SAMPLE_S = 0.3


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


def find_busiest_thread(pid: int, signal: int) -> int:
    """Return the thread that uses most processor time now, of those that do not block a signal."""
    folder = Path(f"/proc/{pid}/task")
    try:
        threads = [path for path in folder.iterdir() if not _blocks(path, signal)]
    except OSError:
        return pid
    before = [_read_stat(path / "stat").cpu_s for path in threads]
    time.sleep(_THREAD_SAMPLE_S)
    used = [_read_stat(path / "stat").cpu_s - start for path, start in zip(threads, before, strict=True)]
    return int(threads[used.index(max(used))].name) if used and max(used) > 0 else pid


def _blocks(thread: Path, signal: int) -> bool:
    try:
        lines = (thread / "status").read_text().splitlines()
        blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))
    except (OSError, StopIteration, ValueError):
        return True
    return bool(blocked >> (signal - 1) & 1)


def read_usage(pid: int) -> Usage:
    """Return the usage of a process; zeros if it is gone."""
    return _read_stat(Path(f"/proc/{pid}/stat"))


def _read_stat(path: Path) -> Usage:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return Usage(0.0, 0)
    fields = text[text.rindex(")") + 2 :].split()
    return Usage((int(fields[11]) + int(fields[12])) / 100.0, int(fields[9]))


def _kib(text: str) -> int:
    words = text.split()
    return int(words[0]) * 1024 if words else 0
