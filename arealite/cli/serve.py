"""Serves a model over HTTP with the embedded engine: `arealite serve MODEL port=…`.

MODEL is short for `model_path=MODEL`. Keys are the fields of `ServerConfig`; `join=RUN_DIR` makes it a server of a
running job. Prints one line when it serves. SIGTERM and SIGINT end it cleanly.
"""

import importlib
from dataclasses import replace

from arealite.api.cli_args import ServerConfig
from arealite.utils.config import load_config, run_main
from arealite.utils.config_help import USAGE, CommandHelp
from arealite.utils.rundir import RunDir

HELP = CommandHelp(
    f"arealite serve MODEL {USAGE}",
    "Serve a model over HTTP with the embedded engine: OpenAI's and Anthropic's APIs, and SGLang's endpoints.",
    (
        ("arealite serve Qwen/Qwen2-0.5B port=8000", ""),
        ("arealite serve /models/mine join=runs/gsm8k/trial0", "help a running job"),
    ),
)


def main(argv: list[str]) -> int:
    """Serve until a signal; returns the exit code."""
    if argv and "=" not in argv[0] and not argv[0].startswith("-"):
        argv = [f"model_path={argv[0]}", *argv[1:]]
    config = load_config(argv, ServerConfig, HELP)
    if config.join and not config.api_key:
        config = replace(config, api_key=RunDir(config.join).read_key())
        replace(config, join="").check()
    # These import torch, which the help does not need.
    importlib.import_module("arealite.dataset.hub").check_hub(config.model_path)
    return importlib.import_module("arealite.cli.server").run_server(config)


if __name__ == "__main__":
    run_main(main)
