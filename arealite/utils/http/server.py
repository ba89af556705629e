"""Parts of HTTP servers on aiohttp: JSON bodies, checks of who asks, work beside the event loop.

Used by the embedded inference server and by the gateway for agents. A bad request gets a status and a message that says
what is wrong, never a traceback, and never ends the server.
"""

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import json
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from orjson import dumps, loads

from arealite.api.errors import RequestError, ServerError
from arealite.utils.http.connections import ACCEPT_AT_ONCE, Connection, Connections, http_logger

BODY_TIMEOUT_S = 60.0
# Longest message of an error, in characters.
_MAX_MESSAGE = 2000
# Levels of lists and objects in a body. Python's `repr`, with which messages quote values, fails at about 950.
_MAX_DEPTH = 100
# Above the time for which our clients keep a connection, so that they are the ones who close it.
_KEEPALIVE_S = 330.0
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
logger = logging.getLogger("arealite.server")


def bearer_token(request: web.Request) -> bytes:
    """Return the token in `Authorization`, or in Anthropic's `x-api-key`; empty without one."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    given = given if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    return given.strip().encode(errors="surrogateescape")


def is_same_token(given: bytes, expected: bytes) -> bool:
    """Compare two tokens in constant time; an empty one equals none."""
    return hmac.compare_digest(given, expected) and bool(expected)


class LoopbackHosts:
    """Rejects names in `Host` that the DNS of others could point here; an address is no name."""

    def __init__(self) -> None:
        # Values that were found to be right.
        self._known: set[str] = set()

    def check(self, host: str) -> None:
        if host in self._known:
            return
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name not in ("", "localhost"):
                ipaddress.ip_address(name)
        except ValueError:
            reason = f"this server answers to localhost and addresses, not to the host {host!r:.100}"
            raise web.HTTPForbidden(reason=reason) from None
        if len(self._known) < 100:
            self._known.add(host)


def check_sender(request: web.Request) -> None:
    """Reject what a web page of another origin can send without asking: forms, plain text, empty bodies."""
    origin, host = request.headers.get("Origin"), request.headers.get("Host", "")
    if origin is not None and origin.partition("://")[2] != host:
        raise web.HTTPForbidden(reason=f"requests from web pages of {origin!r:.100} are not answered")
    if request.body_exists and request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(
            reason=f"send the body with Content-Type: application/json, got {request.content_type!r:.100}"
        )


async def answer_request(
    request: web.Request,
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    connection: Connection | None,
    check: Callable[[web.Request], bool],
    respond: Callable[[Exception], web.Response],
) -> web.StreamResponse:
    """Answer with what `handler` returns, or with `respond(error)` for whatever it raises, also a bug.

    `check` raises for somebody who may not ask, and returns whether the connection may stay: only then it counts as one
    that has sent a request.
    """
    may_stay = False
    try:
        may_stay = check(request)
        if may_stay and connection is not None:
            connection.begin_request()
        response = await handler(request)
    except ConnectionResetError:  # the client has closed the connection
        raise
    # Also a bug: it costs its own request, and `respond` logs it.
    except Exception as error:
        if isinstance(error, web.HTTPException) and error.status < 400:
            raise
        response = respond(error)
    finally:
        if may_stay and connection is not None:
            connection.end_request()
    if not may_stay:
        response.force_close()
    return response


def describe_error(
    request: web.Request,
    error: Exception,
    statuses: Mapping[type[Exception], int],
    log: logging.Logger,
    where: str = "the server, its log",
) -> tuple[int, str]:
    """Return status and message of an error; the first class of `statuses` that fits decides.

    An unexpected error is a bug: it is logged with its traceback, and the message says `where`.
    """
    status = next((status for kind, status in statuses.items() if isinstance(error, kind)), None)
    if isinstance(error, web.HTTPException):
        status, message = error.status, error.reason or error.text or ""
    elif status is not None:
        message = str(error)
    else:
        log.error("%s %s failed", request.method, request.path, exc_info=error)
        status, message = 500, f"bug in {where} has the traceback: {type(error).__name__}"
    # A message may quote the request, also what UTF-8 cannot express.
    return status, message[:_MAX_MESSAGE].encode(errors="backslashreplace").decode()


def json_response(body: Any, status: int = 200) -> web.Response:
    """Answer with a JSON body."""
    return web.Response(body=dumps(body), status=status, content_type="application/json")


async def read_object(request: web.Request) -> dict[str, Any]:
    """Read the body as a JSON object; an empty body is an empty object."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await request.read()
        body = _parse_json(raw) if raw else {}
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(reason=f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    except (web.RequestPayloadError, ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}")
    if raw.count(b"[") + raw.count(b"{") > _MAX_DEPTH and _is_deeper(body, _MAX_DEPTH):
        raise RequestError(f"the body has more than {_MAX_DEPTH} levels of lists and objects")
    return body


def _is_deeper(body: Any, depth: int) -> bool:
    """Return whether lists and objects are nested in more than `depth` levels."""
    level = [body]
    for _ in range(depth):
        children = (value for parent in level for value in (parent.values() if isinstance(parent, dict) else parent))
        level = [child for child in children if isinstance(child, dict | list)]
    return bool(level)


def _parse_json(raw: bytes) -> Any:
    try:
        return loads(raw)
    except ValueError:
        # Python's parser also accepts NaN and Infinity, which Python clients write.
        return json.loads(raw)


def flag(body: dict[str, Any], name: str) -> bool:
    """Read an optional boolean field; absent or null is False."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}")
    return bool(value)


def bind(host: str, port: int) -> socket.socket:
    """Bind a port without listening; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        # Another program may have taken a free port just now: a launcher tries again with another.
        raise ServerError(
            f"cannot listen on {host}:{port}: {error.strerror}. Use another port, or port=0 for any free one"
        ) from error
    return sock


async def listen(
    app: web.Application, sock: socket.socket, connections: Connections
) -> tuple[web.AppRunner, asyncio.Server]:
    """Start to serve `app` on a bound socket. Close the server and clean up the runner at the end."""
    settings: dict[str, Any] = {"access_log": None, "logger": http_logger, "keepalive_timeout": _KEEPALIVE_S}
    runner = web.AppRunner(app, shutdown_timeout=2.0, handler_cancellation=True, **settings)
    await runner.setup()
    assert runner.server is not None
    # asyncio accepts as many connections at once as this backlog, and also fails as often once out of descriptors.
    accept = connections.accept(runner.server)
    server = await asyncio.get_running_loop().create_server(accept, sock=sock, backlog=ACCEPT_AT_ONCE)
    sock.listen(4096)
    return runner, server


@contextlib.contextmanager
def stop_at_signals() -> Iterator[asyncio.Event]:
    """Give an event that SIGTERM and Ctrl+C set. Behind the block, both end the process as usual."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        # The loop removes them only after it has closed the pipe to which they write: a second signal would then print
        # a traceback.
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


class AcceptErrors:
    """Exception handler of the event loop that logs once that connections cannot be accepted.

    The event loop waits a second and tries again; its own handler logs a traceback for each attempt.
    """

    def __init__(self) -> None:
        self._has_logged = False

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _OUT_OF_RESOURCES:
            loop.default_exception_handler(context)
        elif not self._has_logged:
            self._has_logged = True
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            logger.warning(
                "cannot accept connections: %s. New ones wait until others close. The limit on open files is %d: "
                "raise the hard limit (ulimit -Hn)",
                error.strerror,
                limit,
            )
