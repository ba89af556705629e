"""A Python process that has imported torch, transformers and arealite, and forks ready children for tests.

Importing these packages takes five seconds of a core. `start(["-m", "arealite.cli.serve", ...])` returns in
milliseconds a process that otherwise behaves like `python -m arealite.cli.serve ...`: own pid, environment, working
directory, output and exit code. All pytest workers share one such process; it ends with the pytest that started it.

Python programs that such a process starts are forked, too: servers and ranks of a launcher, fork servers of rewards.

`python tests/warm_python.py --run COMMAND...` is a program that behaves like `python COMMAND...`, for shell scripts.
With `--worker` it reads its own standard input: the workers of pytest-xdist are such programs.

/proc/PID/environ of such a process shows its environment, and its command as the variable `COMMAND_ENV`.
/proc/PID/cmdline is that of the server. Use a plain `subprocess` where the start itself or a command line is tested.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import logging
import multiprocessing
import multiprocessing.util
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
import threading
import traceback
import types
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
ADDRESS_ENV = "AREALITE_TESTS_WARM_PYTHON"
COMMAND_ENV = "AREALITE_TESTS_COMMAND"
# The kernel reads /proc/PID/environ from where it put the environment when the program started: make room there.
_ROOM = {"AREALITE_TESTS_ROOM": "x" * (1 << 15)}
PRELOAD = (
    "arealite.trainer.ppo",
    "arealite.trainer.sft",
    "arealite.trainer.tasks",
    "arealite.cli.main",
    "arealite.cli.server",
    "transformers.models.qwen2.modeling_qwen2",
    # Ranks of tests import test modules.
    "pytest",
)
# If it is set, servers measure decode steps before they serve, as those of users do: half a second of a core.
TRIAL_ENV = "AREALITE_TESTS_STEP_TRIAL"
_PR_SET_PDEATHSIG = 1

_server: subprocess.Popen | None = None


def prepare() -> None:
    """Start the process that forks, without waiting for its imports. Does nothing if it runs already."""
    global _server
    if ADDRESS_ENV in os.environ:
        return
    address = Path(tempfile.mkdtemp(prefix="warm-python-")) / "socket"
    env = {**os.environ, **_ROOM, "PYTHONPATH": str(ROOT)}
    # The server ends when the pipe to its standard input is closed, so also if this process is killed.
    with _log(address).open("w") as log:
        _server = subprocess.Popen(
            [sys.executable, __file__, address],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
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

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Read the pipes until they are closed, then wait."""
        with ThreadPoolExecutor(2) as pool:
            outputs = [pool.submit(pipe.read) if pipe else None for pipe in (self.stdout, self.stderr)]
            try:
                stdout, stderr = (output and output.result(timeout) for output in outputs)
                self.wait(timeout)
            except TimeoutError:
                self.kill()
                raise
        return stdout, stderr

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
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    can_fork: bool = True,
) -> WarmProcess:
    """Like `subprocess.Popen([sys.executable, *command], text=True)`.

    Streams are descriptors or DEVNULL; outputs may also be PIPE or STDOUT.
    `can_fork`: whether Python programs that it starts are its forks; not if it has threads that they would miss.
    """
    prepare()
    ours: list[IO[str] | None] = []
    theirs = [os.open(os.devnull, os.O_RDONLY) if stdin == subprocess.DEVNULL else os.dup(stdin)]
    for kind in (stdout, stderr):
        reader = None
        if kind == subprocess.PIPE:
            descriptor, writer = os.pipe()
            reader = os.fdopen(descriptor)
        elif kind == subprocess.DEVNULL:
            writer = os.open(os.devnull, os.O_WRONLY)
        else:
            writer = os.dup(theirs[1] if kind == subprocess.STDOUT else kind)
        ours.append(reader)
        theirs.append(writer)
    request: dict[str, Any] = {"command": [str(part) for part in command], "env": dict(env or os.environ)}
    request |= {"cwd": str(cwd), "can_fork": can_fork}
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
    """Like `subprocess.run([sys.executable, *command], capture_output=True, text=True)`."""
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    stdout, stderr = process.communicate(timeout)
    return subprocess.CompletedProcess(list(command), process.wait(), stdout, stderr)


def run_in_place(command: Sequence[str], can_fork: bool = True, stdin: int = subprocess.DEVNULL) -> NoReturn:
    """Run a command with the outputs of this process, pass signals on, and end with its exit code."""
    process = start(command, cwd=os.getcwd(), stdin=stdin, stdout=1, stderr=2, can_fork=can_fork)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    os._exit(code if code >= 0 else 128 - code)


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
    _fill_caches()
    _drop_exit_functions()
    gc.collect()
    gc.freeze()
    children: dict[socket.socket, int] = {}
    while True:
        ready: set[Any] = set(select.select([0, listener, *children], [], [])[0])
        if 0 in ready:
            os._exit(0)
        if listener in ready:
            connection = listener.accept()[0]
            message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            pid = os.fork()
            if pid == 0:
                for inherited in (listener, connection, *children):
                    inherited.close()
                return {**json.loads(message), "streams": descriptors, "server": server}
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


def _fill_caches() -> None:
    """Do what each fork would do again, once."""
    make_schema = importlib.import_module("arealite.utils.settings.nodes").schema_of
    for name in ("GRPOConfig", "SFTConfig", "ServerConfig"):
        make_schema(getattr(importlib.import_module("arealite.api.cli_args"), name))
    # The first model that a process loads compiles 800 regular expressions.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen2")
    importlib.import_module("arealite.utils.model_config")._known_families()
    importlib.import_module("arealite.utils.pools.process_pool").run_preparations()


def _drop_exit_functions() -> None:
    """Drop what imports have registered for the end: it takes 70 ms in each fork, and cleans up what ends anyway."""
    atexit.unregister(importlib.import_module("torch._dynamo.utils").dump_compile_times)
    for entry in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        entry.atexit = False


def _become(request: dict[str, Any]) -> NoReturn:
    """Turn this process, which the server has just forked, into the one that was asked for."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != request["server"]:
        os._exit(1)
    for number, descriptor in enumerate(request["streams"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    if request["can_fork"]:
        subprocess.Popen = _ForkingPopen
        multiprocessing.util.spawnv_passfds = _fork_passfds
    _run_program(request["command"], request["env"])


class _ForkingPopen(subprocess.Popen):
    """Starts Python programs by a fork without an exec: the child has the imports of its parent."""

    def __init__(self, args: Any, *, env: Any = None, preexec_fn: Any = None, pass_fds: Any = (), **options: Any):
        def become() -> NoReturn:
            if preexec_fn is not None:
                preexec_fn()
            # The parent waits until one of them is closed.
            close_all_but(pass_fds)
            gc.enable()
            forget_unfinished_imports()
            _run_program(args[1:], os.environ if env is None else env)

        is_program = isinstance(args, list) and args[0] == sys.executable and (args[1] == "-m" or args[1][0] != "-")
        super().__init__(args, env=env, preexec_fn=become if is_program else preexec_fn, pass_fds=pass_fds, **options)


def _fork_passfds(path: str, args: list[Any], passfds: Sequence[int]) -> int:
    """Replaces the function with which `multiprocessing` starts its fork server and its resource tracker."""
    pid = os.fork()
    if pid == 0:
        close_all_but(passfds)
        forget_unfinished_imports()
        _run_program(args[args.index("-c") :], os.environ)
    return pid


def close_all_but(descriptors: Sequence[int]) -> None:
    """Close what exec would close."""
    for low, high in itertools.pairwise([*sorted({2, *descriptors}), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)


def _run_program(command: list[str], env: Mapping[str, str]) -> NoReturn:
    """Run `-m MODULE ...`, `-c CODE ...` or `SCRIPT ...` as a new interpreter would, and end the process."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As an interpreter does at its start; `subprocess` restores the default before.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    open_streams()
    logging.getLogger().handlers.clear()
    env = dict(env)
    os.environ.clear()
    os.environ.update(env)
    _show_environment({COMMAND_ENV: " ".join(map(str, command)), **env})
    tempfile.tempdir = None
    random.seed()
    if command[:2] == ["-m", "arealite.cli.serve"] and TRIAL_ENV not in env:
        importlib.import_module("arealite.inference.timing.step_trial")._MAX_SECONDS["cpu"] = 0.0
    code = 0
    try:
        _run_main([str(part) for part in command])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    # What an interpreter does at its end: wait for threads, call exit functions, flush.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # The resource tracker of `multiprocessing` has closed it.
    if not sys.stdout.closed:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    os._exit(code)


def _show_environment(env: Mapping[str, str]) -> None:
    """Write what /proc/PID/environ shows. The C library does not use this memory any more: all variables were set."""
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    if start and len(text) <= end - start:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def forget_unfinished_imports() -> None:
    """Let this fork import again what other threads of its parent were importing: they hold locks of these modules."""
    locks = importlib._bootstrap._module_locks  # type: ignore[attr-defined]
    for name in list(locks):
        if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
            del sys.modules[name]
    locks.clear()


def open_streams() -> None:
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)


def _run_main(command: list[str]) -> None:
    folders = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path[:] = ["", *folders, *_path]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(command[1], main.__dict__)
        return
    is_module = command[0] == "-m"
    name, *arguments = command[is_module:]
    sys.path[:] = [os.getcwd() if is_module else str(Path(name).resolve().parent), *folders, *_path]
    sys.argv = [name, *arguments]
    if is_module:
        # As with `python -m`, the module that runs is `__main__`, and imports of it make another one.
        sys.modules.pop(name, None)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        run_in_place(sys.argv[2:])
    if sys.argv[1] == "--worker":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the worker itself
        run_in_place(sys.argv[sys.argv.index("-c") :], can_fork=False, stdin=0)
    _path = sys.path[1:]
    _become(_serve(sys.argv[1]))
