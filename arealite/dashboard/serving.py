"""Serves the dashboard until a signal: `cli.dashboard` calls it once its arguments are right."""

import asyncio
import signal
import socket
from pathlib import Path

from aiohttp import web

from arealite.api.errors import ServerError
from arealite.dashboard.app import CONNECTIONS, make_app
from arealite.utils.http_server import AcceptErrors, bind, listen
from arealite.utils.network import host_address

DEFAULT_PORT = 8470


def run_dashboard(roots: list[Path], host: str, port: int | None, token: str | None) -> None:
    """Serve run directories until a signal; without a port, on the default one or any that is free."""
    app = make_app(roots, host, token)
    asyncio.run(_serve(app, _bind(host, port), bool(token)))


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
