"""Shows runs in a browser: `arealite dashboard [RUN_DIR …] [--port N] [--token TOKEN]`.

RUN_DIR is a run directory, or a folder above several; by default `runs`. Only reads. Prints its address, and ends with
Ctrl+C or SIGTERM.
"""

import argparse
import asyncio
import os
import signal
import socket
from pathlib import Path

from aiohttp import web

from arealite.api.errors import ConfigError, ServerError
from arealite.dashboard.app import CONNECTIONS, make_app
from arealite.utils.config import run_main
from arealite.utils.http_server import AcceptErrors, bind, listen
from arealite.utils.network import host_address

TOKEN_ENV = "AREALITE_DASHBOARD_TOKEN"
DEFAULT_PORT = 8470


def main(argv: list[str]) -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(prog="arealite dashboard", description=__doc__)
    parser.add_argument("run_dir", nargs="*", default=["runs"], help="run directories, or folders above them")
    parser.add_argument("--port", type=int, help=f"0 takes a free one; by default {DEFAULT_PORT}, or a free one")
    parser.add_argument("--host", help="address to listen on; by default loopback, with a token all")
    parser.add_argument("--token", help=f"what every visitor must give; or set {TOKEN_ENV}, which others cannot see")
    options = parser.parse_args(argv)
    roots = [Path(folder).expanduser() for folder in options.run_dir]
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"there is no folder {root}: give a run directory, or a folder above several")
    if options.port is not None and not 0 <= options.port < 65536:
        raise ConfigError(f"--port is {options.port}: use 0 to 65535")
    token = options.token or os.environ.get(TOKEN_ENV) or None
    host = options.host or ("0.0.0.0" if token else "127.0.0.1")
    app = make_app(roots, host, token)
    asyncio.run(_serve(app, _bind(host, options.port), bool(token)))


def _bind(host: str, port: int | None) -> socket.socket:
    if port is not None:
        return bind(host, port)
    try:
        return bind(host, DEFAULT_PORT)
    except ServerError:
        return bind(host, 0)


async def _serve(app: web.Application, sock: socket.socket, has_token: bool) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.set_exception_handler(AcceptErrors())
    runner, server = await listen(app, sock, app[CONNECTIONS])
    # The token stays out of terminals and logs.
    print(f"dashboard: {_address(sock)}" + (" (open it with ?token=TOKEN once)" if has_token else ""), flush=True)
    try:
        await stop.wait()
    finally:
        server.close()
        await runner.cleanup()


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    host = host_address() if host in ("0.0.0.0", "::") else host
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


if __name__ == "__main__":
    run_main(main)
