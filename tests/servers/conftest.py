"""Real inference servers for client tests: embedded, SGLang and vLLM on CPU, started with the launcher's commands.

SGLang and vLLM live in environments of their own outside the clone (scripts/servers/install-*); a test that needs one
is skipped with the reason where it is not installed, and fails in CI.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from arealite.api.backends import BACKENDS
from arealite.launcher.launch_config import LaunchConfig
from arealite.launcher.servers import health_problem, prepare_server
from arealite.launcher.supervisor import Child, ChildSpec, Supervisor
from arealite.utils.network import free_port
from tests import warm_python
from tests.tiny_model import make_model

SCRIPTS = Path(__file__).parents[2] / "scripts" / "servers"
VERSIONS = {"sglang": "sglang-0.5.23", "vllm": "vllm-0.32.0"}
START_TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a test with the marker `backend` for that backend only."""

    def is_kept(item: pytest.Item) -> bool:
        marker = item.get_closest_marker("backend")
        return marker is None or item.callspec.params["servers"] in marker.args  # type: ignore[attr-defined]

    items[:] = filter(is_kept, items)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three versions of one model's weights. Heads of 32 are the least that vLLM's CPU attention takes."""
    folders = [tmp_path_factory.mktemp(f"version{i}") for i in range(3)]
    size = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
    for seed, folder in enumerate(folders):
        make_model(folder, seed=seed, **size)
    return folders


def server_venv(backend: str) -> Path:
    """Return the server's environment; skip the test if there is none."""
    home = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    venv = Path(os.environ.get("AREALITE_SERVERS", f"{home}/arealite/servers")) / VERSIONS[backend]
    if not (venv / ".complete").exists() and "CI" in os.environ:
        subprocess.run([SCRIPTS / f"install-{backend}-cpu", str(venv)], check=True)
    if not (venv / ".complete").exists():
        pytest.skip(f"{backend} is not installed: run scripts/servers/install-{backend}-cpu")
    return venv


def launch_config(backend: str, model: Path) -> LaunchConfig:
    """The configuration with which the launcher starts this server on CPU."""
    config = LaunchConfig(allocation_mode=f"{backend}.d1+d1", model_path=str(model))
    config.weight_update = "broadcast"  # vLLM must be told when it starts
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if backend == "embedded":
        config.server.dtype, config.server.device = "float32", "cpu"
        config.server.max_total_tokens = 8192
        config.server.weight_folders = [str(model.parent)]
    elif backend == "sglang":
        python = server_venv(backend) / "bin" / "python"
        stub = SCRIPTS / "sgl_kernel_stub"
        config.sglang = {
            "command": f"{python} -m sglang.launch_server",
            "env": {"PYTHONPATH": str(stub), "SGLANG_USE_CPU_ENGINE": "1", **quiet},
            **{"device": "cpu", "dtype": "float32", "disable_overlap_schedule": True},
            **{"mem_fraction_static": 0.1, "max_total_tokens": 8192, "context_length": 512},
        }
    else:
        venv = server_venv(backend)
        config.vllm = {
            "command": f"{venv}/bin/vllm serve",
            "env": {
                **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
                **{"VLLM_NO_USAGE_STATS": "1", "PATH": f"{venv}/bin:{os.environ['PATH']}", **quiet},
            },
            **{"dtype": "float32", "max_model_len": 512, "enforce_eager": True},
            # vLLM 0.32 on CPU crashes when the prompt of a seeded request is cut into chunks.
            "no_enable_chunked_prefill": True,
        }
    return config


@dataclass
class RealServers:
    """Servers of one backend, started together."""

    backend: str
    addresses: list[str] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)


def start_servers(supervisor: Supervisor, backend: str, model: Path, logs: Path, count: int = 1) -> RealServers:
    servers = RealServers(backend)
    config = launch_config(backend, model)
    config.cluster.fileroot = str(logs)
    # adapters too, on the same server
    if backend == "sglang":
        config.sglang |= {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": "all"}
        config.sglang |= {"max_loras_per_batch": 2, "max_loaded_loras": 2}
        config.sglang["lora_backend"] = "torch_native"
    elif backend == "vllm":
        config.vllm |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 2}
        config.vllm["env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    for index in range(count):
        port = free_port()
        command = BACKENDS[backend].command(config, port)
        if backend == "embedded":
            warm_python.prepare()
            command[1:1] = ["-E", "-S", warm_python.__file__, "--run"]
        env = {"OMP_NUM_THREADS": "1", **prepare_server(config, backend)}
        spec = ChildSpec(f"{backend}{index}", command, logs / f"{backend}{index}.log", env)
        servers.children.append(supervisor.start(spec))
        servers.addresses.append(f"127.0.0.1:{port}")
    for address, child in zip(servers.addresses, servers.children, strict=True):
        for _ in range(START_TIMEOUT_S * 5):
            if health_problem(address) is None:
                break
            assert not supervisor.wait(0.2), child.last_lines()
        else:
            pytest.fail(f"{child.name} is not healthy: {child.last_lines()}")
    return servers


@pytest.fixture(
    scope="module",
    params=[
        "embedded",
        pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(800)]),
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(800)]),
    ],
)
def servers(request, models, tmp_path_factory) -> Iterator[RealServers]:
    """One server of each backend in turn."""
    with Supervisor(stop_timeout_s=5) as supervisor:
        logs = tmp_path_factory.mktemp("logs")
        yield start_servers(supervisor, request.param, models[0], logs)
