"""Starts, watches and ends the child processes of a launcher.

Every launcher uses one `Supervisor` as a context manager. Leaving the block ends all children with their descendants
(SIGTERM, grace period, SIGKILL); a watchdog process does the same if the launcher itself is killed. Nothing polls:
child exits, output and signals all wake one `select`.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from codecs import IncrementalDecoder
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from arealite.api.errors import AReaLiteError
from arealite.launcher.output import lasting_output
from arealite.launcher.watchdog import detach, remove_paths
from arealite.utils.activity import activity
from arealite.utils.process import MARK_ENV, describe_exit, die_with_parent, end_families, last_error, tail
from arealite.utils.status.writer import status
from arealite.utils.text import clean_stream, text_decoder

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Exit codes of a launcher that was ended by a signal; the job is not started again after them.
INTERRUPTED = tuple(128 + number for number in _SIGNALS)
# How long a killed process may take to end, and how much of its last output is read (64 KiB each).
_REAP_TIMEOUT_S, _MAX_LAST_READS = 10.0, 1024

# Characters of a log's last line in a message.
_MAX_LINE = 160


class Interrupted(AReaLiteError):
    """The launcher got a signal that ends it."""

    def __init__(self, number: int):
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


@dataclass
class ChildSpec:
    """A process to start.

    `env` is added to the launcher's environment. `echo` copies the output to the console; `terminal` lets it draw
    there. The log of a process that gets a `secret` is readable only by its owner, and error messages omit it.
    """

    name: str
    command: list[str]
    log_path: Path
    env: dict[str, str] = field(default_factory=dict)
    echo: bool = False
    cwd: Path | None = None
    terminal: bool = False
    secret: str | None = None


@dataclass
class Child:
    """A started process. `code` is None while it runs, negative if a signal ended it."""

    spec: ChildSpec
    process: subprocess.Popen
    pidfd: int
    log_start: int
    started: float = field(default_factory=time.monotonic)
    code: int | None = None
    # Whether an echoed one has printed something, and whether its last line has ended.
    has_printed: bool = False
    has_ended_line: bool = True
    decoder: IncrementalDecoder = field(default_factory=text_decoder)

    @property
    def name(self) -> str:
        return self.spec.name

    def describe_end(self) -> str:
        """Say how it ended, with the last lines of its log."""
        assert self.code is not None
        how, where = f"{self.name} {describe_exit(self.code)}", self.spec.log_path
        how += f" after {time.monotonic() - self.started:.1f} s"
        if self.spec.echo:
            return f"{how}; its output is above and in {where}"
        return f"{how}; the last lines of {where}:\n{self.last_lines()}"

    def last_lines(self) -> str:
        return "\n".join(f"  | {line}" for line in self._tail().splitlines())

    def last_line(self) -> str:
        """Return a clause with the last line of its log; empty if it has written none."""
        has_lines = self.spec.log_path.exists() and self.spec.log_path.stat().st_size > self.log_start
        return f", whose log ends with: {self._tail().splitlines()[-1].strip()[:_MAX_LINE]}" if has_lines else ""

    def error_message(self) -> str:
        """Return the message with which a command of this package ended; for others, how they ended."""
        return last_error(self._tail()) or self.describe_end()

    def hide_secret(self) -> None:
        """Overwrite the secret in the log: SGLang prints all of its settings. Its length stays the same."""
        if not self.spec.secret or not self.spec.log_path.exists():
            return
        try:
            self._overwrite_in_log(self.spec.secret.encode())
        except OSError as error:
            print(f"warning: cannot remove the API key from {self.spec.log_path}: {error.strerror}", flush=True)

    def _overwrite_in_log(self, secret: bytes) -> None:
        with self.spec.log_path.open("r+b") as log:
            offset = self.log_start
            while len(portion := os.pread(log.fileno(), 1 << 20, offset)) >= len(secret):
                found = portion.find(secret)
                if found >= 0:
                    os.pwrite(log.fileno(), b"*" * len(secret), offset + found)
                # A portion may end inside the secret.
                offset += len(portion) - len(secret) + 1 if found < 0 else found + len(secret)

    def _tail(self) -> str:
        text = tail(self.spec.log_path, since=self.log_start)
        return text.replace(self.spec.secret, "***") if self.spec.secret else text


class Supervisor:
    """Starts, watches and ends child processes. Use it in a `with` block, from one thread."""

    def __init__(self, stop_timeout_s: float = 10.0, lock: int | None = None):
        """`lock`: a file descriptor that children inherit, so that it stays open until the last one is gone."""
        self.stop_timeout_s = stop_timeout_s
        self._lock = lock
        self.children: list[Child] = []
        # How the last children ended.
        self._ended: deque[dict[str, Any]] = deque(maxlen=20)
        self._mark = f"arealite-{os.getpid()}-{time.time_ns()}"
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._signals: list[int] = []
        self._num_passed_on = 0
        self._old_handlers: dict[int, object] = {}
        self._watchdog: subprocess.Popen | None = None
        self._has_lost_log = False
        self._paths: list[Path] = []
        self._output = contextlib.ExitStack()

    def __enter__(self) -> Supervisor:
        self._output.enter_context(lasting_output())
        self._watchdog = subprocess.Popen(
            [sys.executable, "-m", "arealite.launcher.watchdog"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=detach,
            pass_fds=[] if self._lock is None else [self._lock],
        )
        assert self._watchdog.stdin is not None
        os.set_blocking(self._watchdog.stdin.fileno(), False)
        self._notify_watchdog(f"{self._mark} {self.stop_timeout_s}")
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._old_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._end_watchdog()
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._output.close()

    def remove_at_end(self, path: Path) -> None:
        """Have a file or folder removed after the last child is gone, also if this process is killed."""
        self._paths.append(path)
        self._notify_watchdog(f"={path}")

    def start(self, spec: ChildSpec) -> Child:
        """Start a process in its own session; its output is appended to its log."""
        outer = os.environ.get(MARK_ENV)
        env = {**os.environ, **status.environment(spec.name), **spec.env}
        env[MARK_ENV] = f"{outer};{self._mark}" if outer else self._mark
        # Pass a copy: in the child, the number of our standard output belongs to its own output pipe.
        terminal = [os.dup(sys.stdout.fileno())] if spec.terminal else []
        if terminal:
            env["AREALITE_TTY_FD"] = str(terminal[0])
        parent = os.getpid()
        try:
            spec.log_path.parent.mkdir(parents=True, exist_ok=True)
            with open(spec.log_path, "ab", opener=_open_private if spec.secret else None) as log:
                log_start = log.tell()
                process = subprocess.Popen(
                    spec.command,
                    env=env,
                    cwd=spec.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if spec.echo else log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda: _prepare_child(parent),
                    pass_fds=terminal,
                )
        except OSError as error:
            # The log cannot be written, or the program does not exist.
            raise AReaLiteError(f"cannot start {spec.name}: {error}") from error
        finally:
            for descriptor in terminal:
                os.close(descriptor)
        self._notify_watchdog(f"+{process.pid}")
        child = Child(spec, process, os.pidfd_open(process.pid), log_start)
        self.children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout, selectors.EVENT_READ, child)
        return child

    def describe_children(self) -> list[dict[str, Any]]:
        """Return the running children and how the last others ended, for the status of this process."""
        running = [{"name": child.name, "pid": child.process.pid, "code": None} for child in self.children]
        return [*self._ended, *running]

    def wait(self, timeout_s: float | None = None) -> list[Child]:
        """Return children that ended, none after the timeout. Raises `Interrupted` after a signal."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if len(self._signals) > self._num_passed_on:
                raise Interrupted(self._signals[0])
            status.tick()
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended = self._handle(self._selector.select(left_s))
            if ended or (left_s is not None and left_s == 0.0):
                return ended

    def forgive_signal(self) -> None:
        """Go on after an `Interrupted`, while children end by themselves; the next signal ends all."""
        self._num_passed_on = len(self._signals)

    def stop(self, children: list[Child] | None = None) -> None:
        """End children (by default all) with their descendants. A second signal meanwhile kills them at once."""
        children = list(self.children) if children is None else children
        running = [child for child in children if child in self.children]
        marks = [self._mark] if len(running) == len(self.children) else []
        grace_s = 0.0 if len(self._signals) > 1 else self.stop_timeout_s
        end_families([child.process.pid for child in running], grace_s, marks)
        for child in running:
            self._reap(child)

    def _handle(self, events: list[tuple[selectors.SelectorKey, int]]) -> list[Child]:
        ended = []
        for key, _ in events:
            child = key.data
            if child is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 64)
            elif key.fd == child.pidfd:
                # End the descendants that it left behind.
                end_families([child.process.pid], 0.0)
                self._reap(child)
                ended.append(child)
            elif child in self.children:
                self._copy_output(child)
        return ended

    def _reap(self, child: Child) -> None:
        try:
            child.code = child.process.wait(_REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Not even SIGKILL ends a process that waits for a device or a file server.
            print(f"warning: process {child.process.pid} ({child.name}) cannot be ended", flush=True)
            child.code = -signal.SIGKILL
        for _ in range(_MAX_LAST_READS):
            if not self._copy_output(child):
                break
        if not child.has_ended_line:
            # A progress bar: what follows, here and in its log, begins a line of its own.
            self._write_output(child, "\n")
        child.hide_secret()
        self._ended.append({"name": child.name, "pid": child.process.pid, "code": child.code, "time": time.time()})
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        self.children.remove(child)
        self._notify_watchdog(f"-{child.process.pid}")

    def _copy_output(self, child: Child) -> bool:
        """Copy the output of an echoed child to its log and the console; False if there is none left for now."""
        pipe = child.process.stdout
        if pipe is None or pipe.closed:
            return False
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(pipe)
            pipe.close()
            return False
        self._write_output(child, clean_stream(child.decoder.decode(data)))
        return True

    def _write_output(self, child: Child, text: str) -> None:
        """Write a text to the log of an echoed child and to the console."""
        try:
            with child.spec.log_path.open("a", encoding="utf-8") as log:
                log.write(text)
        except OSError as error:
            # A full disk loses lines of a log and does not stop the run.
            if not self._has_lost_log:
                print(f"warning: cannot write {child.spec.log_path}: {error.strerror}", flush=True)
            self._has_lost_log = True
        sys.stdout.write(text)
        sys.stdout.flush()
        child.has_printed, child.has_ended_line = True, text.endswith("\n") if text else child.has_ended_line
        activity.note_output()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            # A second signal skips the grace period.
            for child in self.children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def _end_watchdog(self) -> None:
        """Let the watchdog end; kill it after a deadline. It may have been stopped or killed before."""
        assert self._watchdog is not None and self._watchdog.stdin is not None
        assert self._watchdog.stdout is not None
        self._watchdog.stdin.close()
        self._signal_watchdog(signal.SIGCONT)
        # The watchdog writes nothing: its output is readable at its end.
        ended, _, _ = select.select([self._watchdog.stdout], [], [], self.stop_timeout_s + _REAP_TIMEOUT_S)
        if not ended:
            print("warning: the watchdog process does not end: killing it", flush=True)
        self._signal_watchdog(signal.SIGKILL)
        self._watchdog.stdout.close()
        self._watchdog.wait()
        remove_paths(self._paths)

    def _notify_watchdog(self, line: str) -> None:
        assert self._watchdog is not None and self._watchdog.stdin is not None
        # If it was killed, the kernel still ends children with their parent (PR_SET_PDEATHSIG).
        with contextlib.suppress(BrokenPipeError):
            if self._watchdog.stdin.write(f"{line}\n".encode()) is None:
                # The pipe is full: it was stopped long ago, and knows processes that have ended since.
                self._signal_watchdog(signal.SIGKILL)

    def _signal_watchdog(self, number: signal.Signals) -> None:
        """Send a signal to the group of the watchdog, which it leads until it is waited for."""
        assert self._watchdog is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._watchdog.pid, number)


def _prepare_child(parent: int) -> None:
    """End with the parent, and get signals that it blocks or ignores, as a worker of Ray does."""
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _open_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor
