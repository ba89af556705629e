"""AReaLite's part inside vLLM's HTTP server: every request needs the API key of the run.

vLLM finds it by `--middleware`. Its own check covers some paths only, and not those that load weights or call methods
of its workers. Runs in vLLM's process and environment: imports nothing but the standard library.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

_Send = Callable[[dict[str, Any]], Awaitable[None]]


class RequireKey:
    """ASGI middleware that answers 401 to requests without the bearer token of VLLM_API_KEY."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: _Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._expected):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": "the API key is missing or wrong"}'})
