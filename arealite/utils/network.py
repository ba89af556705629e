"""Free ports and the address of this machine, for launchers, servers and tests.

`free_port` never returns a port that a living process got from it, also across processes: each port is reserved by a
name in Linux's abstract socket namespace, which the kernel removes with the process that holds it.
"""

import contextlib
import fcntl
import random
import socket
import struct

from arealite.api.errors import ServerError

# Part of gloo's error message when another rank does not join a collective in time.
GROUP_TIMED_OUT = "Timed out waiting"
# Below the range of outgoing connections (32768 and up), so that none of them takes the port.
_PORTS = range(12000, 32000)
_SIOCGIFADDR = 0x8915
_reservations: dict[int, socket.socket] = {}


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port, reserved until this process ends or calls `release_port`."""
    for port in random.Random().sample(_PORTS, 200):
        if _reserve(port):
            if is_free(port, host):
                return port
            release_port(port)
    raise ServerError(f"found no free port on {host} in {_PORTS.start}–{_PORTS.stop}: end other processes there")


def release_port(port: int) -> None:
    """Release a reserved port for other callers of `free_port`."""
    reservation = _reservations.pop(port, None)
    if reservation is not None:
        reservation.close()


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on this port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        # Like servers, count a port in TIME_WAIT as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def host_address(peer: str = "192.0.2.1") -> str:
    """Return the address of this machine that `peer` sees; loopback if there is no network."""
    try:
        family, _, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            # Sends nothing; the kernel only chooses the interface.
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def interface_towards(peer: str) -> str:
    """Return the name of the network interface towards `peer`; empty for this machine itself."""
    address = host_address(peer)
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            # Interfaces without an IPv4 address raise.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address and not address.startswith("127."):
                    return name
    return ""


def _reserve(port: int) -> bool:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0arealite-port-{port}")
    except OSError:
        claim.close()
        return False
    _reservations[port] = claim
    return True
