"""Machines made of Linux namespaces on one host, for tests of runs over several machines.

A machine has its own network stack (address, loopback, ports), its own /dev/shm and its own host name. The files are
shared, as a shared folder would be. A bridge in a namespace of its own connects the machines; `tc` limits bandwidth.
Nothing appears in the network of the host. Every namespace is held by one shell, which also kills what is left in it
when the process that made the machines has ended, however it ended: then the kernel removes the namespaces.

`python -m tests.machines enter PID -m MODULE …` runs a Python program on the machine that process PID holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import runpy
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import warm_python

ROOT = Path(__file__).resolve().parents[1]
# Holds the namespaces until process $0 has ended, then kills all others in this network.
_HOLD = """
mount -t tmpfs tmpfs /dev/shm && hostname "$1" && ip link set lo up && echo ready || exit 1
exec >/dev/null 2>&1
# A dead process keeps its entry until its parent has asked for its exit code.
while grep -q '^State:[[:space:]]*[A-WYa-w]' "/proc/$0/status"; do sleep 1; done
mine=$(readlink /proc/$$/ns/net)
for entry in /proc/[0-9]*; do
    pid=${entry#/proc/}
    [ "$pid" != $$ ] && [ "$(readlink "$entry/ns/net")" = "$mine" ] && kill -9 "$pid"
done
"""
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_MAX_FRAME_BYTES = 1 << 17


@functools.cache
def why_not() -> str:
    """Return why machines cannot be made here; empty if they can."""
    command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", "ip link add name b type bridge && tc qdisc show"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError as error:
        return f"namespaces need unshare, ip and tc: {error}"
    return f"no permission to make network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Namespaces:
    """The namespaces that one shell holds."""

    def __init__(self, name: str):
        self.name = name
        self._shell = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-c", _HOLD, str(os.getpid()), name],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._shell.stdout is not None
        self.pid = self._shell.pid
        if self._shell.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the namespaces of {name} could not be made")

    def enter(self) -> None:
        """Move this process into the namespaces. It must have one thread."""
        enter(self.pid)

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Let this thread, and threads that it starts, use the machine's network."""
        thread = Path(f"/proc/self/task/{threading.get_native_id()}/ns/net")
        with thread.open() as before, Path(f"/proc/{self.pid}/ns/net").open() as there:
            _setns(there.fileno())
            try:
                yield
            finally:
                _setns(before.fileno())

    def shell(self, script: str) -> None:
        """Run a shell script in the namespaces."""
        done = subprocess.run(["sh", "-ec", script], preexec_fn=self.enter, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"on {self.name}: {script!r} failed: {done.stderr}")

    def pids(self) -> list[int]:
        """Return the processes in this network, without those that hold it."""
        mine = os.readlink(f"/proc/{self.pid}/ns/net")
        found = []
        for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            # A process may end meanwhile.
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/net") == mine and os.getpgid(pid) != self.pid:
                    found.append(pid)
        return [pid for pid in found if pid != os.getpid()]

    def kill_processes(self) -> None:
        """End all processes in this network with SIGKILL, also those that they start meanwhile."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def close(self) -> None:
        if self._shell.poll() is None:
            self.kill_processes()
            os.killpg(self.pid, signal.SIGKILL)
        self._shell.communicate()


class Machine(Namespaces):
    """One machine. `address` is its address for the others."""

    def __init__(self, number: int, switch: Namespaces):
        super().__init__(f"machine{number}")
        self.address = f"10.77.0.{number + 1}"
        self._switch, self._port = switch, f"p{number}"
        self._relay: subprocess.Popen | None = None
        switch.shell(
            f"ip link add name {self._port} type veth peer name eth0 netns {self.pid}\n"
            f"ip link set {self._port} master switch up"
        )
        self.shell(f"ip address add {self.address}/16 dev eth0; ip link set eth0 up; ip route add default dev eth0")

    @property
    def python(self) -> list[str]:
        """What to write between `python` and its arguments to run it on this machine."""
        return ["-m", "tests.machines", "enter", str(self.pid)]

    def start(self, command: Sequence[str | Path], *, warm: bool = True, **options: Any) -> Any:
        """Start `python COMMAND…` on this machine; options as in `warm_python.start`."""
        options = {"cwd": ROOT, **options}
        if warm:
            return warm_python.start([*self.python, *command], **options)
        return subprocess.Popen([sys.executable, *self.python, *map(str, command)], text=True, **options)

    def slow(self, delay_ms: float = 0.0, mbit: float = 0.0) -> None:
        """Delay every frame to and from this machine, and limit the bandwidth; 0 removes either."""
        limit = f"root tbf rate {mbit:g}mbit burst 32kb latency 1s"
        for place, device in ((self._switch, self._port), (self, "eth0")):
            place.shell(f"tc qdisc {f'replace dev {device} {limit}' if mbit else f'del dev {device} root || true'}")
        self._end_relay()
        bridge = "switch"
        if delay_ms:
            bridge = f"b{self._port}"
            self._start_relay(bridge, delay_ms)
        self._switch.shell(f"ip link set {self._port} master {bridge}")

    def partition(self) -> None:
        """Drop all frames to and from this machine. Nobody is told: connections stay half open."""
        self._switch.shell(f"bridge link set dev {self._port} state 0")

    def rejoin(self) -> None:
        """End a partition."""
        self._switch.shell(f"bridge link set dev {self._port} state 3")

    def kill(self) -> None:
        """Cut the power: the link goes down first, so that no connection is closed, then all processes end."""
        self.partition()
        self.shell("ip link set eth0 down")
        self.kill_processes()

    def boot(self) -> None:
        """Bring the link back after `kill`. Nothing runs yet."""
        self.shell("ip link set eth0 up; ip route replace default dev eth0")
        self.rejoin()

    def _start_relay(self, bridge: str, delay_ms: float) -> None:
        """Put a process that delays frames between the machine's port and the bridge of all."""
        names = [f"t{self._port}", f"u{self._port}"]
        self._relay = subprocess.Popen(
            [sys.executable, "-m", "tests.machines", "relay", *names, str(delay_ms / 1000)],
            preexec_fn=self._switch.enter,
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != b"ready\n":
            raise RuntimeError("the process that delays frames did not start")
        self._switch.shell(
            f"ip link add name {bridge} type bridge; ip link set {bridge} up\n"
            f"ip link set {names[0]} master {bridge} up; ip link set {names[1]} master switch up"
        )

    def _end_relay(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
            self._relay = None
            self._switch.shell(f"ip link del b{self._port}")

    def close(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        super().close()


@contextlib.contextmanager
def machines(count: int, delay_ms: float = 0.0, mbit: float = 0.0) -> Iterator[list[Machine]]:
    """Make machines on one switch, or skip the test. All of them, and what runs on them, end with the block."""
    if why_not():
        pytest.skip(why_not())
    with contextlib.ExitStack() as stack:
        switch = Namespaces("switch")
        stack.callback(switch.close)
        switch.shell("ip link add name switch type bridge; ip link set switch up")
        made = []
        for number in range(count):
            made.append(Machine(number, switch))
            stack.callback(made[-1].close)
            if delay_ms or mbit:
                made[-1].slow(delay_ms, mbit)
        yield made


# ------------------------------------------------------------------------------------- inside the namespaces


def enter(pid: int) -> None:
    """Move this process, which must have one thread, into the namespaces that process `pid` holds."""
    folder = os.getcwd()
    for kind in ("net", "uts", "mnt"):
        with Path(f"/proc/{pid}/ns/{kind}").open() as namespace:
            _setns(namespace.fileno())
    os.chdir(folder)


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def _open_tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def relay(one: str, other: str, delay_s: float) -> None:
    """Copy frames between two TAP devices, each `delay_s` after it came. For kernels without netem."""
    ends = [_open_tap(one), _open_tap(other)]
    print("ready", flush=True)
    queues: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    while True:
        due = [queue[0][0] for queue in queues.values() if queue]
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        for end in select.select(ends, [], [], timeout_s)[0]:
            target = ends[1 - ends.index(end)]
            queues[target].append((time.monotonic() + delay_s, os.read(end, _MAX_FRAME_BYTES)))
        now = time.monotonic()
        for end, queue in queues.items():
            while queue and queue[0][0] <= now:
                # Like a switch, drop what the device does not take.
                with contextlib.suppress(OSError):
                    os.write(end, queue.popleft()[1])


def run_program(arguments: list[str]) -> None:
    """Run `-m MODULE …` or `SCRIPT …` in this process."""
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    run: Callable[..., Any] = runpy.run_module if is_module else runpy.run_path
    run(sys.argv[0], run_name="__main__", **({"alter_sys": True} if is_module else {}))


if __name__ == "__main__":
    if sys.argv[1] == "relay":
        relay(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    enter(int(sys.argv[2]))
    run_program(sys.argv[3:])
