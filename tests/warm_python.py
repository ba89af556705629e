"""A Python process that has imported torch, transformers and arealite, and forks ready children for tests.

Importing these packages takes five seconds of a core. `start(["-m", "arealite.cli.serve", ...])` returns in
milliseconds a process that otherwise behaves like `python -m arealite.cli.serve ...`: own pid, environment, working
directory, output and exit code. All pytest workers share one such process; it ends with the pytest that started it.

Use a plain `subprocess` where the start itself is tested, or where a test reads /proc/PID/cmdline or environ.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
ADDRESS_ENV = "AREALITE_TESTS_WARM_PYTHON"
PRELOAD = ("arealite.cli.main", "arealite.cli.serve", "transformers.models.qwen2.modeling_qwen2")
_PR_SET_PDEATHSIG = 1

_server: subprocess.Popen | None = None


def prepare() -> None:
    """Start the process that forks, without waiting for its imports. Does nothing if it runs already."""
    global _server
    if ADDRESS_ENV in os.environ:
        return
    address = Path(tempfile.mkdtemp(prefix="warm-python-")) / "socket"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    # The server ends when the pipe to its standard input is closed, so also if this process is killed.
    with _log(address).open("w") as log:
        _server = subprocess.Popen(
            [sys.executable, __file__, address], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    os.environ[ADDRESS_ENV] = str(address)
    assert _server.stdout is not None
    if _server.stdout.readline() != b"listening\n":
        raise RuntimeError(f"tests/warm_python.py did not start:\n{_log(address).read_text()}")


def close() -> None:
    """End the server and every process it has forked, if this process started it."""
    global _server
    if _server is not None:
        _server.communicate()
        _server = None
        shutil.rmtree(Path(os.environ.pop(ADDRESS_ENV)).parent)


def _log(address: str | Path) -> Path:
    return Path(address).with_name("log")


class WarmProcess:
    """The part of `subprocess.Popen` that tests use, for a process forked by the server."""

    def __init__(self, connection: socket.socket, pid: int, stdout: IO[str] | None, stderr: IO[str] | None):
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None
        self._connection = connection
        self._exited = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._exited], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0)
            # The server reaps the child on request, so the pid stays valid until here.
            self._connection.sendall(b"wait")
            self.returncode = int(self._connection.recv(64))
            os.close(self._exited)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._exited, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path = ROOT,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
) -> WarmProcess:
    """Like `subprocess.Popen([sys.executable, *command], text=True)`; outputs: descriptors, DEVNULL, PIPE, STDOUT."""
    prepare()
    ours: list[IO[str] | None] = []
    theirs: list[int] = []
    for kind in (stdout, stderr):
        reader = None
        if kind == subprocess.PIPE:
            descriptor, writer = os.pipe()
            reader = os.fdopen(descriptor)
        elif kind == subprocess.DEVNULL:
            writer = os.open(os.devnull, os.O_WRONLY)
        else:
            writer = os.dup(theirs[0] if kind == subprocess.STDOUT else kind)
        ours.append(reader)
        theirs.append(writer)
    request = {"command": [str(part) for part in command], "env": dict(env or os.environ), "cwd": str(cwd)}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.environ[ADDRESS_ENV])
    socket.send_fds(connection, [json.dumps(request).encode()], theirs)
    for descriptor in theirs:
        os.close(descriptor)
    pid = connection.recv(64)
    if not pid:
        raise RuntimeError(f"tests/warm_python.py has ended:\n{_log(os.environ[ADDRESS_ENV]).read_text()}")
    return WarmProcess(connection, int(pid), ours[0], ours[1])


def run(command: Sequence[str | Path], *, timeout: float, **options: Any) -> subprocess.CompletedProcess:
    """Like `subprocess.run([sys.executable, *command], stdout=PIPE, stderr=STDOUT, text=True)`."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = start(command, stdout=output.fileno(), stderr=subprocess.STDOUT, **options)
        try:
            process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        return subprocess.CompletedProcess(list(command), process.wait(), output.read())


# ------------------------------------------------------------------------------------------------- the server


def _serve(address: str) -> dict[str, Any]:
    """Fork a child for each request. Returns the request, and that in the child only."""
    server = os.getpid()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    print("listening", flush=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches pytest, which then closes the pipe
    for module in PRELOAD:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    children: dict[socket.socket, int] = {}
    while True:
        ready: set[Any] = set(select.select([0, listener, *children], [], [])[0])
        if 0 in ready:
            os._exit(0)
        if listener in ready:
            connection = listener.accept()[0]
            message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
            pid = os.fork()
            if pid == 0:
                for inherited in (listener, connection, *children):
                    inherited.close()
                return {**json.loads(message), "outputs": descriptors, "server": server}
            for descriptor in descriptors:
                os.close(descriptor)
            children[connection] = pid
            connection.sendall(str(pid).encode())
        for connection in ready & set(children):
            pid = children.pop(connection)
            if not connection.recv(64):  # whoever started the child has ended
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                connection.sendall(str(code).encode())
            connection.close()


def _become(request: dict[str, Any]) -> None:
    """Turn this forked process into the one that was asked for, and run its module or script."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != request["server"]:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate([nothing, *request["outputs"]]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    random.seed()
    first, *arguments = request["command"]
    folders = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if first == "-m":
        name, *arguments = arguments
        sys.path[0:1] = [os.getcwd(), *folders]
        sys.argv = [name, *arguments]
        # As with `python -m`, the module that runs is `__main__`, and imports of it make another one.
        sys.modules.pop(name, None)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0:1] = [str(Path(first).resolve().parent), *folders]
        sys.argv = [first, *arguments]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _become(_serve(sys.argv[1]))
