"""Shows runs in a browser: `arealite dashboard [RUN_DIR …] [--port N] [--token TOKEN | --no-token]`.

RUN_DIR is a run directory, or a folder above several; by default `runs`. Only reads. Prints its address with a token
that is made for this start, so that other users of the machine cannot read the runs. Ends with Ctrl+C or SIGTERM.
"""

import importlib
import os
import secrets
from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.cli.arguments import ArgumentParser
from arealite.utils.config import run_main

TOKEN_ENV = "AREALITE_DASHBOARD_TOKEN"


def main(argv: list[str]) -> None:
    """Serve until a signal."""
    examples = ("arealite dashboard", "arealite dashboard runs/gsm8k/trial0 runs/gsm8k/trial1 --port 9000")
    parser = ArgumentParser("dashboard", __doc__, *examples)
    parser.add_argument("run_dir", nargs="*", default=["runs"], help="run directories, or folders above them")
    parser.add_argument("--port", type=int, help="0 takes a free one; by default 8470, or a free one if that is taken")
    parser.add_argument("--host", help="address to listen on; by default loopback, with a token of yours all")
    parser.add_argument("--token", help=f"token of yours, which is not printed; or set {TOKEN_ENV}, hidden from others")
    parser.add_argument("--no-token", action="store_true", help="let every user of this machine read the runs")
    options = parser.parse_args(argv)
    roots = [Path(folder).expanduser() for folder in options.run_dir]
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"there is no folder {root}: give a run directory, or a folder above several")
    if options.port is not None and not 0 <= options.port < 65536:
        raise ConfigError(f"--port is {options.port}: use 0 to 65535")
    given = options.token or os.environ.get(TOKEN_ENV)
    if options.token and options.no_token:
        raise ConfigError("--token and --no-token exclude each other: give one of them")
    token = None if options.no_token else given or secrets.token_urlsafe(24)
    host = options.host or ("0.0.0.0" if token and given else "127.0.0.1")
    # Not before: help must not wait for the imports of a server.
    serving = importlib.import_module("arealite.dashboard.serving")
    serving.run_dashboard(roots, host, options.port, token, is_token_shown=not given)


if __name__ == "__main__":
    run_main(main)
