"""Ends whole process trees, and reads what a launcher set for this process. Linux only.

Launchers start each child in its own session, with a mark in its environment. A descendant is found by its parent, its
session or its mark: a daemon changes the first two, and a program that rewrites its title loses the third.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.utils.script_check import end_check
from arealite.utils.text import clean

MARK_ENV = "AREALITE_PROCESS"
# The path of job.json, set in the driver of controller mode only: the process whose engines live in Ray actors.
CONTROLLER_ENV = "AREALITE_CONTROLLER"
# Number of the attempt at a job, set by a launcher.
ATTEMPT_ENV = "AREALITE_ATTEMPT"
# How an interrupted run goes on, if not by its command.
RESUME_ENV = "AREALITE_RESUME"
# Folder in which the ranks of one machine meet, set by a launcher.
STORE_ENV = "AREALITE_STORE"
# Set by a launcher for ranks that have a GPU in common with a server.
SHARED_GPU_ENV = "AREALITE_SHARED_GPU"
_PR_SET_PDEATHSIG = 1
# For checkpoints, processes and libraries, besides connections.
_RESERVED_DESCRIPTORS = 256
_NO_LIMIT = 1 << 20
# Flags of the kernel (PF_EXITING, PF_KTHREAD) for processes that have no environment any more, or never.
_EXITING, _KERNEL_THREAD = 0x4, 0x00200000
# How long a process may take to load its program on a busy machine.
_MAX_LOADING_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def before_engine(engine: object) -> None:
    """Called by engines when they are made: ends check mode, raises in the driver of controller mode."""
    end_check()
    if os.environ.get(CONTROLLER_ENV):
        name = type(engine).__name__
        raise ConfigError(
            f"{name}(…) was constructed in the driver of controller mode (controller=true), which has no device: write "
            f"`make_engine({name}, …)` with `from arealite.controller.factory import make_engine`, or set "
            "controller=false"
        )


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends. Call it first in the child."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have ended before the request was in place.
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def raise_file_limit(wanted: int = 65_536) -> int:
    """Raise the soft limit on open files, also for children, if it is lower. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return soft
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def spare_descriptors() -> int:
    """Raise the limit on open files, and return how many more may be opened, less a reserve."""
    limit = raise_file_limit()
    if limit == resource.RLIM_INFINITY:
        limit = _NO_LIMIT
    return limit - len(os.listdir("/proc/self/fd")) - min(_RESERVED_DESCRIPTORS, limit // 4)


@dataclass(frozen=True)
class ProcessInfo:
    """One entry of the process table. `started` tells a process from a later one with the same pid."""

    pid: int
    parent: int
    session: int
    started: int
    zombie: bool


def process_table() -> dict[int, ProcessInfo]:
    """Read all visible processes from /proc. psutil takes 1.7 times the CPU time."""
    infos = (_read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {info.pid: info for info in infos if info is not None}


def find_family(pids: Collection[int], marks: Collection[str] = ()) -> list[ProcessInfo]:
    """Find the living processes of `pids`: themselves, their sessions, descendants, carriers of a mark."""
    table = process_table()
    members = {p for p, info in table.items() if p in pids or info.session in pids}
    members |= _find_carriers(table, marks)
    grew = True
    while grew:
        children = {p for p, info in table.items() if info.parent in members}
        grew = not children <= members
        members |= children
    members.discard(os.getpid())
    return [table[p] for p in members if p in table and not table[p].zombie]


def end_families(pids: Collection[int], grace_s: float, marks: Collection[str] = ()) -> int:
    """End the families of `pids` and carriers of a mark: SIGTERM, then SIGKILL after the grace period.

    Returns how many processes got SIGTERM.
    """
    asked = find_family(pids, marks)
    _send_signal(asked, signal.SIGTERM)
    _wait_for_end(asked, grace_s)
    # Search again: a dying process may have started another one. Keep the known ones: those that ignored SIGTERM may
    # have lost the parent by which they were found.
    known = asked
    for _ in range(10):
        found = {info.pid: info for info in [*known, *find_family(pids, marks)] if _is_alive(info)}
        known = list(found.values())
        if not known:
            break
        _send_signal(known, signal.SIGKILL)
        _wait_for_end(known, 1.0)
    return len(asked)


def describe_exit(code: int) -> str:
    """Say how a process ended: `exited with code 3`, `was ended by SIGKILL`. Negative codes are signals."""
    return f"exited with code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Return SIGKILL for 9; real-time signals between the first and the last have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"signal {number}"


def is_computing(pid: int | None) -> bool:
    """Whether a process or one of its descendants is runnable now, rather than waiting."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return False
    return text[text.rindex(")") + 2] == "R" or any(is_computing(int(child)) for child in children)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP, a debugger): it does nothing until it is continued."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def tail(path: Path, lines: int = 25, since: int = 0) -> str:
    """Return the last lines of a log for an error message, as clean text; nothing before byte `since`."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, path.stat().st_size - 64 * 1024))
            text = clean(file.read().decode(errors="replace"))
    except OSError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def last_error(text: str) -> str:
    """Return the last error message of a command of this package in a log; empty if there is none."""
    start = f"\n{text}".rfind("\nerror: ")
    return text[start:].removeprefix("error: ") if start >= 0 else ""


def python_path() -> str:
    """Return PYTHONPATH for a child, with this package: it may be on the path of this process only."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))


def _send_signal(processes: list[ProcessInfo], number: signal.Signals) -> None:
    for info in processes:
        if _is_alive(info):
            # The process may have ended just now, or run as another user (a setuid program).
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(info.pid, number)


def _wait_for_end(processes: list[ProcessInfo], timeout_s: float) -> None:
    """Wait on the pidfds of all processes until they have ended, or until the deadline."""
    deadline = time.monotonic() + timeout_s
    for info in processes:
        try:
            descriptor = os.pidfd_open(info.pid)
        except OSError:
            # It has ended. Older kernels call that EINVAL while its number is still that of a session or group.
            continue
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if _is_alive(info):
                poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(descriptor)


def _is_alive(info: ProcessInfo) -> bool:
    now = _read_stat(info.pid)
    return now is not None and now.started == info.started and not now.zombie


def _find_carriers(pids: Collection[int], marks: Collection[str]) -> set[int]:
    """Return the processes with a mark.

    A process that is loading its program (exec) has no environment for a moment. Whoever started it may have ended, and
    then nothing else tells to whom it belongs: wait until it has one. The kernel reports no end of this moment.
    """
    deadline = time.monotonic() + _MAX_LOADING_S
    carriers = set()
    for pid in pids if marks else ():
        environment = _read_environment(pid)
        if environment == b"":
            while _is_loading(pid) and time.monotonic() < deadline:
                time.sleep(0.001)
            environment = _read_environment(pid)
        if environment and any(mark.encode() in environment for mark in marks):
            carriers.add(pid)
    return carriers


def _read_environment(pid: int) -> bytes | None:
    """Return the environment with which a process was started; None if it has ended or may not be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None


def _is_loading(pid: int) -> bool:
    """Whether a process has no environment yet, because it is loading its program."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    flags, end_of_environment = int(fields[6]), fields[48]
    return end_of_environment == "0" and not flags & (_EXITING | _KERNEL_THREAD)


def _read_stat(pid: int) -> ProcessInfo | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything; the fields after the last parenthesis are fixed.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessInfo(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in "ZX")
