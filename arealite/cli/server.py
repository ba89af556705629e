"""The process of an embedded server: `cli.serve` calls it with its configuration.

A module of its own, because it imports torch: help and wrong settings must not wait for that.
"""

import asyncio
import gc
import os
import socket
import sys

from transformers.utils.logging import disable_progress_bar

from arealite.api.cli_args import ServerConfig
from arealite.core.event_loop import new_event_loop
from arealite.engine.remote.membership import Lease
from arealite.inference.engine import Engine
from arealite.inference.http.server import serve
from arealite.utils.beside import has_threads_beside
from arealite.utils.http.server import bind, stop_at_signals
from arealite.utils.network import host_address
from arealite.utils.process import die_with_parent
from arealite.utils.status.writer import status


def run_server(config: ServerConfig) -> int:
    """Serve until a signal; returns the exit code."""
    disable_progress_bar()
    if os.environ.get("AREALITE_DIE_WITH_PARENT") == "1":
        die_with_parent()
    sock = bind(config.host, config.port)
    engine = Engine(config).start(with_trial=True)
    status.facts["address"] = "{}:{}".format(*sock.getsockname()[:2])
    status.add("engine", engine.status)
    # The collector would scan torch's objects again and again while requests wait.
    gc.freeze()
    if engine.model.device.type == "cuda":
        # Calls into torch release the interpreter to the HTTP side; the engine must get it back quickly.
        sys.setswitchinterval(5e-5)
    # uvloop leaves more of the interpreter's time to the engine.
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve_until_signal(engine, config, sock))
    if engine.failure is not None:
        print(f"error: {engine.failure}", file=sys.stderr, flush=True)
        os._exit(1)  # threads that wait for a dead rank would block a regular exit
    if has_threads_beside():
        os._exit(0)  # a regular exit would abort a thread inside torch, and the process with it
    return 0


async def _serve_until_signal(engine: Engine, config: ServerConfig, sock: socket.socket) -> None:
    with stop_at_signals() as stop:
        await _serve(engine, config, sock, stop)


async def _serve(engine: Engine, config: ServerConfig, sock: socket.socket, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    status.watch_loop("http", loop)

    def stop_soon() -> None:
        loop.call_soon_threadsafe(stop.set)

    engine.on_failure = stop_soon
    if not config.join:
        return await serve(engine, config, sock, stop)
    host, port = sock.getsockname()[:2]
    lease = Lease(config.join, f"{host_address() if host in ('0.0.0.0', '::') else host}:{port}")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(engine, config, sock, stop), name="server")
        tasks.create_task(lease.hold(stop), name="lease")
