"""Shows runs in a browser: `arealite dashboard [RUN_DIR …] [--port N] [--token TOKEN]`.

RUN_DIR is a run directory, or a folder above several; by default `runs`. Only reads. Prints its address, and ends with
Ctrl+C or SIGTERM.
"""

import importlib
import os
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
    # Not before: help must not wait for the imports of a server.
    importlib.import_module("arealite.dashboard.serving").run_dashboard(roots, host, options.port, token)


if __name__ == "__main__":
    run_main(main)
