"""Runs Python code that a model wrote: without network, files of others, or a way to stay.

`run_python` starts `sandbox_child.py` in a process of its own, behind the strongest isolation that this machine has.
`isolation()` says which:

    bubblewrap    namespaces made by `bwrap`; seccomp; limits
    namespaces    namespaces made here, for root or through a user namespace; seccomp; limits
    landlock      no namespaces (most containers): Landlock closes the file system, seccomp network and signals; limits
    rlimits       only limits, and seccomp where the machine is known: files can be read. Must be allowed explicitly

The code sees a read-only Python installation and an empty folder, has no variables of this process, and ends with all
its processes when the main one ends, when a limit is reached, or when this process ends.
"""

import contextlib
import itertools
import logging
import marshal
import math
import os
import platform
import secrets
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from arealite.api.errors import SandboxError
from arealite.reward import sandbox_child
from arealite.reward.seccomp import seccomp_filter

Level = Literal["bubblewrap", "namespaces", "landlock", "rlimits"]
Reason = Literal["timeout", "output", "memory", "disk"]
LEVELS: tuple[Level, ...] = get_args(Level)
_WITH_NAMESPACES = ("bubblewrap", "namespaces")

# Compiled if possible: it starts for every answer.
_CHILD = next(path for path in (sandbox_child.__cached__, sandbox_child.__file__) if path and os.path.exists(path))
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
# How often the memory of all processes and the size of the folder are checked.
_CHECK_INTERVAL_S = 0.1
_END_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 20.0
# Users from here on own nothing. Every run has its own, as the kernel counts the processes of a user, also for a moment
# those that have ended.
_FIRST_USER = 0x40000000
_runs = itertools.count()
_SETUP_FAILED = 125
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What code did. `exit_code` is 128 + the number of the signal if one ended it.

    `stopped_by` names what ended it early: "timeout", "output" (it wrote too much), "memory" or "disk" (all processes
    together used too much). Text that is not UTF-8 has replacement characters.
    """

    stdout: str
    stderr: str
    exit_code: int
    stopped_by: Reason | None
    duration_s: float

    @property
    def timed_out(self) -> bool:
        return self.stopped_by == "timeout"


@dataclass(frozen=True)
class Isolation:
    """What separates code from this machine, and why not more."""

    level: Level
    has_seccomp: bool
    # Why each stronger level is not available.
    missing: dict[str, str]

    @property
    def is_weak(self) -> bool:
        """Whether the code can read files outside, as far as their permissions allow."""
        return self.level == "rlimits"

    def __str__(self) -> str:
        without = "; ".join(f"{level}: {reason}" for level, reason in self.missing.items())
        seccomp = "with" if self.has_seccomp else "without"
        return f"{self.level}, {seccomp} seccomp" + (f" (not available: {without})" if without else "")


@lru_cache(maxsize=1)
def isolation() -> Isolation:
    """Return the strongest isolation that works here. The first call tries them, which takes some 100 ms."""
    missing: dict[str, str] = {}
    for level in LEVELS:
        try:
            result = run_python("print('works')", timeout_s=_PROBE_TIMEOUT_S, level=level, allow_weak=True)
        except SandboxError as error:
            missing[level] = str(error)
            continue
        if result.stdout == "works\n":
            has_seccomp = seccomp_filter(platform.machine(), True) is not None
            found = Isolation(level, has_seccomp, missing)
            _log.log(logging.WARNING if found.is_weak else logging.INFO, "sandbox: %s", found)
            return found
        missing[level] = f"exit code {result.exit_code}: {result.stderr.strip()[-500:]}"
    raise SandboxError(f"no program runs in the sandbox: {missing}")


def run_python(
    code: str,
    stdin: str = "",
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    max_processes: int = 16,
    max_file_mb: int = 64,
    max_output_bytes: int = 1 << 20,
    python_path: Sequence[str] = (),
    allow_weak: bool = False,
    level: Level | None = None,
) -> Result:
    """Run code as a program of its own, and return what it printed.

    Limits: wall time, and as much processor time for each process; memory, for each process by the kernel and for all
    together by a check every 100 ms; processes and threads; the size of all files; the bytes of stdout and of stderr.
    `python_path` names folders with packages that the code may import; it can read all of them. `level` sets an
    isolation instead of the strongest one. Raises `SandboxError` if it is not available, or if it is `rlimits` without
    `allow_weak`.
    """
    level = level or isolation().level
    code_filter = _check_level(level, allow_weak)
    folder = None if level in _WITH_NAMESPACES else _make_folder()
    nonce = secrets.token_hex(16)
    limits = {
        "RLIMIT_AS": memory_mb << 20, "RLIMIT_CPU": math.ceil(timeout_s) + 1, "RLIMIT_FSIZE": max_file_mb << 20,
        "RLIMIT_NPROC": max_processes, "RLIMIT_NOFILE": 256, "RLIMIT_CORE": 0,
    }  # fmt: skip
    paths = [*_installation(), *python_path]
    request = dict(
        level=level, limits=limits, paths=paths, folder=folder, max_file_bytes=max_file_mb << 20, filter=code_filter,
        parent=os.getpid(), user=_FIRST_USER + (os.getpid() % (1 << 20) << 10) + next(_runs) % (1 << 10), nonce=nonce,
        code=code.encode(errors="replace"), python_path=list(python_path),
    )  # fmt: skip
    header = marshal.dumps(request)
    data = len(header).to_bytes(8, "little") + header + stdin.encode(errors="replace")
    command = [_python(), "-I", "-S", "-B", "-X", "utf8", _CHILD]
    if level == "bubblewrap":
        command = [*_bubblewrap_command(paths, max_file_mb << 20), *command]
    try:
        result = _Watch(folder, memory_mb << 20, max_file_mb << 20, max_output_bytes).run(command, data, timeout_s)
    finally:
        if folder:
            _remove(folder)
    if result.exit_code == _SETUP_FAILED and result.stderr.startswith(nonce):
        raise SandboxError(result.stderr.removeprefix(nonce).strip())
    return result


def _check_level(level: Level, allow_weak: bool) -> bytes | None:
    """Return the seccomp filter of a level; raises `SandboxError` if the level cannot or may not be used."""
    if level == "rlimits" and not allow_weak:
        raise SandboxError(
            "this machine can only limit what code uses, not what it reads: neither bubblewrap nor namespaces nor "
            f"Landlock work ({isolation()}). Install bubblewrap or allow user namespaces, or pass allow_weak=True if "
            "the code may read the files of this user"
        )
    if level == "bubblewrap" and not shutil.which("bwrap"):
        raise SandboxError("bwrap is not installed")
    code_filter = seccomp_filter(platform.machine(), level in _WITH_NAMESPACES)
    if level == "landlock" and code_filter is None:
        raise SandboxError(f"no seccomp filter for {platform.machine()}: the network would be open")
    return code_filter


class _Watch:
    """Feeds one program, reads its output, and ends it at its limits."""

    def __init__(self, folder: str | None, max_memory_bytes: int, max_file_bytes: int, max_output_bytes: int):
        self._folder = folder
        self._max_memory_bytes, self._max_file_bytes = max_memory_bytes, max_file_bytes
        self._max_output_bytes = max_output_bytes

    def run(self, command: list[str], data: bytes, timeout_s: float) -> Result:
        """Start a program with `data` as its input, and return what it did."""
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            env=_ENVIRONMENT, cwd="/", start_new_session=True,
        )  # fmt: skip
        try:
            outputs, stopped_by = self._exchange(process, data, began + timeout_s)
        finally:
            _end(process, command[0] == "bwrap")
        stdout, stderr = (bytes(output[: self._max_output_bytes]).decode(errors="replace") for output in outputs)
        code = 128 + signal.SIGKILL if stopped_by else process.returncode
        return Result(stdout, stderr, 128 - code if code < 0 else code, stopped_by, time.monotonic() - began)

    def _exchange(
        self, process: subprocess.Popen[bytes], data: bytes, deadline: float
    ) -> tuple[tuple[bytearray, bytearray], Reason | None]:
        """Write `data` and read until the program has ended; returns its output and what stopped it."""
        assert process.stdin and process.stdout and process.stderr
        outputs = bytearray(), bytearray()
        unsent = memoryview(data)
        next_check = time.monotonic() + _CHECK_INTERVAL_S
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            for stream, output in zip((process.stdout, process.stderr), outputs, strict=True):
                selector.register(stream, selectors.EVENT_READ, output)
            for key in selector.get_map().values():
                os.set_blocking(key.fd, False)
            # The child holds both streams as long as it lives, whatever the code closes.
            while any(key.data is not None for key in selector.get_map().values()):
                now = time.monotonic()
                if now > deadline:
                    return outputs, "timeout"
                if now > next_check:
                    if _memory_bytes(process.pid) > self._max_memory_bytes:
                        return outputs, "memory"
                    if self._folder and _folder_bytes(self._folder, self._max_file_bytes) > self._max_file_bytes:
                        return outputs, "disk"
                    next_check = time.monotonic() + _CHECK_INTERVAL_S
                for key, _ in selector.select(min(deadline, next_check) - now):
                    if key.data is None:
                        unsent = _send(key.fd, unsent)
                        if not unsent:
                            selector.unregister(process.stdin)
                            process.stdin.close()
                    elif part := os.read(key.fd, 1 << 16):
                        key.data.extend(part)
                        if len(key.data) > self._max_output_bytes:
                            return outputs, "output"
                    else:
                        selector.unregister(key.fileobj)
        return outputs, None


def _send(descriptor: int, data: memoryview) -> memoryview:
    """Write some of `data` and return the rest; nothing remains if the program does not read any more."""
    try:
        return data[os.write(descriptor, data) :]
    except BrokenPipeError:
        return data[len(data) :]


def _end(process: subprocess.Popen[bytes], is_bubblewrap: bool) -> None:
    """End a program with all its processes, and close its streams."""
    if process.poll() is None and is_bubblewrap:
        # While it starts, killing bwrap alone could leave its child. Stopped, it makes no other one.
        process.send_signal(signal.SIGSTOP)
        for pid in (*_children(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.terminate()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream
        stream.close()


def _memory_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, without that of files."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except (OSError, ValueError):
        # It has ended.
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") + sum(map(_memory_bytes, _children(pid)))


def _children(pid: int) -> list[int]:
    children: list[int] = []
    # Threads and the process itself may end.
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            children += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return children


def _folder_bytes(folder: str, enough: int) -> int:
    """Return the size of all files in a folder, or at least `enough`. Every entry counts as one block."""
    total, folders = 0, [folder]
    while folders and total <= enough:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    total += 4096 + entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:
            # The code removes files, or has made a path that is too long.
            continue
    return total


def _make_folder() -> str:
    """Make a folder for files of the code; its name has the id of this process and of its PID namespace."""
    _remove_stale_folders()
    return tempfile.mkdtemp(prefix=f"{_folder_prefix()}{os.getpid()}-")


def _folder_prefix() -> str:
    return f"arealite-sandbox-{os.stat('/proc/self/ns/pid').st_ino}-"


@lru_cache(maxsize=1)
def _remove_stale_folders() -> None:
    """Remove what processes of this user left that were killed; once in a process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_folder_prefix()}*"):
        pid = folder.name.removeprefix(_folder_prefix()).partition("-")[0]
        # Others remove theirs at the same time.
        with contextlib.suppress(OSError):
            if pid.isdecimal() and not os.path.exists(f"/proc/{pid}") and _is_own(folder.lstat()):
                _remove(str(folder))


def _is_own(entry: os.stat_result) -> bool:
    """Whether it is a folder of this user; those of root belong to a user who owns nothing else."""
    is_given_away = os.geteuid() == 0 and (entry.st_uid >= _FIRST_USER or entry.st_uid == sandbox_child.NOBODY)
    return stat.S_ISDIR(entry.st_mode) and (entry.st_uid == os.geteuid() or is_given_away)


def _remove(folder: str) -> None:
    """Remove a folder whatever the code made in it: names, permissions, depth."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, "--", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _python() -> str:
    """Return the interpreter itself, behind the links of virtual environments."""
    return os.path.realpath(sys.executable)


@lru_cache(maxsize=1)
def _installation() -> tuple[str, ...]:
    """Return what Python needs to run: its library, the interpreter, the shared libraries of the system."""
    candidates = (
        "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", _CHILD, _python(),
        f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64",
    )  # fmt: skip
    return tuple(dict.fromkeys(path for path in candidates if os.path.lexists(path)))


def _bubblewrap_command(paths: Sequence[str], max_file_bytes: int) -> list[str]:
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--die-with-parent"]
    if os.geteuid() == 0:
        # Root is given up in the sandbox, for a user of its own.
        options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    options += ["--perms", "1777", "--size", str(max_file_bytes), "--tmpfs", "/tmp"]
    # Those that bwrap makes by itself are closed to others.
    every = (*paths, *sandbox_child.DEVICES)
    for parent in dict.fromkeys(str(parent) for path in every for parent in reversed(Path(path).parents[:-1])):
        options += ["--perms", "0755", "--dir", parent]
    for path in paths:
        kind = "--symlink" if os.path.islink(path) else "--ro-bind"
        options += [kind, os.readlink(path) if kind == "--symlink" else path, path]
    for path in sandbox_child.DEVICES:
        options += ["--dev-bind", path, path]
    return ["bwrap", *options, "--remount-ro", "/", "--"]
