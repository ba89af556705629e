"""What all HTTP endpoints of the server share: reading JSON, answering errors, the bearer token, awaiting the engine.

Guarantees that a bad request gets a status and a message that says what was wrong, and never a stack trace or a dead server. What fails in
a stream that has begun is told as its last event.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from arealite.api.errors import RequestError, ServerError, WeightUpdateError
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SampleOutput
from arealite.utils.json_client import dumps

ENGINE = web.AppKey("engine", Engine)
API_KEY = web.AppKey("api_key", str)
OPEN_PATHS = ("/health",)
logger = logging.getLogger("arealite.server")


@web.middleware
async def errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        check_token(request)
        return await handler(request)
    except ConnectionResetError:  # the client has gone: there is nobody to tell
        raise
    except Exception as error:  # the top of a request: also a bug is told, and ends this one only
        if isinstance(error, web.HTTPException) and error.status < 400:
            raise
        body = error_body(request, error)
        return json_response(body, body["error"]["code"])


def check_token(request: web.Request) -> None:
    expected = request.app[API_KEY]
    if not expected or request.path in OPEN_PATHS:
        return
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), expected.encode()):
        raise web.HTTPUnauthorized(reason="missing or wrong bearer token")


def error_body(request: web.Request, error: Exception) -> dict[str, Any]:
    """What a client is told of a failure; the server's log keeps the traceback of one that nobody foresaw."""
    if isinstance(error, RequestError | WeightUpdateError):
        status, message = 400, str(error)
    elif isinstance(error, ServerError):
        status, message = 503, str(error)
    elif isinstance(error, web.HTTPException):
        status, message = error.status, error.reason or error.text or ""
    else:
        logger.error("%s %s failed", request.method, request.path, exc_info=error)
        status, message = 500, f"a bug of the server, whose log says more: {error!r}"
    return {"error": {"message": message, "code": status}, "success": False, "message": message}


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=dumps(body), status=status, content_type="application/json")


async def read_object(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object; an empty body is an empty object."""
    try:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
    except (web.RequestPayloadError, ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}")
    return bool(value)


def token_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise RequestError(f"{name} must be a list of token ids")
    if value and not -(2**31) <= min(value) <= max(value) < 2**31:
        raise RequestError(f"{name} holds a token id that no vocabulary has")
    return value


async def answer(future: Future[Any]) -> Any:
    """Wait for the engine without blocking the event loop."""
    return await asyncio.wrap_future(future)


class Mailbox:
    """Carries finished requests from the engine's thread to the event loop, all those of one step with one wake-up.

    A thousand sequences of equal length end in the same step: waking the loop for each would hold up the engine's next one.
    """

    def __init__(self) -> None:
        self._arrivals: deque[asyncio.Future[None]] = deque()
        self._is_awake = False

    async def wait_for(self, future: Future[Any]) -> Any:
        loop = asyncio.get_running_loop()
        arrival: asyncio.Future[None] = loop.create_future()

        def arrive(done: Future[Any]) -> None:
            self._arrivals.append(arrival)
            if not self._is_awake:
                self._is_awake = True
                loop.call_soon_threadsafe(self._deliver)

        future.add_done_callback(arrive)
        await arrival
        return future.result()

    def _deliver(self) -> None:
        self._is_awake = False  # first, so that whatever arrives from now on wakes the loop again
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if not arrival.done():
                arrival.set_result(None)


MAILBOX = web.AppKey("mailbox", Mailbox)


async def finish(app: web.Application, request: Request) -> list[SampleOutput]:
    """Submit a request and await its outputs. If the client goes away, the request ends too."""
    engine = app[ENGINE]
    future = engine.submit(request)
    try:
        return _whole(await app[MAILBOX].wait_for(future))
    except asyncio.CancelledError:
        engine.abort(request.rid)
        raise


async def progress(engine: Engine, request: Request) -> AsyncIterator[tuple[int, int, float, str] | list[SampleOutput]]:
    """Submit a request and yield (sample, token, log-prob, text) as they come, then the outputs."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Any] = asyncio.Queue()

    def send(event: Any) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    request.on_progress = lambda *event: send(event)
    future = engine.submit(request)
    future.add_done_callback(send)
    ended = False
    try:
        while not ended:
            event = await events.get()
            ended = isinstance(event, Future)
            yield _whole(event.result()) if ended else event
    finally:
        if not ended:
            engine.abort(request.rid)


def _whole(outputs: list[SampleOutput]) -> list[SampleOutput]:
    """The outputs, unless numbers that are not finite have ended one of them: those are no tokens, and no JSON."""
    for output in outputs:
        if "status_code" in output.finish_reason:
            raise web.HTTPInternalServerError(reason=output.finish_reason["message"])
    return outputs


async def event_stream(request: web.Request, chunks: AsyncIterator[str]) -> web.StreamResponse:
    """Server-sent events (chunks are JSON), closed by `[DONE]`. The first chunk is made before the status is sent."""
    first = await anext(chunks)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        await response.write(f"data: {first}\n\n".encode())
        async for chunk in _tell_failure(request, chunks):
            await response.write(f"data: {chunk}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
    except ConnectionResetError:
        await chunks.aclose()
    return response


async def _tell_failure(request: web.Request, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    """The chunks, and if there is no next one because of a failure, that: the status has been sent."""
    try:
        async for chunk in chunks:
            yield chunk
    except Exception as error:
        yield dumps(error_body(request, error)).decode()
