"""A small JSON client on aiohttp, for all requests to servers of the job.

Connection errors become `ServerError` (retry, perhaps elsewhere); an error status becomes `HttpError`, which keeps the
status. One `JsonClient` belongs to one event loop; its connections are kept alive and unlimited in number.
"""

import os
from typing import Any

import aiohttp
import orjson

from arealite.api.backends import API_KEY_ENV
from arealite.api.errors import HttpError, ServerError
from arealite.utils.text import clean

CONNECT_TIMEOUT_S = 10.0


class UnreachableError(ServerError):
    """No connection could be made: the server has not seen the request."""


class JsonClient:
    """JSON requests over kept-alive connections. Make it and use it on one event loop."""

    def __init__(self, api_key: str | None = None):
        headers = {"Content-Type": "application/json"}
        key = api_key or os.environ.get(API_KEY_ENV)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        # Timeouts are set per request: a generation may take an hour.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=300),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
            trust_env=False,
        )

    async def post(self, url: str, body: Any, timeout_s: float | None = None, *, is_json: bool = True) -> Any:
        """Return the answer; None with `is_json=False`, for an answer whose body does not matter."""
        return await self._request("POST", url, orjson.dumps(body), timeout_s, is_json)

    async def get(self, url: str, timeout_s: float | None = None) -> Any:
        return await self._request("GET", url, None, timeout_s)

    async def close(self) -> None:
        await self._session.close()

    async def _request(
        self, method: str, url: str, data: bytes | None, timeout_s: float | None, is_json: bool = True
    ) -> Any:
        try:
            # Connecting is quick or hopeless. Without a limit of its own, a dead host would take the whole timeout.
            timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
            async with self._session.request(method, url, data=data, timeout=timeout) as response:
                raw = await response.read()
                if response.status >= 400:
                    raise HttpError(url, response.status, _error_text(raw))
                return orjson.loads(raw) if raw and is_json else None
        except aiohttp.ConnectionTimeoutError as error:
            raise UnreachableError(f"{url} cannot be reached: no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except TimeoutError as error:
            raise ServerError(f"{url} did not answer within {timeout_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            kind = UnreachableError if isinstance(error, aiohttp.ClientConnectorError) else ServerError
            raise kind(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise ServerError(f"{url} answered something that is not JSON: {error}") from error


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
