"""Limits on connections: how many there are, and how long one may take to send a header.

Somebody who opens connections and sends nothing, or a byte at a time, would hold all file descriptors. A connection
that has sent a complete header with the right key may stay; of the others, each client address gets a share of the
descriptors and each connection some seconds. A client with thousands of requests in flight is not limited otherwise.
"""

import asyncio
import logging
import resource
from collections import defaultdict
from collections.abc import Callable
from typing import cast

from aiohttp import web
from aiohttp.http import HttpProcessingError
from orjson import dumps

logger = logging.getLogger("arealite.server")
# For aiohttp, which would log a traceback for everything that is not HTTP.
http_logger = logging.getLogger("arealite.server.http")
_CLIENT_ERRORS = (HttpProcessingError, web.RequestPayloadError)
http_logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _CLIENT_ERRORS)))

# The header of a request must arrive within this many sweeps. Sweeps are counted, not seconds, because a busy event
# loop reads what has arrived only after its timers.
HEADER_SWEEPS = 15
_SWEEP_INTERVAL_S = 1.0
_LINGER_S = 1.0
# Descriptors for everything else: files, pipes, process groups, connections that are being refused.
_RESERVED_FILES = 96
# Connections beyond the limit that wait for their answer to be read; others are closed without one.
_MAX_REFUSED = 16
# Connections that the event loop accepts at once, before they are counted.
ACCEPT_AT_ONCE = 16
_MIN_CONNECTIONS = 16
# The part of all connections that one address may hold without having sent a request.
_SHARE_BEFORE_REQUEST = 4


class Connections:
    """All connections of one server. Give `accept(server)` to `create_server`."""

    def __init__(self) -> None:
        self._open: dict[asyncio.BaseTransport, Connection] = {}
        # Connections from which a header is awaited, oldest first, by the client's address; with the sweep it began.
        self._awaited: defaultdict[str, dict[Connection, int]] = defaultdict(dict)
        # Connections beyond the limit, which are being refused.
        self._num_refused = 0
        self._num_sweeps = 0
        self._is_sweeping = False
        self._has_logged = False

    def accept(self, server: web.Server) -> Callable[[], asyncio.Protocol]:
        """Return the protocol factory for an aiohttp server."""
        return lambda: Connection(self, server)

    def of(self, request: web.Request) -> "Connection | None":
        """Return the connection of a request; None if the server does not use this class."""
        transport = request.transport
        return None if transport is None else self._open.get(transport)

    @property
    def limit(self) -> int:
        """The most connections at once."""
        return max(_MIN_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _RESERVED_FILES)

    def add(self, connection: "Connection", transport: asyncio.BaseTransport) -> bool:
        """Count a new connection; False if there are too many."""
        limit = self.limit
        if len(self._open) >= limit:
            if not self._has_logged:
                self._has_logged = True
                logger.warning("%d connections are open: more are refused. Raise the limit on open files", limit)
            return False
        self._open[transport] = connection
        self.await_header(connection)
        awaited = self._awaited[connection.address]
        if len(awaited) > max(1, limit // _SHARE_BEFORE_REQUEST):
            oldest = next(iter(awaited))
            oldest.refuse(429, "Too Many Requests", "too many connections without a request")
            # At once, because a descriptor is needed.
            oldest.close()
        return True

    def add_refused(self) -> bool:
        """Count a connection that gets an answer and is closed; False if there are too many."""
        self._num_refused += 1
        return self._num_refused <= _MAX_REFUSED

    def remove_refused(self) -> None:
        self._num_refused -= 1

    def remove(self, connection: "Connection", transport: asyncio.BaseTransport) -> None:
        self._open.pop(transport, None)
        self.stop_awaiting(connection)

    def await_header(self, connection: "Connection") -> None:
        """Give the connection some seconds for the header of a request."""
        self._awaited[connection.address][connection] = self._num_sweeps
        if not self._is_sweeping:
            self._is_sweeping = True
            asyncio.get_running_loop().call_later(_SWEEP_INTERVAL_S, self._sweep)

    def stop_awaiting(self, connection: "Connection") -> None:
        awaited = self._awaited.get(connection.address)
        if awaited is not None:
            awaited.pop(connection, None)
            if not awaited:
                del self._awaited[connection.address]

    def _sweep(self) -> None:
        self._num_sweeps += 1
        late = [
            connection
            for awaited in self._awaited.values()
            for connection, began in awaited.items()
            if self._num_sweeps - began > HEADER_SWEEPS
        ]
        for connection in late:
            connection.refuse(408, "Request Timeout", f"no request within {HEADER_SWEEPS} s")
        self._is_sweeping = bool(self._awaited)
        if self._is_sweeping:
            asyncio.get_running_loop().call_later(_SWEEP_INTERVAL_S, self._sweep)


class Connection(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's handler, and notes when requests begin and end."""

    __slots__ = ("_handler", "_is_idle", "_is_refused", "_limits", "_server", "_transport", "address")

    def __init__(self, limits: Connections, server: web.Server):
        self._limits, self._server = limits, server
        self._handler: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._is_idle = self._is_refused = False
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else ""
        if self._limits.add(self, transport):
            self._handler = self._server()
            self._handler.connection_made(transport)
        elif self._limits.add_refused():
            message = f"the server has {self._limits.limit} connections, as many as its limit on open files allows"
            self.refuse(503, "Service Unavailable", message)
        else:
            self._transport.abort()

    def begin_request(self) -> None:
        """Note that a whole header has arrived."""
        self._limits.stop_awaiting(self)
        self._is_idle = False

    def end_request(self) -> None:
        """Note that the request was answered: the next byte begins another one."""
        self._is_idle = True

    def data_received(self, data: bytes) -> None:
        if self._is_idle:
            self._is_idle = False
            self._limits.await_header(self)
        if self._handler is not None and not self._is_refused:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._handler is None else self._handler.eof_received()

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None
        self._limits.remove(self, self._transport)
        if self._handler is not None:
            self._handler.connection_lost(exc)
        else:
            self._limits.remove_refused()

    def refuse(self, status: int, reason: str, message: str) -> None:
        """Answer with an error instead of a request, and close."""
        assert self._transport is not None
        self._limits.stop_awaiting(self)
        self._is_refused = True
        body = dumps({"error": {"message": message, "code": status}, "success": False, "message": message})
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self._transport.write_eof()
        # Closed at once, the kernel would drop the answer if the client is still sending.
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)

    def close(self) -> None:
        assert self._transport is not None
        self._limits.remove(self, self._transport)
        self._transport.close()
