"""Ports and addresses. Launchers, servers and tests take free ports here.

`free_port` never gives the same port twice while the first taker lives, also across processes: each port is reserved by
a name in Linux's abstract socket space, which vanishes with the process that holds it.
"""

from __future__ import annotations

import contextlib
import random
import socket

from arealite.api.errors import ServerError

GROUP_TIMED_OUT = "Timed out waiting"  # how gloo says that another rank did not come
# Below the range that the kernel hands to outgoing connections (32768 and up), so that none of those takes the port.
_PORTS = range(12000, 32000)
_reservations: dict[int, socket.socket] = {}


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on, reserved until this process ends or calls `release_port`."""
    for port in random.Random().sample(_PORTS, 200):
        if _reserve(port):
            if is_free(port, host):
                return port
            release_port(port)
    raise ServerError(f"found no free port on {host} in {_PORTS.start}–{_PORTS.stop}")


def release_port(port: int) -> None:
    """Give a reserved port back to other callers of `free_port`."""
    reservation = _reservations.pop(port, None)
    if reservation is not None:
        reservation.close()


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on this port now."""
    with contextlib.closing(socket.socket(_family(host), socket.SOCK_STREAM)) as probe:
        # As servers do: a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def host_address() -> str:
    """The address under which other machines reach this one (loopback when there is no network)."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            # sends nothing: only asks which interface would be used
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _reserve(port: int) -> bool:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0arealite-port-{port}")
    except OSError:
        claim.close()
        return False
    _reservations[port] = claim
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
