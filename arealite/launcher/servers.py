"""Ports, commands and health checks of inference servers. Used by every launcher; imports nothing of what it starts.

What a kind of server needs (command line, environment) is declared in `arealite.api.backends`.
"""

from __future__ import annotations

import dataclasses
import http.client
import importlib.util
import json
import sys

from arealite.api.backends import BACKENDS, OWN_KEYS, Spread
from arealite.api.errors import ConfigError, ServerError
from arealite.launcher.launch_config import LaunchConfig
from arealite.utils.network import free_port, is_free


def server_port(config: LaunchConfig, index: int) -> int:
    """The port of a server: a free one if `server.port` is 0, else counted up from there and refused if taken."""
    if config.server.port == 0:
        return free_port(config.server.host)
    port = config.server.port + index
    if not is_free(port, config.server.host):
        raise ServerError(
            f"port {port} on {config.server.host} is taken: end what listens there, choose another server.port, "
            "or set server.port=0 for a free one"
        )
    return port


def sharing_gpus(config: LaunchConfig) -> LaunchConfig:
    """The same for servers whose GPUs a trainer uses too: half of the memory that they would take is left to it."""
    server = dataclasses.replace(config.server, mem_fraction=config.server.mem_fraction / 2)
    sglang = BACKENDS["sglang"].shared_gpu_flags | config.sglang
    vllm = BACKENDS["vllm"].shared_gpu_flags | config.vllm
    return dataclasses.replace(config, server=server, sglang=sglang, vllm=vllm)


def server_command(
    config: LaunchConfig, backend: str, port: int, spread: tuple[int, int, str] | None = None, index: int = 0
) -> list[str]:
    """The command line of server `index`. `spread` is (nodes, which of them, address of the first) if it spans nodes."""
    return BACKENDS[backend].command(config, port, Spread(*spread) if spread else None, index)


def server_env(config: LaunchConfig, backend: str) -> dict[str, str]:
    """Variables of one server, besides devices and threads."""
    return BACKENDS[backend].env(config)


def require_installed(config: LaunchConfig, backend: str | None) -> None:
    """Raise where our command would start a server that this Python does not have."""
    known = BACKENDS[backend] if backend else None
    if known is None or not known.package or importlib.util.find_spec(known.package):
        return
    if any(key in known.options(config) for key in OWN_KEYS):
        return
    raise ConfigError(
        f"allocation_mode={config.allocation_mode} asks for {backend} servers, but {backend} is not installed in {sys.executable}: "
        f"install it, set {backend}.command to how one of another environment is started, or use `embedded` in its place"
    )


def is_healthy(address: str, api_key: str | None = None) -> bool:
    """Whether the server answers /health with 200 now."""
    return _get(address, "/health", api_key) is not None


def server_load(address: str, api_key: str | None = None) -> tuple[int, int] | None:
    """(requests running, requests waiting), or None if the server does not tell."""
    answer = _get(address, "/server_info", api_key)
    try:
        info = json.loads(answer or b"{}")
        return int(info["running"]), int(info["waiting"])
    except (ValueError, KeyError, TypeError):
        return None


def _get(address: str, path: str, api_key: str | None) -> bytes | None:
    """The body of a 200, else None."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connection = http.client.HTTPConnection(address, timeout=2.0)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
