"""The HTTP server of the embedded engine: SGLang's native endpoints and OpenAI's, on aiohttp.

Started by `python -m arealite.cli.serve`. The engine runs in its own thread; handlers hand it requests and await
futures. `/health` answers 200 while the engine can serve and 503 with the cause once it has failed.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

from aiohttp import web

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import AReaLiteError, RequestError, ServerError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.engine import Engine
from arealite.inference.http import common
from arealite.inference.http.access import Access, new_version
from arealite.inference.http.generate_api import generate
from arealite.inference.http.openai_api import completions, converse, models
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.weight_receiver import WeightReceiver
from arealite.inference.weights import WeightSource
from arealite.protocol.chat_apis import chat_request, message_request, response_request
from arealite.utils.http.connections import Connections
from arealite.utils.http.server import AcceptErrors, listen
from arealite.weights.stream.receive import StreamOrder
from arealite.weights.sync import read_probe

RECEIVER = web.AppKey("receiver", WeightReceiver)
# The layout of a hundred thousand tensors, or a batch of prompts.
_MAX_BODY_BYTES = 32 << 20
_RELEASE_INTERVAL_S = 30.0
# Characters of an adapter's name.
_MAX_NAME = 256


def make_app(engine: Engine, config: ServerConfig) -> web.Application:
    """Make the web application with all routes."""
    app = web.Application(middlewares=[common.answer_all], client_max_size=_MAX_BODY_BYTES)
    app[common.ENGINE] = engine
    app[common.ACCESS] = Access(config)
    app[common.CONNECTIONS] = Connections()
    app[common.MAILBOX] = common.Mailbox()
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
            web.post("/continue_generation", _command(Engine.resume)),
            web.post("/flush_cache", flush_cache),
            web.post("/update_weights_from_disk", partial(update_published, "disk", "model_path")),
            web.post("/update_weights_from_shm", partial(update_published, "shm", "path")),
            web.post("/load_lora_adapter", load_lora_adapter),
            web.post("/unload_lora_adapter", unload_lora_adapter),
            web.post("/init_weights_update_group", init_weights_update_group),
            web.post("/update_weights_from_distributed", update_weights_from_distributed),
            web.post("/update_weights_from_stream", update_weights_from_stream),
            web.post("/update_weight_version", update_weight_version),
            web.post("/release_memory_occupation", _command(Engine.release_memory)),
            web.post("/resume_memory_occupation", _command(Engine.resume_memory)),
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", partial(converse, chat_request)),
            web.post("/v1/responses", partial(converse, response_request)),
            web.post("/v1/messages", partial(converse, message_request)),
            web.get("/v1/models", models),
            web.get("/v1/models/{name:.+}", models),
        ]
    )
    return app


async def serve(engine: Engine, config: ServerConfig, sock: socket.socket, stop: asyncio.Event) -> None:
    """Serve until `stop` is set or the engine fails."""
    app, loop = make_app(engine, config), asyncio.get_running_loop()
    loop.set_exception_handler(AcceptErrors())
    runner, listener = await listen(app, sock, app[common.CONNECTIONS])
    host, port = sock.getsockname()[:2]
    print(f"serving {config.model_path} on http://{host}:{port}", flush=True)
    releasing = asyncio.create_task(_release_removed(engine), name="release removed weights")
    try:
        await stop.wait()
        # Running requests return the tokens they have, so that clients can continue on other servers.
        if engine.failure is None:
            await asyncio.wrap_future(engine.pause("abort"))
    finally:
        releasing.cancel()
        listener.close()
        engine.close()
        await runner.cleanup()


async def _release_removed(engine: Engine) -> None:
    """Release the weights of ended runs: nobody tells a server that serves several runs."""
    while True:
        await asyncio.sleep(_RELEASE_INTERVAL_S)
        engine.release_removed()


async def health(http_request: web.Request) -> web.Response:
    failure = http_request.app[common.ENGINE].failure
    if failure is not None:
        # Everybody may ask: messages of other exceptions could hold what is not meant for them.
        cause = str(failure) if isinstance(failure, AReaLiteError) else type(failure).__name__
        raise ServerError(f"the inference engine has failed: {cause}")
    return common.json_response({"status": "ok"})


async def health_generate(http_request: web.Request) -> web.Response:
    """Generate one token; fails if that takes more than 30 s, as in a paused engine."""
    request = Request([0], SamplingParams(max_new_tokens=1, temperature=0.0))
    try:
        await asyncio.wait_for(common.finish(http_request.app, request), timeout=30)
    except TimeoutError as error:
        raise ServerError("no token within 30 s: the engine is paused or overloaded") from error
    return common.json_response({"status": "ok"})


async def model_info(http_request: web.Request) -> web.Response:
    engine = http_request.app[common.ENGINE]
    return common.json_response(
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
    app, probe = http_request.app, http_request.query.get("probe")
    info = app[common.ENGINE].stats()
    if probe:
        info["probe"] = await common.run_beside(lambda: read_probe(app[common.ACCESS].weight_path(probe)))
    return common.json_response(info)


async def weights_checker(http_request: web.Request) -> web.Response:
    """Answer with a hash of all weights; with `?tensors=1` with `{name: [dtype, digest]}`.

    With an adapter in use, the answer also has the adapter's tensors under PEFT's names
    (`base_model.model.….lora_A.weight`); the layers it changes are those in use, merged. The trainer compares the
    adapter's tensors, from which the merged ones follow.
    """
    engine = http_request.app[common.ENGINE]
    if http_request.query.get("tensors"):
        tensors = await asyncio.wrap_future(engine.fingerprints())
        return common.json_response({"tensors": tensors, "weight_version": str(engine.version)})
    digest = await asyncio.wrap_future(engine.fingerprint())
    return common.json_response({"fingerprint": digest, "weight_version": str(engine.version)})


async def abort_request(http_request: web.Request) -> web.Response:
    body = await common.read_object(http_request)
    abort_all = common.flag(body, "abort_all")
    if not abort_all and not body.get("rid"):
        raise RequestError("give rid, or abort_all: true")
    rid = None if abort_all else body["rid"]
    if not isinstance(rid, str | None):
        raise RequestError(f"rid must be a string, got {rid!r}")
    count = await asyncio.wrap_future(http_request.app[common.ENGINE].abort(rid))
    return common.json_response({"success": True, "num_aborted": count})


async def pause_generation(http_request: web.Request) -> web.Response:
    body = await common.read_object(http_request)
    count = await asyncio.wrap_future(http_request.app[common.ENGINE].pause(body.get("mode") or "abort"))
    return common.json_response({"success": True, "num_paused_requests": count})


async def flush_cache(http_request: web.Request) -> web.Response:
    if not await asyncio.wrap_future(http_request.app[common.ENGINE].flush_cache()):
        raise RequestError("the cache cannot be flushed while requests are running or waiting")
    return common.json_response({"success": True})


async def update_published(way: Literal["disk", "shm"], key: str, http_request: web.Request) -> web.Response:
    """Load the weights that a trainer has published at the path `body[key]`."""
    app, body = http_request.app, await common.read_object(http_request)
    path, version = _path(body, key), _version(app[common.ENGINE], body)

    def get_source() -> WeightSource:
        return WeightSource.published(WeightUpdateMeta(way, app[common.ACCESS].weight_path(path), version))

    return await _update(http_request, body, get_source)


async def load_lora_adapter(http_request: web.Request) -> web.Response:
    """SGLang's form: `lora_name`, `lora_path` (a PEFT folder). It replaces the adapter in use.

    The weight version becomes `weight_version`, else N where `lora_name` is `vN`, else the next one.
    """
    app, body = http_request.app, await common.read_object(http_request)
    name = body.get("lora_name")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise RequestError(f"lora_name must name the adapter in at most {_MAX_NAME} characters, got {name!r:.60}")
    if name[0] == "v" and name[1:].isdigit():
        body.setdefault("weight_version", name[1:])
    path, version = _path(body, "lora_path"), _version(app[common.ENGINE], body)
    access = app[common.ACCESS]
    return await _update(http_request, body, lambda: WeightSource.adapter(access.weight_path(path), version, name))


async def unload_lora_adapter(http_request: web.Request) -> web.Response:
    """Go back to the base weights and their version."""
    engine, body = http_request.app[common.ENGINE], await common.read_object(http_request)
    name = body.get("lora_name")
    if not name or name != engine.adapter_name:
        raise RequestError(f"adapter {name!r} is not loaded; {engine.adapter_name or 'none'} is")
    return await _update(http_request, body, WeightSource.base)


async def init_weights_update_group(http_request: web.Request) -> web.Response:
    body = await common.read_object(http_request)
    await common.run_beside(lambda: http_request.app[RECEIVER].join(body))
    return common.json_response({"success": True, "message": "joined"})


async def update_weights_from_distributed(http_request: web.Request) -> web.Response:
    engine, body = http_request.app[common.ENGINE], await common.read_object(http_request)
    version, receiver = _version(engine, body), http_request.app[RECEIVER]
    # In float64, and with a head that is tied here.
    max_bytes = 2 * 8 * engine.config.tensor_parallel * sum(p.numel() for p in engine.model.parameters())
    return await _update(http_request, body, lambda: WeightSource.received(receiver.receive(body, max_bytes), version))


async def update_weights_from_stream(http_request: web.Request) -> web.Response:
    """Pull weights from the trainer's ranks or from another server, as `order` says."""
    engine, body = http_request.app[common.ENGINE], await common.read_object(http_request)
    version = _version(engine, body)
    try:
        order = StreamOrder.from_json(body.get("order"))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise RequestError(f"order must say where to pull weights from: {error!r}") from error
    return await _update(http_request, body, lambda: WeightSource.streamed(order, version))


async def update_weight_version(http_request: web.Request) -> web.Response:
    engine, body = http_request.app[common.ENGINE], await common.read_object(http_request)
    await asyncio.wrap_future(engine.set_version(_version(engine, body)))
    return common.json_response({"success": True, "weight_version": str(engine.version)})


def _command(call: Callable[[Engine], Future[None]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Make the handler of a call to the engine without arguments and result."""

    async def handle(http_request: web.Request) -> web.Response:
        await asyncio.wrap_future(call(http_request.app[common.ENGINE]))
        return common.json_response({"success": True})

    return handle


async def _update(
    http_request: web.Request, body: dict[str, Any], get_source: Callable[[], WeightSource]
) -> web.Response:
    """Update the engine's weights. A thread reads and checks them, so that generation goes on."""
    engine = http_request.app[common.ENGINE]
    flush = body.get("flush_cache") is None or common.flag(body, "flush_cache")
    if common.flag(body, "abort_all_requests"):
        await asyncio.wrap_future(engine.abort())
    count = await asyncio.wrap_future(await common.run_beside(lambda: engine.update(get_source(), flush)))
    message = f"weights of version {engine.version} are in use"
    return common.json_response({"success": True, "message": message, "num_paused_requests": count})


def _path(body: dict[str, Any], key: str) -> str:
    path = body.get(key)
    if not isinstance(path, str) or not path:
        raise RequestError(f"{key} must name the new weights, got {path!r}")
    return path


def _version(engine: Engine, body: dict[str, Any]) -> int:
    return new_version(body, engine.version, common.flag(body, "reset_version"))
