"""Serves the dashboard until a signal: `cli.dashboard` calls it once its arguments are right."""

import asyncio
import socket
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from arealite.api.errors import ServerError
from arealite.dashboard.app import CONNECTIONS, make_app
from arealite.utils.http.server import AcceptErrors, bind, listen, stop_at_signals
from arealite.utils.network import host_address

DEFAULT_PORT = 8470


def run_dashboard(roots: list[Path], host: str, port: int | None, token: str | None, is_token_shown: bool) -> None:
    """Serve run directories until a signal; without a port, on the default one or any that is free."""
    app, sock = make_app(roots, host, token), _bind(host, port)
    suffix = "" if not token else f"?token={quote(token)}" if is_token_shown else " (open it with ?token=TOKEN once)"
    asyncio.run(_serve(app, sock, f"dashboard: {_address(sock)}{suffix}"))


def _bind(host: str, port: int | None) -> socket.socket:
    if port is not None:
        return bind(host, port)
    try:
        return bind(host, DEFAULT_PORT)
    except ServerError:
        return bind(host, 0)


async def _serve(app: web.Application, sock: socket.socket, message: str) -> None:
    asyncio.get_running_loop().set_exception_handler(AcceptErrors())
    with stop_at_signals() as stop:
        runner, server = await listen(app, sock, app[CONNECTIONS])
        print(message, flush=True)
        try:
            await stop.wait()
        finally:
            server.close()
            await runner.cleanup()


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    host = host_address() if host in ("0.0.0.0", "::") else host
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
