"""Shared by all HTTP endpoints: JSON bodies, errors, waiting for the engine and for threads.

A bad request gets a status and a message that says what is wrong, never a traceback, and never ends the server. An
error in a stream that has begun is sent as its last event.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from arealite.api.errors import RequestError, ServerError, WeightUpdateError
from arealite.inference.engine import Engine
from arealite.inference.http.access import Access
from arealite.inference.sequence import Request, SampleOutput
from arealite.protocol.answer import error_body as protocol_error
from arealite.protocol.answer import event_bytes
from arealite.protocol.fields import FieldError
from arealite.utils.beside import run_beside as run_beside
from arealite.utils.http.connections import Connections
from arealite.utils.http.server import answer_request, describe_error

# Handlers call these as `common.NAME`.
from arealite.utils.http.server import flag as flag
from arealite.utils.http.server import json_response as json_response
from arealite.utils.http.server import read_object as read_object

ENGINE = web.AppKey("engine", Engine)
ACCESS = web.AppKey("access", Access)
CONNECTIONS = web.AppKey("connections", Connections)
logger = logging.getLogger("arealite.server")


@web.middleware
async def answer_all(request: web.Request, handler: Any) -> web.StreamResponse:
    """Check who asks, and answer every exception of a handler, also a bug, with a status and a JSON body."""

    def respond(error: Exception) -> web.Response:
        body = error_body(request, error)
        return json_response(body, body["error"]["code"])

    connection = request.app[CONNECTIONS].of(request)
    return await answer_request(request, handler, connection, request.app[ACCESS].check, respond)


def error_body(request: web.Request, error: Exception) -> dict[str, Any]:
    """Make the JSON body of an error. An unexpected exception is logged with its traceback."""
    statuses = {RequestError: 400, WeightUpdateError: 400, ServerError: 503}
    status, message = describe_error(request, error, statuses, logger)
    param = error.param if isinstance(error, FieldError) else None
    return {**protocol_error(status, message, param), "success": False, "message": message}


def check_token_ids(value: Any, name: str) -> list[int]:
    """Check that `value` is a list of token ids."""
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise RequestError(f"{name} must be a list of token ids")
    if value and not -(2**31) <= min(value) <= max(value) < 2**31:
        raise RequestError(f"{name} holds a token id that no vocabulary has")
    return value


class Mailbox:
    """Wakes the event loop once for all requests that finish in the same step of the engine's thread.

    A thousand sequences of equal length end in the same step: one wake-up for each would delay the engine's next step.
    """

    def __init__(self) -> None:
        self._arrivals: deque[asyncio.Future[None]] = deque()
        self._is_awake = False

    async def wait_for(self, future: Future[Any]) -> Any:
        """Wait for a future that the engine's thread resolves."""
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
        # First, so that later arrivals wake the loop again.
        self._is_awake = False
        while self._arrivals:
            arrival = self._arrivals.popleft()
            if not arrival.done():
                arrival.set_result(None)


MAILBOX = web.AppKey("mailbox", Mailbox)


async def finish(app: web.Application, request: Request) -> list[SampleOutput]:
    """Submit a request and wait for its outputs. A client that disconnects aborts its request."""
    engine = app[ENGINE]
    future = engine.submit(request)
    try:
        return _check_finite(await app[MAILBOX].wait_for(future))
    except asyncio.CancelledError:
        engine.abort_request(request)
        raise


# Sample, token, log-prob, text, and the likeliest tokens with their log-probs.
Progress = tuple[int, int, float, str, list[tuple[int, float]]]


async def progress(engine: Engine, request: Request) -> AsyncIterator[Progress | list[SampleOutput]]:
    """Submit a request; yields the progress of each token, then the outputs."""
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
            yield _check_finite(event.result()) if ended else event
    finally:
        if not ended:
            engine.abort_request(request)


def _check_finite(outputs: list[SampleOutput]) -> list[SampleOutput]:
    """Raise if non-finite numbers have ended a sequence: it has no valid tokens."""
    for output in outputs:
        if "status_code" in output.finish_reason:
            raise web.HTTPInternalServerError(reason=output.finish_reason["message"])
    return outputs


async def event_stream(
    request: web.Request, chunks: AsyncGenerator[bytes, None], has_named_events: bool = False
) -> web.StreamResponse:
    """Send encoded events, and `[DONE]` if they have no names. An error before them sets the status."""
    first = await anext(chunks)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        await response.prepare(request)
        await response.write(first)
        async for chunk in _append_error(request, chunks, has_named_events):
            # aiohttp ends the response at an empty chunk.
            if chunk:
                await response.write(chunk)
        if not has_named_events:
            await response.write(b"data: [DONE]\n\n")
    except ConnectionResetError:
        await chunks.aclose()
    return response


async def _append_error(
    request: web.Request, chunks: AsyncIterator[bytes], has_named_events: bool
) -> AsyncIterator[bytes]:
    """Yield the chunks, and an error as the last one: the status has been sent already."""
    try:
        async for chunk in chunks:
            yield chunk
    # Also a bug: the client must learn that the stream has ended early.
    except Exception as error:
        yield event_bytes(("error" if has_named_events else "", error_body(request, error)))
