"""`Gateway`: OpenAI's and Anthropic's HTTP APIs in front of any engine, one address a session.

Agents reach the model by `base_url` and `api_key` alone. The gateway keeps what was sampled (`Session`) and answers
`/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`, `/v1/models` and `/v1/rl/reward` below the
address of a session. It runs on the event loop of its engine. Every session has a token of its own, a deadline, and
limits on calls and tokens; sessions do not see each other. `workflow.online` adds sessions that others start.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from aiohttp import web

from arealite.agents.answers import make_answers
from arealite.agents.requests import check_chat, check_completion, merge_sampling, set_reward
from arealite.agents.session import Prompt, Session
from arealite.agents.streaming import LiveStream
from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import AReaLiteError, ConfigError, RequestError, ServerError
from arealite.api.generation_args import LOOPBACK_HOSTS
from arealite.api.io_struct import ModelRequest, ModelResponse, OnTokens
from arealite.api.vision_api import ImageReader, stop_at_placeholders
from arealite.protocol import chat, completions
from arealite.protocol.answer import Answer, Head, Stream, Usage, error_body, to_json
from arealite.protocol.chat_apis import ApiRequest, chat_request, echo_of, message_request, response_request
from arealite.protocol.tool_calls import forced_prefix, style_of
from arealite.utils.beside import run_beside
from arealite.utils.http.connections import Connections
from arealite.utils.http.server import (
    LoopbackHosts,
    answer_request,
    bearer_token,
    bind,
    check_sender,
    describe_error,
    is_same_token,
    json_response,
    listen,
    read_object,
)
from arealite.utils.request_log import RequestLog, current_log, use_log
from arealite.utils.seeds import derive_seed

logger = logging.getLogger("arealite.agents")
_MAX_BODY_BYTES = 32 << 20
_ENDED = "the session has ended"
# Longer bodies are encoded, and longer answers decoded, beside the event loop.
_SHORT_BODY = 1 << 16
_SHORT_ANSWER_TOKENS = 1 << 14


@dataclass(frozen=True)
class SessionLimits:
    """Limits of each session, and the number of sessions at once."""

    max_calls: int = 256
    max_tokens: int = 1_000_000
    max_choices: int = 64
    max_sessions: int = 65_536


@dataclass(eq=False)
class OpenSession:
    """A session that accepts calls, and how to reach it."""

    id: str
    token: str
    base_url: str
    session: Session
    gconfig: GenerationHyperparameters
    seed: int | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    # Requests of its episode, if the run is recorded: calls come in tasks of their own.
    log: RequestLog | None = field(default_factory=current_log)


@dataclass(frozen=True)
class _Call:
    """A request that is ready to be generated; `prefix` begins the text of every answer."""

    found: OpenSession
    prompt: Prompt
    wanted: chat.ChatRequest | completions.CompletionRequest
    head: Head
    stream: Callable[[Head, int], Stream]
    # Keeps samples in the session, and returns the body of a response.
    record: Callable[[Head, list[ModelResponse], list[Answer], Usage], dict[str, Any]]
    prefix: str = ""


class Gateway:
    """Serves the sessions of one engine. `start` binds the port; `close` ends everything."""

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: SessionLimits | None = None,
        admin_token: str | None = None,
        admin_routes: dict[str, Callable[[web.Request], Any]] | None = None,
        on_end: Callable[["OpenSession", dict[str, Any]], None] | None = None,
        processor: ImageReader | None = None,
    ):
        if host not in LOOPBACK_HOSTS and not admin_token:
            raise ConfigError(f"a gateway on {host} can be reached from other machines: give it an admin token")
        self.engine, self.tokenizer, self.processor = engine, tokenizer, processor
        self.host, self.port, self.limits = host, port, limits or SessionLimits()
        self.admin_token = admin_token
        self.sessions: dict[str, OpenSession] = {}
        self.connections = Connections()
        self._hosts = LoopbackHosts() if host in LOOPBACK_HOSTS else None
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        # For sessions that others start: handlers of requests with the admin token by path, and what ends a session.
        self._admin_routes, self._on_end = admin_routes or {}, on_end

    async def start(self) -> None:
        """Listen. With port 0, `port` becomes the one that was free."""
        app = web.Application(middlewares=[self._answer_all], client_max_size=_MAX_BODY_BYTES)
        prefix = "/s/{session}/v1"
        routes = [web.get("/health", self._health), web.get(f"{prefix}/models", self._models)]
        routes += [web.post(prefix + path, handler) for path, handler in self._calls().items()]
        routes += [web.post(path, handler) for path, handler in self._admin_routes.items()]
        app.add_routes(routes)
        sock = bind(self.host, self.port)
        self.port = sock.getsockname()[1]
        self._runner, self._server = await listen(app, sock, self.connections)

    async def close(self) -> None:
        """End all sessions and stop listening; idempotent."""
        for session_id in list(self.sessions):
            self.close_session(session_id)
        if self._server is not None and self._runner is not None:
            self._server.close()
            await self._runner.cleanup()
            self._server = self._runner = None

    def open_session(
        self,
        gconfig: GenerationHyperparameters,
        seed: int | None = None,
        turn_discount: float = 1.0,
        template_kwargs: dict[str, Any] | None = None,
    ) -> OpenSession:
        """Start a session; end it with `close_session`.

        Sampling follows `gconfig`; see `requests.merge_sampling`.
        """
        if len(self.sessions) >= self.limits.max_sessions:
            raise ServerError(f"{len(self.sessions)} sessions are open, as many as are allowed: end some first")
        session = Session(self.tokenizer, template_kwargs or {}, turn_discount, self.processor)
        gconfig = gconfig if self.processor is None else stop_at_placeholders(self.processor, gconfig)
        name, host = secrets.token_hex(8), f"[{self.host}]" if ":" in self.host else self.host
        url = f"http://{host}:{self.port}/s/{name}/v1"
        self.sessions[name] = OpenSession(name, secrets.token_urlsafe(32), url, session, gconfig, seed)
        return self.sessions[name]

    def close_session(self, session_id: str) -> Session | None:
        """End a session and return it: calls in flight are cancelled, later ones are refused."""
        found = self.sessions.pop(session_id, None)
        if found is None:
            return None
        for task in found.running:
            task.cancel()
        return found.session

    def is_admin(self, request: web.Request) -> bool:
        return is_same_token(bearer_token(request), (self.admin_token or "").encode())

    def _calls(self) -> dict[str, Callable[[web.Request], Any]]:
        return {
            "/chat/completions": partial(self._converse, chat_request),
            "/responses": partial(self._converse, response_request),
            "/messages": partial(self._converse, message_request),
            "/completions": self._complete,
            "/rl/reward": self._reward,
            "/rl/end": self._end,
        }

    # --------------------------------------------------------------------------------------------- requests

    @web.middleware
    async def _answer_all(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Check who asks, and answer every exception, also a bug, with a status and a JSON body."""
        found: OpenSession | None = None

        def check(request: web.Request) -> bool:
            nonlocal found
            found, may_stay = self._authenticate(request)
            return may_stay

        async def handle(request: web.Request) -> web.StreamResponse:
            if found is None:
                return await handler(request)
            task = cast(asyncio.Task[Any], asyncio.current_task())
            found.running.add(task)
            try:
                return await handler(request)
            except asyncio.CancelledError:
                if found.id in self.sessions:
                    # The client has gone.
                    raise
                task.uncancel()
                raise web.HTTPGone(reason=_ENDED) from None
            finally:
                # The task may serve the next request of this connection too.
                found.running.discard(task)

        connection = self.connections.of(request)
        return await answer_request(request, handle, connection, check, partial(_error_response, request))

    def _authenticate(self, request: web.Request) -> tuple[OpenSession | None, bool]:
        """Return the session of a request, and whether it has a token; raises an HTTP error without one."""
        if self._hosts is not None:
            self._hosts.check(request.headers.get("Host", ""))
        if request.method == "POST":
            check_sender(request)
        name = request.match_info.get("session")
        if name is None:
            is_admin = self.is_admin(request)
            if not is_admin and request.path != "/health":
                raise web.HTTPUnauthorized(reason="missing or wrong admin token")
            return None, is_admin
        given = bearer_token(request) or request.headers.get("x-api-key", "").encode(errors="surrogateescape")
        found = self.sessions.get(name)
        # Compared also without a session, so that the time does not tell which sessions there are.
        is_own = is_same_token(given, (found.token if found else secrets.token_urlsafe(32)).encode())
        if found is None or not is_own:
            raise web.HTTPUnauthorized(reason="the session has ended, or this is not its token")
        return found, True

    def _session_of(self, request: web.Request) -> OpenSession:
        """Return the session of a request that was authenticated just now."""
        return self.sessions[request.match_info["session"]]

    async def _health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok", "sessions": len(self.sessions)})

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": "policy", "object": "model", "created": 0, "owned_by": "arealite"}
        return json_response({"object": "list", "data": [entry]})

    async def _reward(self, request: web.Request) -> web.Response:
        """Take a reward for the session, or for the call that `id` names."""
        found, body = self._session_of(request), await read_object(request)
        set_reward(found.session, body)
        return json_response({"success": True})

    async def _end(self, request: web.Request) -> web.Response:
        """End a session that was started from outside."""
        found, body = self._session_of(request), await read_object(request)
        if self._on_end is None:
            raise RequestError("the session ends with its agent")
        # This request is one of the session's and would be cancelled with it.
        found.running.discard(cast(asyncio.Task[Any], asyncio.current_task()))
        self._on_end(found, body)
        return json_response({"success": True})

    async def _converse(self, read: Callable[[dict[str, Any]], ApiRequest], request: web.Request) -> web.StreamResponse:
        """Answer a conversation, in the form of any of the three APIs."""
        found, body = self._session_of(request), await read_object(request)
        api = read(body)
        wanted = api.request
        check_chat(wanted)
        prefix = ""
        if wanted.tool_choice in ("required", "named"):
            prefix = forced_prefix(style_of(self.tokenizer), wanted.tool_name)

        def open_prompt() -> Prompt:
            return found.session.open_chat(wanted.messages, wanted.tools, wanted.template_variables, prefix)

        async with found.lock:
            self._check_limits(found)
            is_short = (request.content_length or _MAX_BODY_BYTES) <= _SHORT_BODY and not wanted.has_images
            prompt = open_prompt() if is_short else await run_beside(open_prompt)

        def record(head: Head, samples: list[ModelResponse], answers: list[Answer], usage: Usage) -> dict[str, Any]:
            result = api.write(head, answers, usage)
            for i, (sample, echo) in enumerate(zip(samples, echo_of(api, result), strict=True)):
                found.session.add(prompt, sample, head.id if i == 0 else f"{head.id}-{i}", echo)
            return result

        return await self._answer(request, _Call(found, prompt, wanted, self._head(body), api.stream, record, prefix))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a text completion."""
        found, body = self._session_of(request), await read_object(request)
        wanted = completions.parse(body)
        text = check_completion(wanted)
        async with found.lock:
            self._check_limits(found)
            prompt = found.session.open_text(text)

        def record(head: Head, samples: list[ModelResponse], answers: list[Answer], usage: Usage) -> dict[str, Any]:
            for i, (sample, answer) in enumerate(zip(samples, answers, strict=True)):
                found.session.add(prompt, sample, head.id if i == 0 else f"{head.id}-{i}", text=answer.text)
            return completions.result(head, answers, usage)

        def stream(head: Head, num_prompt_tokens: int) -> Stream:
            return completions.CompletionStream(head, wanted)

        return await self._answer(request, _Call(found, prompt, wanted, self._head(body), stream, record))

    async def _answer(self, request: web.Request, call: "_Call") -> web.StreamResponse:
        """Generate, keep what was sampled, and answer with a body or a stream."""
        found, wanted = call.found, call.wanted
        gconfig, is_ignored = merge_sampling(found.gconfig, wanted.sampling, self.limits.max_choices)
        found.session.counts["ignored_sampling"] += is_ignored
        if not wanted.stream:
            samples = await self._generate(call, gconfig)
            result = await self._record(call, samples, await self._answers(call, samples))
            return web.Response(body=to_json(result), content_type="application/json")
        stream = call.stream(call.head, len(call.prompt.ids))
        live = LiveStream(request, stream, self.tokenizer, wanted, gconfig.n_samples, call.prefix, call.prompt.ids)
        try:
            samples = await live.follow(asyncio.create_task(self._generate(call, gconfig, live.tell)))
            answers = await self._answers(call, samples)
            live.check(answers)
            await self._record(call, samples, answers)
            return await live.finish(answers, _usage(call, samples))
        except (Exception, asyncio.CancelledError) as error:
            is_gone = isinstance(error, asyncio.CancelledError) and found.id in self.sessions
            if is_gone or not live.has_begun:
                raise
            if isinstance(error, asyncio.CancelledError):
                cast(asyncio.Task[Any], asyncio.current_task()).uncancel()
                error = web.HTTPGone(reason=_ENDED)
            return await live.fail(error, partial(_describe, request))

    async def _record(self, call: "_Call", samples: list[ModelResponse], answers: list[Answer]) -> dict[str, Any]:
        """Add samples to the session; returns the body of a response."""
        # A thread may be reading the session.
        async with call.found.lock:
            return call.record(call.head, samples, answers, _usage(call, samples))

    # ------------------------------------------------------------------------------------------- generation

    def _check_limits(self, found: OpenSession) -> None:
        counts, limits = found.session.counts, self.limits
        tokens = counts["sampled_tokens"] + counts["observed_tokens"]
        if counts["calls"] >= limits.max_calls or tokens >= limits.max_tokens:
            raise RequestError(
                f"the session has made {counts['calls']} calls with {tokens} new tokens; allowed are "
                f"{limits.max_calls} and {limits.max_tokens}"
            )

    async def _generate(
        self, call: "_Call", gconfig: GenerationHyperparameters, on_tokens: OnTokens | None = None
    ) -> list[ModelResponse]:
        found, seed = call.found, call.found.seed
        if seed is not None:
            # The engine counts the choices from the seed on.
            seed = derive_seed(seed, call.prompt.number)
        images = call.prompt.images
        request = ModelRequest(
            call.prompt.ids, gconfig, seed=seed, metadata={"session": found.id}, on_tokens=on_tokens,
            images=[image.data for image in images], image_spans=[(image.start, image.end) for image in images],
        )  # fmt: skip
        use_log(found.log)
        if gconfig.n_samples == 1:
            return [await self.engine.agenerate(request)]
        return await self.engine.agenerate_group(request)

    async def _answers(self, call: "_Call", samples: list[ModelResponse]) -> list[Answer]:
        stop = call.wanted.sampling.get("stop") or []
        make = partial(make_answers, self.tokenizer, samples, call.wanted, call.prefix, stop)
        is_short = sum(len(sample.output_tokens) for sample in samples) <= _SHORT_ANSWER_TOKENS
        return make() if is_short else await run_beside(make)

    def _head(self, body: dict[str, Any]) -> Head:
        model = body.get("model")
        return Head(secrets.token_hex(12), model if isinstance(model, str) else "policy", int(time.time()))


def _usage(call: _Call, samples: list[ModelResponse]) -> Usage:
    return Usage(len(call.prompt.ids), sum(len(sample.output_tokens) for sample in samples))


def _error_response(request: web.Request, error: Exception) -> web.Response:
    status, body = _describe(request, error)
    return json_response(body, status)


def _describe(request: web.Request, error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and the body that answer an exception."""
    statuses = {ServerError: 503, AReaLiteError: 400}
    status, message = describe_error(request, error, statuses, logger, "the gateway, the trainer's log")
    return status, error_body(status, message, getattr(error, "param", None))
