"""Ports, commands and health checks of inference servers.

Used by every launcher; imports no server code.

`arealite.api.backends` declares the command line and environment of each kind of server.
"""

import dataclasses
import http.client
import importlib.util
import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from arealite.api.backends import BACKENDS, OWN_KEYS
from arealite.api.errors import ConfigError, ServerError
from arealite.launcher.launch_config import LaunchConfig
from arealite.utils.activity import activity
from arealite.utils.network import free_port, is_free
from arealite.utils.rundir import write_file


def server_port(config: LaunchConfig, index: int) -> int:
    """Return a free port if `server.port` is 0, else `server.port + index`; raises if that port is taken."""
    if config.server.port == 0:
        return free_port(config.server.host)
    port = config.server.port + index
    if not is_free(port, config.server.host):
        raise ServerError(
            f"port {port} on {config.server.host} is taken: end the process that listens there, choose another "
            "server.port, or set server.port=0 for a free one"
        )
    return port


def halve_gpu_memory(config: LaunchConfig) -> LaunchConfig:
    """Return the configuration of servers that share GPUs with a trainer: they take half of the memory."""
    server = dataclasses.replace(config.server, mem_fraction=config.server.mem_fraction / 2)
    sglang = BACKENDS["sglang"].shared_gpu_flags | config.sglang
    vllm = BACKENDS["vllm"].shared_gpu_flags | config.vllm
    return dataclasses.replace(config, server=server, sglang=sglang, vllm=vllm)


def prepare_server(config: LaunchConfig, backend: str) -> dict[str, str]:
    """Write the files of a server; return its environment variables, besides devices and threads."""
    flags = BACKENDS[backend].private_flags(config)
    if flags is not None:
        write_file(config.private_file, yaml.safe_dump(flags), private=True)
    package, link = Path(__file__).resolve().parents[1], config.package_link
    if BACKENDS[backend].imports_arealite and link.resolve() != package:
        link.parent.mkdir(parents=True, exist_ok=True)
        aside = link.with_name(f".{uuid.uuid4().hex}")
        aside.symlink_to(package)
        aside.replace(link)
    return BACKENDS[backend].env(config)


def check_installed(config: LaunchConfig, backend: str) -> None:
    """Raise if the default command would start a server that this Python does not have."""
    known = BACKENDS[backend]
    if not known.package or importlib.util.find_spec(known.package):
        return
    if any(known.options(config).get(key) for key in OWN_KEYS):
        return
    raise ConfigError(
        f"allocation_mode={config.allocation_mode} needs {backend} servers, but {backend} is not installed in "
        f"{sys.executable}: install it, set {backend}.command to start one of another environment, or use `embedded`"
    )


def health_problem(address: str, api_key: str | None = None) -> str | None:
    """Return why the health check of a server fails; None if it passes."""
    status, answer = _get(address, "/health", api_key)
    if status == 200:
        return None
    return f"status {status}" if status else answer.decode()


def server_load(address: str, api_key: str | None = None) -> tuple[int, int] | None:
    """Return (requests running, requests waiting); None if the server does not report them."""
    status, answer = _get(address, "/server_info", api_key)
    try:
        info = json.loads(answer if status == 200 else b"{}")
        return int(info["running"]), int(info["waiting"])
    except (ValueError, KeyError, TypeError):
        return None


def _get(address: str, path: str, api_key: str | None) -> tuple[int, bytes]:
    """Return (status, body); status 0 and the reason if there is no answer."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connection = http.client.HTTPConnection(address, timeout=2.0)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        return 0, (str(error) or type(error).__name__).encode()
    finally:
        connection.close()


def wait_for_running(addresses: Sequence[str], key: str | None, timeout_s: float, pause: Callable[[], object]) -> None:
    """Wait until all servers of `rollout.server_addrs` are healthy; `pause` is called between polls."""
    deadline, is_first = time.monotonic() + timeout_s, True
    while True:
        problems = {address: health_problem(address, key) for address in addresses}
        failing = ", ".join(f"{address} ({why})" for address, why in problems.items() if why)
        if not failing:
            return
        if any(why in ("status 401", "status 403") for why in problems.values()):
            raise ServerError(f"a server of rollout.server_addrs rejects the API key: {failing}; set server.api_key")
        if time.monotonic() > deadline:
            raise ServerError(
                f"waited {timeout_s:.0f} s (rollout.setup_timeout_s) for the running servers of "
                f"rollout.server_addrs to answer /health: {failing}; start them, or correct the addresses"
            )
        if is_first:
            print(f"waiting for running servers: {failing}", flush=True)
            activity.note_output()
        is_first = False
        with activity.doing(f"waiting for running servers: {failing}"):
            pause()
