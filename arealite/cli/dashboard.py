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
from urllib.parse import quote

from arealite.api.errors import ConfigError
from arealite.dashboard.app import CONNECTIONS, make_app
from arealite.utils.config import run_main
from arealite.utils.http_server import AcceptErrors, bind, listen
from arealite.utils.network import host_address

TOKEN_ENV = "AREALITE_DASHBOARD_TOKEN"
DEFAULT_PORT = 8265


def main(argv: list[str]) -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(prog="arealite dashboard", description=__doc__)
    parser.add_argument("run_dir", nargs="*", default=["runs"], help="run directories, or folders above them")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port to listen on; 0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need a token")
    parser.add_argument(
        "--token", help=f"token that every visitor must have; or set {TOKEN_ENV}, which no user can see"
    )
    options = parser.parse_args(argv)
    roots = [Path(folder).expanduser() for folder in options.run_dir]
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"there is no folder {root}: give a run directory, or a folder above several")
    if not 0 <= options.port < 65536:
        raise ConfigError(f"--port is {options.port}: use 0 to 65535")
    token = options.token or os.environ.get(TOKEN_ENV) or None
    # Checks host and token before the port is taken.
    asyncio.run(_serve(roots, options.host, options.port, token))


async def _serve(roots: list[Path], host: str, port: int, token: str | None) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.set_exception_handler(AcceptErrors())
    app = make_app(roots, host, token)
    sock = bind(host, port)
    runner, server = await listen(app, sock, app[CONNECTIONS])
    print(f"dashboard: {_address(sock, token)}", flush=True)
    try:
        await stop.wait()
    finally:
        server.close()
        await runner.cleanup()


def _address(sock: socket.socket, token: str | None) -> str:
    host, port = sock.getsockname()[:2]
    host = host_address() if host in ("0.0.0.0", "::") else host
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")


if __name__ == "__main__":
    run_main(main)
