"""A small JSON client on aiohttp, for all requests to servers of the job.

Connection errors become `ServerError` (retry, perhaps elsewhere); an error status becomes `HttpError`, which keeps the
status. One `JsonClient` belongs to one event loop. Its connections are kept alive; those for generation are at most as
many as the limit on open files allows.
"""

import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import orjson

from arealite.api.errors import HttpError, ServerError
from arealite.utils.console import show_message
from arealite.utils.process import raise_file_limit, spare_descriptors
from arealite.utils.text import clean

CONNECT_TIMEOUT_S = 10.0
MIN_CONNECTIONS = 8
# Connections that the clients of this process may open together.
_num_taken = 0
_taking = threading.Lock()


class UnreachableError(ServerError):
    """No connection could be made: the server has not seen the request."""


class JsonClient:
    """JSON requests over kept-alive connections. Make it and use it on one event loop.

    `api_key` is sent with every request: give it only to a client that speaks to servers of the job alone. With
    `num_processes` that connect to the same servers, each takes its share of the connections.
    """

    def __init__(self, api_key: str | None = None, num_processes: int = 1):
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self.max_connections = _take_connections(num_processes)
        # There are few control requests, and they must not wait for generations.
        self._session, self._generations = (
            # Timeouts are set per request: a generation may take an hour.
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=300),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=headers,
                trust_env=False,
            )
            for limit in (0, self.max_connections)
        )
        self._num_generating, self._has_warned = 0, False

    async def generate(self, url: str, body: Any, timeout_s: float | None = None) -> Any:
        """Post a request for generation; waits while all connections that may be open are in use."""
        self._num_generating += 1
        if self._num_generating > self.max_connections and not self._has_warned:
            self._has_warned = True
            show_message(
                f"warning: more than {self.max_connections} requests at once, the others wait for a connection: the "
                f"limit on open files is {raise_file_limit()}. Raise the hard limit (ulimit -Hn), or lower "
                "rollout.max_concurrent_rollouts"
            )
        try:
            return await self._request(self._generations, "POST", url, orjson.dumps(body), timeout_s)
        finally:
            self._num_generating -= 1

    async def events(self, url: str, body: Any, timeout_s: float | None = None) -> AsyncGenerator[Any, None]:
        """Post a request and yield the data of the server-sent events that answer it, up to `[DONE]`."""
        with _server_errors(url, timeout_s):
            timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
            async with self._generations.post(url, data=orjson.dumps(body), timeout=timeout) as response:
                if response.status >= 400:
                    raise HttpError(url, response.status, _error_text(await response.read()))
                rest = b""
                async for part in response.content.iter_any():
                    *lines, rest = (rest + part).split(b"\n")
                    for data in (line[5:].strip() for line in lines if line.startswith(b"data:")):
                        if data == b"[DONE]":
                            return
                        yield orjson.loads(data)
        raise ServerError(f"{url} ended its stream before its end")

    async def post(self, url: str, body: Any, timeout_s: float | None = None, *, is_json: bool = True) -> Any:
        """Return the answer; None with `is_json=False`, for an answer whose body does not matter."""
        return await self._request(self._session, "POST", url, orjson.dumps(body), timeout_s, is_json)

    async def get(self, url: str, timeout_s: float | None = None) -> Any:
        return await self._request(self._session, "GET", url, None, timeout_s)

    async def close(self) -> None:
        _give_back(self.max_connections)
        await self._session.close()
        await self._generations.close()

    @staticmethod
    async def _request(
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        data: bytes | None,
        timeout_s: float | None,
        is_json: bool = True,
    ) -> Any:
        with _server_errors(url, timeout_s):
            # Connecting is quick or hopeless. Without a limit of its own, a dead host would take the whole timeout.
            timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
            async with session.request(method, url, data=data, timeout=timeout) as response:
                raw = await response.read()
                if response.status >= 400:
                    raise HttpError(url, response.status, _error_text(raw))
                return orjson.loads(raw) if raw and is_json else None


@contextmanager
def _server_errors(url: str, timeout_s: float | None) -> Iterator[None]:
    """Raise what goes wrong with a connection as `ServerError`."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise UnreachableError(f"{url} cannot be reached: no connection within {CONNECT_TIMEOUT_S:g} s") from error
    except TimeoutError as error:
        raise ServerError(f"{url} did not answer within {timeout_s} s") from error
    except (aiohttp.ClientError, OSError) as error:
        kind = UnreachableError if isinstance(error, aiohttp.ClientConnectorError) else ServerError
        raise kind(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise ServerError(f"{url} answered something that is not JSON: {error}") from error


def _take_connections(num_processes: int) -> int:
    """Return how many connections a new client may open; the next one gets a part of the rest."""
    global _num_taken
    with _taking:
        spare = spare_descriptors() - _num_taken
        taken = max(MIN_CONNECTIONS, spare * 3 // 4 // num_processes)
        _num_taken += taken
    return taken


def _give_back(count: int) -> None:
    global _num_taken
    with _taking:
        _num_taken -= count


def _error_text(raw: bytes) -> str:
    """Return the message inside an error answer, in any of the forms that servers use."""
    text = clean(raw.decode(errors="replace"))
    try:
        parsed = orjson.loads(raw)
    except ValueError:
        return text
    if not isinstance(parsed, dict):
        return text
    error = parsed.get("error", parsed.get("message", parsed.get("detail", text)))
    if isinstance(error, dict):
        error = error.get("message", error)
    return clean(str(error))
