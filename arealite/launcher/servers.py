"""Inference servers as commands, and the wait until they answer. Used by every launcher; imports nothing of what it starts.

Flags of SGLang and vLLM pass through from the configuration as they are (`sglang.mem_fraction_static=0.8` becomes
`--mem-fraction-static 0.8`). Two keys there are ours: `command` (how the server is started, for one that lives in an environment of its own) and
`env` (variables for it).
"""

from __future__ import annotations

import dataclasses
import http.client
import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError, ServerError
from arealite.launcher.launch_config import LaunchConfig
from arealite.utils.network import free_port, is_free

_RESERVED = ("command", "env")
# Tokens in and out, log-probs of the distribution that was sampled from, and our loading of weights inside its workers.
_VLLM_FLAGS = {
    "enable_scale_out": True,
    "logprobs_mode": "processed_logprobs",
    "worker_extension_cls": "arealite.engine.remote.vllm_extension.WeightLoading",
}
_VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_KEY_ENV = "AREALITE_API_KEY"
_SEED_STRIDE = 2**32


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
    sglang = {"mem_fraction_static": 0.4, **config.sglang}
    vllm = {"gpu_memory_utilization": 0.4, **config.vllm}
    return dataclasses.replace(config, server=server, sglang=sglang, vllm=vllm)


def server_command(
    config: LaunchConfig, backend: str, port: int, spread: tuple[int, int, str] | None = None, index: int = 0
) -> list[str]:
    """The command line of server `index`. `spread` is (nodes, which of them, address of the first) if it spans nodes."""
    host = config.server.host
    if backend == "embedded":
        arguments = _embedded_arguments(config, port, index)
        return [sys.executable, "-m", "arealite.cli.serve", *arguments]
    strategy = _strategy(config)
    python = shlex.quote(sys.executable)
    if backend == "sglang":
        base = config.sglang.get("command", f"{python} -m sglang.launch_server")
        flags = {"model_path": config.model_path, "host": host, "port": port}
        flags |= {"tp_size": strategy.tensor, "pp_size": strategy.pipeline}
        flags |= {"api_key": config.server.api_key}
        if spread:
            flags |= {"nnodes": spread[0], "node_rank": spread[1], "dist_init_addr": spread[2]}
        if _sends_adapters(config):
            # the adapter in use and the one that comes
            flags |= {"enable_lora": True, "max_loaded_loras": 2, "max_loras_per_batch": 2}
            flags |= {"max_lora_rank": config.lora_rank, "lora_target_modules": "all"}
        return [*shlex.split(base), *_flags(flags | config.sglang)]
    base = config.vllm.get("command", f"{python} -m vllm.entrypoints.cli.main serve")
    flags = {"host": host, "port": port}
    flags |= {"tensor_parallel_size": strategy.tensor, "pipeline_parallel_size": strategy.pipeline}
    flags |= _VLLM_FLAGS
    if config.weight_update == "broadcast":
        flags |= {"weight_transfer_config": {"backend": "arealite"}}
    if _sends_adapters(config):
        rank = next((r for r in _VLLM_LORA_RANKS if r >= config.lora_rank), config.lora_rank)
        flags |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 2}
    if spread:
        master, master_port = spread[2].rsplit(":", 1)
        flags |= {"nnodes": spread[0], "node_rank": spread[1], "headless": spread[1] > 0}
        flags |= {"master_addr": master, "master_port": master_port}
    return [*shlex.split(base), config.model_path, *_flags(flags | config.vllm)]


def require_installed(config: LaunchConfig, backend: str | None) -> None:
    """Raise where our command would start a server that this Python does not have."""
    if backend not in ("sglang", "vllm"):
        return
    given = config.sglang if backend == "sglang" else config.vllm
    if any(key in given for key in _RESERVED) or importlib.util.find_spec(backend):
        return
    raise ConfigError(
        f"allocation_mode={config.allocation_mode} asks for {backend} servers, but {backend} is not installed in {sys.executable}: "
        f"install it, set {backend}.command to how one of another environment is started, or use `embedded` in its place"
    )


def server_env(config: LaunchConfig, backend: str) -> dict[str, str]:
    """Variables of one server, besides devices and threads."""
    if backend == "embedded":
        return {_KEY_ENV: config.server.api_key} if config.server.api_key else {}
    given = (config.sglang if backend == "sglang" else config.vllm).get("env") or {}
    ours = {}
    if backend == "vllm":
        # Its weight-update endpoints exist in this mode only.
        ours["VLLM_SERVER_DEV_MODE"] = "1"
        if _sends_adapters(config):
            ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        # So that its workers find our extension, also from an environment of their own.
        package = str(Path(__file__).parents[2])
        ours["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        if config.server.api_key:
            ours["VLLM_API_KEY"] = config.server.api_key
    return ours | {str(k): str(v) for k, v in given.items()}


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


def _embedded_arguments(config: LaunchConfig, port: int, index: int) -> list[str]:
    strategy = _strategy(config)
    if strategy.pipeline > 1:
        raise ConfigError(
            f"allocation_mode={config.allocation_mode}: the embedded server has no pipeline stages; write t{strategy.instance_size} for p{strategy.pipeline}t{strategy.tensor}"
        )
    where = {"model_path": config.model_path, "port": port, "tensor_parallel": strategy.tensor}
    # A server counts up from its seed: farther apart than any counts, two of them never draw the same for one prompt.
    seed = config.server.seed + index * _SEED_STRIDE
    server = dataclasses.replace(config.server, **where, seed=seed)
    default = vars(ServerConfig())
    changed = {k: v for k, v in vars(server).items() if v != default[k] and k != "api_key"}
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


def _sends_adapters(config: LaunchConfig) -> bool:
    """A trainer of adapters sends them alone by disk, merged into the weights otherwise."""
    return config.lora_rank > 0 and config.weight_update in ("auto", "disk")


def _strategy(config: LaunchConfig) -> ParallelStrategy:
    mode = AllocationMode.from_str(config.allocation_mode)
    assert mode.gen is not None
    return mode.gen
