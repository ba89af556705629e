"""The HTTP server of the embedded engine: SGLang's native endpoints and OpenAI's, on aiohttp.

Started by `python -m arealite.cli.serve`. The engine runs in its own thread; handlers hand it requests and await
futures. `/health` answers 200 while the engine can serve and 503 with the cause once it has failed.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable
from typing import Any, Literal

from aiohttp import web

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError, RequestError, ServerError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.engine import Engine
from arealite.inference.http.common import (
    API_KEY,
    ENGINE,
    MAILBOX,
    Mailbox,
    answer,
    errors_as_json,
    finish,
    flag,
    json_response,
    logger,
    read_object,
)
from arealite.inference.http.generate_api import generate
from arealite.inference.http.openai_api import chat_completions, completions, models
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.weight_receiver import WeightReceiver
from arealite.inference.weights import WeightSource
from arealite.weights.select import read_probe

RECEIVER = web.AppKey("receiver", WeightReceiver)
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MAX_BODY_BYTES = 256 << 20


def make_app(engine: Engine, config: ServerConfig) -> web.Application:
    """Make the web application with all routes."""
    app = web.Application(middlewares=[errors_as_json], client_max_size=_MAX_BODY_BYTES)
    app[ENGINE] = engine
    app[API_KEY] = config.api_key or ""
    app[MAILBOX] = Mailbox()
    app[RECEIVER] = WeightReceiver()
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/health_generate", health_generate),
            web.get("/model_info", model_info),
            web.get("/get_model_info", model_info),
            web.get("/server_info", server_info),
            web.get("/weights_checker", weights_checker),
            web.post("/generate", generate),
            web.post("/abort_request", abort_request),
            web.post("/pause_generation", pause_generation),
            web.post("/continue_generation", continue_generation),
            web.post("/flush_cache", flush_cache),
            web.post("/update_weights_from_disk", update_weights_from_disk),
            web.post("/update_weights_from_shm", update_weights_from_shm),
            web.post("/load_lora_adapter", load_lora_adapter),
            web.post("/unload_lora_adapter", unload_lora_adapter),
            web.post("/init_weights_update_group", init_weights_update_group),
            web.post("/update_weights_from_distributed", update_weights_from_distributed),
            web.post("/update_weight_version", update_weight_version),
            web.post("/release_memory_occupation", release_memory_occupation),
            web.post("/resume_memory_occupation", resume_memory_occupation),
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.get("/v1/models", models),
            web.get("/v1/models/{name:.+}", models),
        ]
    )
    return app


def bind(config: ServerConfig) -> socket.socket:
    """Bind the port before the model is loaded, so that a port in use is known at once.

    Does not listen yet.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}. Use another port, or port=0 for any "
            "free one"
        ) from error
    return sock


async def serve(engine: Engine, config: ServerConfig, sock: socket.socket, stop: asyncio.Event) -> None:
    """Serve until `stop` is set or the engine fails."""
    runner = web.AppRunner(make_app(engine, config), access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
    await runner.setup()
    asyncio.get_running_loop().set_exception_handler(AcceptErrors())
    # asyncio accepts as many connections at once as this backlog, and also fails as often once out of descriptors.
    await web.SockSite(runner, sock, backlog=64).start()
    sock.listen(4096)
    host, port = sock.getsockname()[:2]
    print(f"serving {config.model_path} on http://{host}:{port}", flush=True)
    try:
        await stop.wait()
        # Running requests return the tokens they have, so that clients can continue on other servers.
        if engine.failure is None:
            await answer(engine.pause("abort"))
    finally:
        engine.close()
        await runner.cleanup()


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


# ------------------------------------------------------------------------------------------------ handlers


async def health(http_request: web.Request) -> web.Response:
    failure = http_request.app[ENGINE].failure
    if failure is not None:
        raise ServerError(f"the inference engine has failed: {failure!r}")
    return json_response({"status": "ok"})


async def health_generate(http_request: web.Request) -> web.Response:
    """Generate one token; fails if that takes more than 30 s, as in a paused engine."""
    request = Request([0], SamplingParams(max_new_tokens=1, temperature=0.0))
    try:
        await asyncio.wait_for(finish(http_request.app, request), timeout=30)
    except TimeoutError as error:
        raise ServerError("no token within 30 s: the engine is paused or overloaded") from error
    return json_response({"status": "ok"})


async def model_info(http_request: web.Request) -> web.Response:
    engine = http_request.app[ENGINE]
    return json_response(
        {
            "engine": "arealite",
            "model_path": engine.config.model_path,
            "weight_version": str(engine.version),
            "context_length": engine.max_len,
            "vocab_size": engine.shape.vocab_size,
            "is_generation": True,
        }
    )


async def server_info(http_request: web.Request) -> web.Response:
    """Counters; with `?probe=PATH`, also what this server reads in a trainer's segment of GPU memory."""
    info, probe = http_request.app[ENGINE].stats(), http_request.query.get("probe")
    if probe:
        loop = asyncio.get_running_loop()
        info["probe"] = await loop.run_in_executor(None, read_probe, probe)
    return json_response(info)


async def weights_checker(http_request: web.Request) -> web.Response:
    """A hash of all weights; with `?tensors=1` a fast fingerprint of each tensor, `{name: [dtype, digest]}`.

    With an adapter in use, the answer also has the adapter's tensors under PEFT's names
    (`base_model.model.….lora_A.weight`); the layers it changes are those in use, merged. The trainer compares the
    adapter's tensors, from which the merged ones follow.
    """
    engine = http_request.app[ENGINE]
    if http_request.query.get("tensors"):
        tensors = await answer(engine.fingerprints())
        return json_response({"tensors": tensors, "weight_version": str(engine.version)})
    digest = await answer(engine.fingerprint())
    return json_response({"fingerprint": digest, "weight_version": str(engine.version)})


async def abort_request(http_request: web.Request) -> web.Response:
    body = await read_object(http_request)
    abort_all = flag(body, "abort_all")
    if not abort_all and not body.get("rid"):
        raise RequestError("give rid, or abort_all: true")
    rid = None if abort_all else body["rid"]
    if not isinstance(rid, str | None):
        raise RequestError(f"rid must be a string, got {rid!r}")
    count = await answer(http_request.app[ENGINE].abort(rid))
    return json_response({"success": True, "num_aborted": count})


async def pause_generation(http_request: web.Request) -> web.Response:
    body = await read_object(http_request)
    count = await answer(http_request.app[ENGINE].pause(body.get("mode") or "abort"))
    return json_response({"success": True, "num_paused_requests": count})


async def continue_generation(http_request: web.Request) -> web.Response:
    await answer(http_request.app[ENGINE].resume())
    return json_response({"success": True})


async def flush_cache(http_request: web.Request) -> web.Response:
    if not await answer(http_request.app[ENGINE].flush_cache()):
        raise RequestError("the cache cannot be flushed while requests are running or waiting")
    return json_response({"success": True})


async def update_weights_from_disk(http_request: web.Request) -> web.Response:
    return await _update_published(http_request, "disk", "model_path")


async def update_weights_from_shm(http_request: web.Request) -> web.Response:
    return await _update_published(http_request, "shm", "path")


async def load_lora_adapter(http_request: web.Request) -> web.Response:
    """SGLang's form: `lora_name`, `lora_path` (a PEFT folder). It replaces the adapter in use.

    The weight version becomes `weight_version`, else N where `lora_name` is `vN`, else the next one.
    """
    body = await read_object(http_request)
    name = body.get("lora_name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"lora_name must name the adapter, got {name!r}")
    if name[0] == "v" and name[1:].isdigit():
        body.setdefault("weight_version", name[1:])
    path, version = _path(body, "lora_path"), _version(http_request.app[ENGINE], body)
    return await _update(http_request, body, lambda: WeightSource.adapter(path, version, name))


async def unload_lora_adapter(http_request: web.Request) -> web.Response:
    """Go back to the base weights and their version."""
    engine, body = http_request.app[ENGINE], await read_object(http_request)
    name = body.get("lora_name")
    if not name or name != engine.adapter_name:
        raise RequestError(f"adapter {name!r} is not loaded; {engine.adapter_name or 'none'} is")
    return await _update(http_request, body, WeightSource.base)


async def init_weights_update_group(http_request: web.Request) -> web.Response:
    body = await read_object(http_request)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, http_request.app[RECEIVER].join, body)
    return json_response({"success": True, "message": "joined"})


async def update_weights_from_distributed(http_request: web.Request) -> web.Response:
    engine, body = http_request.app[ENGINE], await read_object(http_request)
    version, receiver = _version(engine, body), http_request.app[RECEIVER]
    return await _update(http_request, body, lambda: WeightSource.received(receiver.receive(body), version))


async def update_weight_version(http_request: web.Request) -> web.Response:
    engine, body = http_request.app[ENGINE], await read_object(http_request)
    await answer(engine.set_version(_version(engine, body)))
    return json_response({"success": True, "weight_version": str(engine.version)})


async def release_memory_occupation(http_request: web.Request) -> web.Response:
    await answer(http_request.app[ENGINE].release_memory())
    return json_response({"success": True})


async def resume_memory_occupation(http_request: web.Request) -> web.Response:
    await answer(http_request.app[ENGINE].resume_memory())
    return json_response({"success": True})


async def _update_published(http_request: web.Request, way: Literal["disk", "shm"], key: str) -> web.Response:
    """Load the weights that a trainer has published at the path `body[key]`."""
    body = await read_object(http_request)
    meta = WeightUpdateMeta(way, _path(body, key), _version(http_request.app[ENGINE], body))
    return await _update(http_request, body, lambda: WeightSource.published(meta))


async def _update(
    http_request: web.Request, body: dict[str, Any], get_source: Callable[[], WeightSource]
) -> web.Response:
    """Update the engine's weights.

    A thread reads and checks them: neither server nor engine waits for the disk.
    """
    engine = http_request.app[ENGINE]
    flush = body.get("flush_cache") is None or flag(body, "flush_cache")
    if flag(body, "abort_all_requests"):
        await answer(engine.abort())
    loop = asyncio.get_running_loop()
    future = await loop.run_in_executor(None, lambda: engine.update(get_source(), flush))
    count = await answer(future)
    message = f"weights of version {engine.version} are in use"
    return json_response({"success": True, "message": message, "num_paused_requests": count})


def _path(body: dict[str, Any], key: str) -> str:
    path = body.get(key)
    if not isinstance(path, str) or not path:
        raise RequestError(f"{key} must name the new weights, got {path!r}")
    return path


def _version(engine: Engine, body: dict[str, Any]) -> int:
    given = body.get("weight_version")
    if given is None:
        return engine.version + 1
    digits = str(given) if type(given) in (int, str) else ""
    if not (digits.isdecimal() and len(digits) < 19):
        raise RequestError(f"weight_version must be a whole number from 0 on, got {given!r}")
    return int(digits)
