"""The inference backends: name, client class, command line and environment of each kind of server.

Launchers build commands from here and the engines resolve the client class. To add a backend, add a class and list
it in `BACKENDS`. Imports neither torch nor engines: a launcher only starts servers.

Flags of SGLang and vLLM pass through from the configuration unchanged (`sglang.mem_fraction_static=0.8` becomes
`--mem-fraction-static 0.8`). Two keys are AReaLite's own: `command` (how the server is started, for one that lives in
another environment) and `env` (its variables).
"""

import abc
import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import yaml

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError

API_KEY_ENV = "AREALITE_API_KEY"
# Stands for the key in configuration files and on command lines, which other users can read.
KEY_REFERENCE = f"${{oc.env:{API_KEY_ENV}}}"
OWN_KEYS = ("command", "env")
# vLLM accepts these ranks only.
_VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Servers count up from their seeds. With this distance two servers never draw the same noise for one prompt.
_SEED_STRIDE = 2**32


class ServerSettings(Protocol):
    """The part of a run's configuration that decides how its servers are started."""

    allocation_mode: str
    server: ServerConfig
    sglang: dict[str, Any]
    vllm: dict[str, Any]
    model_path: str
    weight_update: str
    lora_rank: int
    routing_replay: bool

    @property
    def run_path(self) -> Path:
        """The run directory."""
        ...

    @property
    def private_file(self) -> Path:
        """Where the launcher writes flags that must not appear on a command line."""
        ...

    @property
    def package_link(self) -> Path:
        """Where the launcher puts a link to this package, for servers of another environment."""
        ...


class Spread(NamedTuple):
    """The part of a server that runs on one node, for a server that spans several."""

    num_nodes: int
    node_rank: int
    first_address: str  # host:port of the first node


class Backend(abc.ABC):
    """One kind of inference server."""

    name: ClassVar[str]
    # The engine that talks to it, as `module:Class`.
    client: ClassVar[str]
    # The Python package that the server's command needs; empty: this one.
    package: ClassVar[str] = ""
    # Whether the server imports this package, also from another environment.
    imports_arealite: ClassVar[bool] = False
    # Flags for a server that shares its GPU with a trainer.
    shared_gpu_flags: ClassVar[dict[str, Any]] = {}
    # Whether the size of its KV cache depends on what other processes have allocated when it starts.
    measures_free_memory: ClassVar[bool] = True

    @abc.abstractmethod
    def command(self, config: ServerSettings, port: int, spread: Spread | None = None, index: int = 0) -> list[str]:
        """Return the command line of server `index`."""

    @abc.abstractmethod
    def env(self, config: ServerSettings) -> dict[str, str]:
        """Return the environment variables of one server, besides devices and threads."""

    def private_flags(self, config: ServerSettings) -> dict[str, Any] | None:
        """Return the flags that the server reads from `config.private_file`; None if it needs no such file."""
        return None

    def check(self, config: ServerSettings) -> None:
        """Raise `ConfigError` if the configuration asks for something that this kind of server does not have."""
        self.check_layout(config.allocation_mode, _strategy(config))
        if config.weight_update in ("stream", "delta") and self.name != "embedded":
            raise ConfigError(
                f"rollout.weight_update={config.weight_update} needs embedded servers, which pull their parts of the "
                f"weights: set it to broadcast or disk for {self.name}"
            )
        if config.weight_update in ("stream", "delta") and config.lora_rank:
            raise ConfigError(
                f"rollout.weight_update={config.weight_update} sends shards, but adapters are merged with whole "
                "weights: set auto"
            )
        if "api_key" in self.options(config):
            raise ConfigError(
                f"{self.name}.api_key would be visible on a command line: set server.api_key, which is passed "
                "privately to every kind of server"
            )

    def check_layout(self, mode: str, strategy: ParallelStrategy) -> None:
        """Raise `ConfigError` if this kind of server cannot run in the layout that an allocation mode names."""
        if strategy.context > 1:
            raise ConfigError(
                f"allocation_mode={mode}: servers have data (d), pipeline (p), tensor (t) and expert "
                "(e) parallelism: leave out c on the generating side"
            )
        if strategy.expert not in (1, strategy.tensor):
            raise ConfigError(
                f"allocation_mode={mode}: a server distributes experts over its tensor ranks: write "
                f"t{strategy.expert}e{strategy.expert}, or leave out e"
            )

    def options(self, config: ServerSettings) -> dict[str, Any]:
        """Return the backend's own section of the configuration."""
        return getattr(config, self.name, {})


class Embedded(Backend):
    """AReaLite's own server. It speaks SGLang's protocol."""

    name = "embedded"
    client = "arealite.engine.sglang_remote:RemoteSGLangEngine"
    measures_free_memory = False

    def command(self, config: ServerSettings, port: int, spread: Spread | None = None, index: int = 0) -> list[str]:
        server = dataclasses.replace(
            config.server,
            model_path=config.model_path,
            port=port,
            tensor_parallel=_strategy(config).tensor,
            record_routing=config.server.record_routing or config.routing_replay,
            seed=config.server.seed + index * _SEED_STRIDE,
            weight_folders=[*config.server.weight_folders, str(config.run_path)],
        )
        default = vars(ServerConfig())
        changed = {k: v for k, v in vars(server).items() if v != default[k] and k != "api_key"}
        arguments = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in changed.items()]
        # Every user of a machine can read a command line: the key travels in the environment.
        arguments += [f"api_key={KEY_REFERENCE}"] if server.api_key else []
        return [sys.executable, "-m", "arealite.cli.serve", *arguments]

    def env(self, config: ServerSettings) -> dict[str, str]:
        return {API_KEY_ENV: config.server.api_key} if config.server.api_key else {}

    def check_layout(self, mode: str, strategy: ParallelStrategy) -> None:
        super().check_layout(mode, strategy)
        if strategy.pipeline > 1:
            raise ConfigError(
                f"allocation_mode={mode}: the embedded server has no pipeline stages; write "
                f"t{strategy.instance_size} for p{strategy.pipeline}t{strategy.tensor}"
            )


class SGLang(Backend):
    """SGLang's own server."""

    name = package = "sglang"
    client = "arealite.engine.sglang_remote:RemoteSGLangEngine"
    shared_gpu_flags: ClassVar = {"mem_fraction_static": 0.4}

    def command(self, config: ServerSettings, port: int, spread: Spread | None = None, index: int = 0) -> list[str]:
        strategy = _strategy(config)
        base = config.sglang.get("command") or f"{shlex.quote(sys.executable)} -m sglang.launch_server"
        flags: dict[str, Any] = {"model_path": config.model_path, "host": config.server.host, "port": port}
        flags |= {"tp_size": strategy.tensor, "pp_size": strategy.pipeline}
        flags |= {"ep_size": strategy.expert} if strategy.expert > 1 else {}
        if spread:
            flags |= {"nnodes": spread[0], "node_rank": spread[1], "dist_init_addr": spread[2]}
        if _publishes_adapters(config):
            # Two adapters: the one in use and the next one.
            flags |= {"enable_lora": True, "max_loaded_loras": 2, "max_loras_per_batch": 2}
            flags |= {"max_lora_rank": config.lora_rank, "lora_target_modules": "all"}
        if config.routing_replay:
            flags["enable_return_routed_experts"] = True
        flags |= config.sglang
        if config.server.api_key:
            flags["config"] = str(config.private_file)
        return [*shlex.split(base), *_flags(flags)]

    def env(self, config: ServerSettings) -> dict[str, str]:
        return _as_text(config.sglang.get("env"))

    def private_flags(self, config: ServerSettings) -> dict[str, Any] | None:
        """Return the user's flags with the API key, which SGLang does not read from the environment."""
        if not config.server.api_key:
            return None
        given = config.sglang.get("config")
        flags: dict[str, Any] = {}
        try:
            flags = yaml.safe_load(Path(given).read_text()) or {} if given else {}
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read sglang.config={given}: {error}") from error
        return flags | {"api-key": config.server.api_key}


class VLLM(Backend):
    """vLLM's own server, with AReaLite's extension in its workers."""

    name = package = "vllm"
    client = "arealite.engine.vllm_remote:RemotevLLMEngine"
    imports_arealite = True
    shared_gpu_flags: ClassVar = {"gpu_memory_utilization": 0.4}

    def command(self, config: ServerSettings, port: int, spread: Spread | None = None, index: int = 0) -> list[str]:
        strategy = _strategy(config)
        base = config.vllm.get("command") or f"{shlex.quote(sys.executable)} -m vllm.entrypoints.cli.main serve"
        flags: dict[str, Any] = {"host": config.server.host, "port": port}
        flags |= {"tensor_parallel_size": strategy.tensor, "pipeline_parallel_size": strategy.pipeline}
        flags |= {"enable_expert_parallel": True} if strategy.expert > 1 else {}
        flags |= {
            "enable_scale_out": True,  # the endpoint with token ids in and out
            "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
            "worker_extension_cls": "arealite.engine.remote.vllm_extension.WeightLoading",
        }
        if config.weight_update == "broadcast":
            flags |= {"weight_transfer_config": {"backend": "arealite"}}
        if _publishes_adapters(config):
            rank = next((r for r in _VLLM_LORA_RANKS if r >= config.lora_rank), config.lora_rank)
            flags |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 2}
        if spread:
            master, master_port = spread[2].rsplit(":", 1)
            flags |= {"nnodes": spread[0], "node_rank": spread[1], "headless": spread[1] > 0}
            flags |= {"master_addr": master, "master_port": master_port}
        # vLLM's own check leaves out the endpoints that load weights. It takes this flag more than once.
        auth = ["--middleware", "arealite.engine.remote.vllm_auth.RequireKey"] if config.server.api_key else []
        return [*shlex.split(base), config.model_path, *_flags(flags | config.vllm), *auth]

    def check(self, config: ServerSettings) -> None:
        super().check(config)
        if config.routing_replay:
            raise ConfigError(
                "rollout.routing_replay needs the experts of each token, which vLLM's endpoint for token ids does not "
                "return: use embedded or sglang servers, or leave it out"
            )

    def env(self, config: ServerSettings) -> dict[str, str]:
        # The endpoints for weight updates exist in this mode only.
        ours = {"VLLM_SERVER_DEV_MODE": "1"}
        if _publishes_adapters(config):
            ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        # vLLM's workers must find the extension. The folder holds nothing else: other packages beside ours would
        # replace those of vLLM's own environment.
        paths = [str(config.package_link.parent), os.environ.get("PYTHONPATH")]
        ours["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if config.server.api_key:
            ours["VLLM_API_KEY"] = config.server.api_key
        return ours | _as_text(config.vllm.get("env"))


BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Embedded(), SGLang(), VLLM())}


def _flags(values: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for key, value in values.items():
        if key in OWN_KEYS or value is None or value is False:
            continue
        flags.append("--" + key.replace("_", "-"))
        if isinstance(value, list):
            flags += map(str, cast(list[Any], value))
        elif isinstance(value, dict):
            flags.append(json.dumps(value))
        elif value is not True:
            flags.append(str(value))
    return flags


def _as_text(variables: dict[str, Any] | None) -> dict[str, str]:
    return {str(k): str(v) for k, v in (variables or {}).items()}


def _publishes_adapters(config: ServerSettings) -> bool:
    """Whether the trainer publishes adapters alone (by disk) instead of merging them into the weights."""
    return config.lora_rank > 0 and config.weight_update in ("auto", "disk")


def _strategy(config: ServerSettings) -> ParallelStrategy:
    mode = AllocationMode.from_str(config.allocation_mode)
    assert mode.gen is not None
    return mode.gen
