"""`python -m arealite.cli.serve model_path=... port=...`: the embedded engine behind HTTP.

Keys are the fields of `ServerConfig` (`--help` lists them); `join=RUN_DIR` makes it a server of a running job. Prints
one line when it serves. SIGTERM and SIGINT end it cleanly.
"""

import asyncio
import gc
import os
import signal
import socket
import sys
from dataclasses import replace

from transformers.utils.logging import disable_progress_bar

from arealite.api.cli_args import ServerConfig
from arealite.core.event_loop import new_event_loop
from arealite.engine.remote.membership import Lease
from arealite.inference.engine import Engine
from arealite.inference.http.server import serve
from arealite.utils.config import load_config, run_main
from arealite.utils.http_server import bind, has_threads_beside
from arealite.utils.network import host_address
from arealite.utils.process import die_with_parent
from arealite.utils.rundir import RunDir


def main(argv: list[str]) -> int:
    """Serve until a signal; returns the exit code."""
    config = load_config(argv, ServerConfig)
    if config.join and not config.api_key:
        config = replace(config, api_key=RunDir(config.join).read_key())
        replace(config, join="").check()
    disable_progress_bar()
    if os.environ.get("AREALITE_DIE_WITH_PARENT") == "1":
        die_with_parent()
    sock = bind(config.host, config.port)
    engine = Engine(config).start()
    # The collector would scan torch's objects again and again while requests wait.
    gc.freeze()
    if engine.model.device.type == "cuda":
        # Calls into torch release the interpreter to the HTTP side; the engine must get it back quickly.
        sys.setswitchinterval(5e-5)
    # uvloop leaves more of the interpreter's time to the engine.
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(engine, config, sock))
    if engine.failure is not None:
        print(f"error: {engine.failure}", file=sys.stderr, flush=True)
        os._exit(1)  # threads that wait for a dead rank would block a regular exit
    if has_threads_beside():
        os._exit(0)  # a regular exit would abort a thread inside torch, and the process with it
    return 0


async def _serve(engine: Engine, config: ServerConfig, sock: socket.socket) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

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


if __name__ == "__main__":
    run_main(main)
