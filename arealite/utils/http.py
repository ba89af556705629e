"""A small JSON client on aiohttp, for everybody who talks to a server of the job.

Errors of the connection become `ServerError` (worth another attempt, perhaps elsewhere), refusals of a request keep their status in
`HttpError`. One `HttpClient` belongs to one event loop; its connections are kept alive and not limited in number.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from typing import Any

import aiohttp

from arealite.api.errors import ServerError

API_KEY_ENV = "AREALITE_API_KEY"
CONNECT_TIMEOUT_S = 10.0

dumps: Callable[[Any], bytes]
loads: Callable[[bytes], Any]
if importlib.util.find_spec("orjson") is not None:
    _orjson = importlib.import_module("orjson")
    dumps, loads = _orjson.dumps, _orjson.loads
else:
    loads = json.loads

    def dumps(obj: Any) -> bytes:
        return json.dumps(obj, separators=(",", ":")).encode()


class HttpError(ServerError):
    """A server answered with an error status."""

    def __init__(self, url: str, status: int, text: str):
        super().__init__(f"{url} answered {status}: {text[:2000]}")
        self.status = status
        self.text = text

    @property
    def is_refusal(self) -> bool:
        """The request itself is wrong: no other server would take it either."""
        return 400 <= self.status < 500 and self.status not in (401, 403, 408, 425, 429)


class UnreachableError(ServerError):
    """No connection could be made: nobody has seen the request."""


class HttpClient:
    """JSON requests over kept-alive connections. Make it and use it on one event loop."""

    def __init__(self, api_key: str | None = None):
        headers = {"Content-Type": "application/json"}
        key = api_key or os.environ.get(API_KEY_ENV)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        # time-outs are given per request, because a generation may rightly take an hour
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=300),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
            trust_env=False,
        )

    async def post(self, url: str, body: Any, timeout_s: float | None = None, *, is_json: bool = True) -> Any:
        """The answer; None if it `is_json=False` and so of no interest."""
        return await self._request("POST", url, dumps(body), timeout_s, is_json)

    async def get(self, url: str, timeout_s: float | None = None) -> Any:
        return await self._request("GET", url, None, timeout_s)

    async def close(self) -> None:
        await self._session.close()

    async def _request(
        self, method: str, url: str, data: bytes | None, timeout_s: float | None, is_json: bool = True
    ) -> Any:
        try:
            # connecting is quick or hopeless; without its own limit a dead host takes the whole time-out
            timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
            async with self._session.request(method, url, data=data, timeout=timeout) as response:
                raw = await response.read()
                if response.status >= 400:
                    raise HttpError(url, response.status, _error_text(raw))
                return loads(raw) if raw and is_json else None
        except aiohttp.ConnectionTimeoutError as error:
            told = f"no connection within {CONNECT_TIMEOUT_S:g} s"
            raise UnreachableError(f"{url} cannot be reached: {told}") from error
        except TimeoutError as error:
            raise ServerError(f"{url} did not answer within {timeout_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            told = f"{type(error).__name__}: {error}"
            is_unseen = isinstance(error, aiohttp.ClientConnectorError)
            kind = UnreachableError if is_unseen else ServerError
            raise kind(f"{url} cannot be reached: {told}") from error
        except ValueError as error:
            raise ServerError(f"{url} answered something that is not JSON: {error}") from error


def _error_text(raw: bytes) -> str:
    """The message inside an error answer, in the forms servers use."""
    text = raw.decode(errors="replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    if not isinstance(parsed, dict):
        return text
    error = parsed.get("error", parsed.get("message", parsed.get("detail", text)))
    if isinstance(error, dict):
        error = error.get("message", error)
    return str(error)
