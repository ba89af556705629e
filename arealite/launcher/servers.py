"""Inference servers as commands, and the wait until they answer. Used by every launcher; imports nothing of what it starts.

Flags of SGLang and vLLM pass through from the configuration as they are (`sglang.mem_fraction_static=0.8` becomes
`--mem-fraction-static 0.8`). Two keys there are ours: `command` (how the server is started, for one that lives in an environment of its own) and
`env` (variables for it).
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import shlex
import sys
import time
from typing import Any

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ServerError, WaitTimeout
from arealite.launcher.plan import LaunchConfig
from arealite.launcher.supervisor import Child, Supervisor
from arealite.utils.network import free_port, is_free

_PROBE_INTERVAL_S = 0.1
_RESERVED = ("command", "env")
_KEY_ENV = "AREALITE_API_KEY"


def server_ports(config: LaunchConfig, count: int) -> list[int]:
    """A port for each server: free ones if `server.port` is 0, else consecutive ones, refused if taken."""
    first, host = config.server.port, config.server.host
    if first == 0:
        return [free_port(host) for _ in range(count)]
    ports = list(range(first, first + count))
    taken = [port for port in ports if not is_free(port, host)]
    if taken:
        raise ServerError(
            f"port {', '.join(map(str, taken))} on {host} is taken: end what listens there, choose another server.port, "
            "or set server.port=0 for a free one"
        )
    return ports


def server_command(config: LaunchConfig, backend: str, host: str, port: int) -> list[str]:
    """The command line of one server (of one node)."""
    if backend == "embedded":
        return [
            sys.executable,
            "-m",
            "arealite.cli.serve",
            *_embedded_arguments(config, host, port),
        ]
    mode = _strategy(config)
    if backend == "sglang":
        base = config.sglang.get(
            "command", f"{shlex.quote(sys.executable)} -m sglang.launch_server"
        )
        ours = {"model_path": config.model_path, "host": host, "port": port}
        ours |= {"tp_size": mode.tensor, "pp_size": mode.pipeline}
        return [*shlex.split(base), *_flags(ours | config.sglang)]
    base = config.vllm.get(
        "command", f"{shlex.quote(sys.executable)} -m vllm.entrypoints.cli.main serve"
    )
    ours = {"host": host, "port": port}
    ours |= {"tensor_parallel_size": mode.tensor, "pipeline_parallel_size": mode.pipeline}
    return [*shlex.split(base), config.model_path, *_flags(ours | config.vllm)]


def server_env(config: LaunchConfig, backend: str) -> dict[str, str]:
    """Variables of one server, besides devices and threads."""
    if backend == "embedded":
        return {_KEY_ENV: config.server.api_key} if config.server.api_key else {}
    given = (config.sglang if backend == "sglang" else config.vllm).get("env") or {}
    ours = {"VLLM_SERVER_DEV_MODE": "1"} if backend == "vllm" else {}
    return ours | {str(k): str(v) for k, v in given.items()}


def wait_healthy(
    supervisor: Supervisor, servers: dict[str, Child], timeout_s: float, api_key: str | None = None
) -> None:
    """Wait until all of `servers` ({address: child}) answer /health; raises with the log of one that died or is late."""
    started = time.monotonic()
    waiting = dict(servers)
    while waiting:
        waiting = {a: child for a, child in waiting.items() if not is_healthy(a, api_key)}
        ended = supervisor.wait(_PROBE_INTERVAL_S) if waiting else []
        if ended:
            raise ServerError(
                f"a process died while servers were starting: {ended[0].describe_end()}"
            )
        if waiting and time.monotonic() - started > timeout_s:
            address, child = next(iter(waiting.items()))
            raise WaitTimeout(
                f"the launcher waited {timeout_s:.0f} s (rollout.setup_timeout_s) for {len(waiting)} of {len(servers)} servers to "
                f"answer http://{address}/health; the last lines of {child.spec.log_path}:\n{child.last_lines()}"
            )


def is_healthy(address: str, api_key: str | None = None) -> bool:
    """Whether the server answers /health with 200 now."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connection = http.client.HTTPConnection(address, timeout=2.0)
    try:
        connection.request("GET", "/health", headers=headers)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _embedded_arguments(config: LaunchConfig, host: str, port: int) -> list[str]:
    server = dataclasses.replace(config.server, model_path=config.model_path, host=host, port=port)
    default = ServerConfig()
    changed = {
        f.name: getattr(server, f.name)
        for f in dataclasses.fields(server)
        if getattr(server, f.name) != getattr(default, f.name) and f.name != "api_key"
    }
    arguments = [f"{key}={_yaml(value)}" for key, value in changed.items()]
    # A secret on a command line could be read by every user of the machine: it travels in the environment.
    return arguments + ([f"api_key=${{oc.env:{_KEY_ENV}}}"] if server.api_key else [])


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _flags(values: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for key, value in values.items():
        if key in _RESERVED or value is None or value is False:
            continue
        flags.append("--" + key.replace("_", "-"))
        if isinstance(value, list):
            flags += map(str, value)
        elif isinstance(value, dict):
            flags.append(json.dumps(value))
        elif value is not True:
            flags.append(str(value))
    return flags


def _strategy(config: LaunchConfig) -> ParallelStrategy:
    mode = AllocationMode.from_str(config.allocation_mode)
    assert mode.gen is not None
    return mode.gen
