"""What to start where: from `allocation_mode` and the configuration to processes on devices. Pure, apart from reading files.

`read_launch_config` finds out what a script will be configured with, before anything is started; `make_plan` turns it into
servers and trainer ranks, or refuses with the arithmetic. All launchers use both; `--dry-run` prints the plan.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from arealite.api import cli_args
from arealite.api.alloc_mode import AllocationMode
from arealite.api.config_field import check_section
from arealite.api.errors import AllocationError, ConfigError
from arealite.utils.config import CHECK_ONLY_ENV, load_config, load_plain, to_yaml

_CHECK_TIMEOUT_S = 300.0
# Sections of a configuration that become engines.
_MODELS = ("actor", "critic", "ref", "teacher", "model")


@dataclass
class LaunchConfig:
    """The keys that a launcher reads; a script's configuration may have any others."""

    experiment_name: str = "run"
    trial_name: str = "trial"
    allocation_mode: str = "d1"
    cluster: cli_args.ClusterConfig = field(default_factory=cli_args.ClusterConfig)
    launcher: cli_args.LauncherConfig = field(default_factory=cli_args.LauncherConfig)
    recover: cli_args.RecoverConfig = field(default_factory=cli_args.RecoverConfig)
    server: cli_args.ServerConfig = field(default_factory=cli_args.ServerConfig)
    sglang: dict[str, Any] = field(default_factory=dict)
    vllm: dict[str, Any] = field(default_factory=dict)
    model_path: str = ""
    train_device: str = "auto"
    setup_timeout_s: float = 300.0
    weight_update: str = "auto"
    lora_rank: int = 0
    resolved_yaml: str = ""
    controller: bool = False
    models: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ServerPlan:
    """One inference server: its devices, as (node, device indices); more than one node if it spans them."""

    index: int
    places: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class RankPlan:
    """One trainer process."""

    rank: int
    local_rank: int
    node: int
    device: int | None


@dataclass(frozen=True)
class Plan:
    """Servers and ranks of one run, placed on nodes. Devices are indices among those of a node; without `on_gpu` only places.

    In controller mode the only rank is the driver, and `engines` have ranks that Ray places.
    """

    mode: AllocationMode
    servers: tuple[ServerPlan, ...]
    ranks: tuple[RankPlan, ...]
    threads: int
    on_gpu: bool
    engines: tuple[str, ...] = ()

    def servers_on(self, node: int) -> list[ServerPlan]:
        return [s for s in self.servers if any(n == node for n, _ in s.places)]

    def ranks_on(self, node: int) -> list[RankPlan]:
        return [rank for rank in self.ranks if rank.node == node]

    @property
    def shares_gpus(self) -> bool:
        """Whether a server and a rank have a GPU in common."""
        taken = {(node, device) for s in self.servers for node, gpus in s.places for device in gpus}
        return self.on_gpu and any((rank.node, rank.device) in taken for rank in self.ranks)

    def describe(self) -> str:
        """What runs where, one process a line."""
        what = "gpu" if self.on_gpu else "slot"
        size = self.mode.train_world_size
        count = size * len(self.engines) or len(self.ranks)
        lines = [f"{self.mode}: {len(self.servers)} servers, {count} trainer ranks"]
        for server in self.servers:
            places = [f"node {n} {what} {','.join(map(str, d)) or '-'}" for n, d in server.places]
            lines.append(f"  server {server.index}: {'; '.join(places)}")
        if self.engines:
            lines += ["  driver: node 0, runs the script", "  rollout: 1 actor with the executor"]
            group = f"{size} rank(s), one {what} each, in a placement group of their own"
            return "\n".join([*lines, *(f"  {engine}: {group}" for engine in self.engines)])
        for rank in self.ranks:
            device = "-" if rank.device is None else rank.device
            shared = " (shared with a server)" if self.shares_gpus else ""
            lines.append(f"  rank {rank.rank}: node {rank.node} {what} {device}{shared}")
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------ configuration


def read_launch_config(script: str, argv: list[str], controls: bool = False) -> LaunchConfig:
    """What `script` will be configured with by `argv`. Whatever it would refuse is refused here, before anything starts.

    `controls` says whether the launcher has a controller mode.
    """
    text = _resolved(script, argv) if script.endswith(".py") else ""
    config = _view(OmegaConf.create(text) if text else load_plain(argv, LaunchConfig), text)
    if config.controller and not controls:
        raise ConfigError("controller=true needs Ray: use mode=ray, or arealite.launcher.ray")
    return config


def _resolved(script: str, argv: list[str]) -> str:
    """The script's configuration as YAML; empty if it loads none.

    The class that it gives to `load_config` is looked up in its source. One of `arealite.api.cli_args` is loaded here; for any
    other the script itself is run once in check mode, in which `load_config` ends the process.
    """
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script}")
    class_name = _config_class_name(script)
    if class_name is None:
        return ""
    cls = getattr(cli_args, class_name, None)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        return to_yaml(load_config(argv, cls))
    return _ask_script(script, argv)


def _config_class_name(script: str) -> str | None:
    """The name given as the second argument of `load_config(argv, Class)`, unless it is shadowed by the script's own class."""
    try:
        tree = ast.parse(Path(script).read_text())
    except SyntaxError as error:
        where = f"line {error.lineno}: {error.msg}"
        raise ConfigError(f"{script} is not valid Python: {where}") from error
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) + len(node.keywords) != 2:
            continue
        if _last_name(node.func) == "load_config":
            name = _last_name(node.args[1] if len(node.args) == 2 else node.keywords[-1].value)
            return "" if name in own else name
    return None


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c` or of `c`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _ask_script(script: str, argv: list[str]) -> str:
    """Run the script up to its `load_config`, which writes the resolved configuration and ends it."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "config.yaml"
        command, env = [sys.executable, script, *argv], {**os.environ, CHECK_ONLY_ENV: str(answer)}
        result = subprocess.run(command, env=env, text=True, capture_output=True, timeout=_CHECK_TIMEOUT_S)
        if result.returncode != 0 or not answer.exists():
            output = (result.stderr or result.stdout).strip().removeprefix("error: ")
            raise ConfigError(output or f"{script} ended before it loaded its configuration")
        return answer.read_text()


def _view(values: Any, text: str) -> LaunchConfig:
    """Pick the keys a launcher needs; sections are completed by their defaults."""
    known = {f.name for f in dataclasses.fields(LaunchConfig)}
    picked = {str(k): v for k, v in values.items() if k in known}
    node = OmegaConf.merge(OmegaConf.structured(LaunchConfig), picked)
    config = OmegaConf.to_object(node)
    assert isinstance(config, LaunchConfig)
    model = values.get("actor") or values.get("model") or {}
    config.model_path = config.server.model_path or model.get("path", "")
    config.train_device = model.get("device", "auto")
    config.models = [n for n in _MODELS if (values.get(n) or {}).get("path")] or ["model"]
    rollout = values.get("rollout") or {}
    config.setup_timeout_s = rollout.get("setup_timeout_s", 300.0)
    config.weight_update = rollout.get("weight_update", "auto")
    config.lora_rank = model.get("lora_rank", 0)
    config.resolved_yaml = text or OmegaConf.to_yaml(values)
    check_section("recover", config.recover)
    check_section("cluster", config.cluster)
    return config


# ------------------------------------------------------------------------------------------------ devices


def visible_gpus() -> list[str]:
    """The accelerators of this machine that this process may use, as CUDA_VISIBLE_DEVICES names them: indices, `GPU-…` or `MIG-…`."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # CUDA too stops at the first that is none (`-1`, Slurm's `NoDevFiles`).
        return list(takewhile(lambda n: n.isdigit() or n.startswith(("GPU-", "MIG-")), names))
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], text=True, capture_output=True, timeout=60)
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return [str(index) for index in range(count)]


def make_plan(config: LaunchConfig, nodes: list[list[int]], on_gpu: bool) -> Plan:
    """Place servers first, then ranks, filling nodes in order. `nodes` lists the devices (on CPU: places for processes) of each."""
    mode = AllocationMode.from_str(config.allocation_mode)
    if mode.gen_backend is not None and not config.model_path:
        raise ConfigError(
            f"allocation_mode={config.allocation_mode} starts servers, but no model is named: set actor.path or server.model_path"
        )
    slots = [(node, device) for node, devices in enumerate(nodes) for device in devices]
    gen_need, train_need = _needs(config, mode, on_gpu)
    engines = tuple(config.models) if config.controller else ()
    if gen_need + train_need > len(slots):
        raise AllocationError(_arithmetic(config, mode, gen_need, train_need, nodes))
    gen_slots, count = slots if gen_need else None, len(nodes)
    servers = tuple(_place_server(i, mode, gen_slots, count) for i in range(mode.num_servers))
    spread = next((s for s in servers if len(s.places) > 1), None)
    if mode.gen_backend == "embedded" and spread:
        raise ConfigError(_spread(config, spread, nodes))
    rank_slots = slots[gen_need:] if train_need and not engines else None
    ranks = _place_ranks(1 if engines else max(1, mode.train_world_size), rank_slots, len(nodes))
    others = mode.train_world_size * len(engines)
    processes = -(-(len(servers) + len(ranks) + others) // len(nodes))
    cores = len(os.sched_getaffinity(0))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdigit() else cores // processes
    threads = config.launcher.threads_per_process or max(1, threads)
    return Plan(mode, servers, tuple(ranks), threads, on_gpu, engines)


def _needs(config: LaunchConfig, mode: AllocationMode, on_gpu: bool) -> tuple[int, int]:
    """Devices that servers and trainers take: among accelerators, a side that was told to stay on the CPU takes none."""
    gen_free = on_gpu and mode.gen_backend == "embedded" and config.server.device == "cpu"
    train_free = on_gpu and config.train_device == "cpu"
    copies = max(1, len(config.models)) if config.controller else 1
    gen = 0 if gen_free else mode.gen_world_size
    return gen, 0 if train_free else mode.train_world_size * copies


def local_slots(config: LaunchConfig) -> tuple[list[list[int]], bool]:
    """The devices of this machine, numbered from 0. Both sides have the same ones where there are enough for each alone, but not for both.

    Without accelerators, as many places as the plan needs: processes are not limited by cores.
    """
    gpus, mode = len(visible_gpus()), AllocationMode.from_str(config.allocation_mode)
    gen, train = _needs(config, mode, gpus > 0)
    if gen + train > gpus >= max(gen, train) > 0:
        return [[*range(gen), *range(train)]], True
    return [list(range(gpus or mode.world_size))], gpus > 0


def cluster_slots(config: LaunchConfig) -> tuple[list[list[int]], bool]:
    """The devices of every node as the configuration states them; places for processes where both sides stay on the CPU."""
    cluster = config.cluster
    mode = AllocationMode.from_str(config.allocation_mode)
    gen_on_cpu = mode.gen is None or config.server.device == "cpu"
    train_on_cpu = mode.train is None or config.train_device == "cpu"
    on_gpu = not (gen_on_cpu and train_on_cpu)
    nodes = cluster.n_nodes or -(-sum(_needs(config, mode, False)) // cluster.n_gpus_per_node)
    return [list(range(cluster.n_gpus_per_node)) for _ in range(nodes)], on_gpu


def _place_server(index: int, mode: AllocationMode, slots: list[tuple[int, int]] | None, nodes: int) -> ServerPlan:
    if slots is None:
        return ServerPlan(index, ((index % nodes, ()),))
    assert mode.gen is not None
    size = mode.gen.instance_size
    mine = slots[index * size : (index + 1) * size]
    used = sorted({node for node, _ in mine})
    return ServerPlan(index, tuple((n, tuple(g for node, g in mine if node == n)) for n in used))


def _place_ranks(count: int, slots: list[tuple[int, int]] | None, nodes: int) -> list[RankPlan]:
    places: list[tuple[int, int | None]]
    if slots is None:  # no device needed: spread evenly
        per_node = -(-count // nodes)
        places = [(rank // per_node, None) for rank in range(count)]
    else:
        places = list(slots[:count])
    ranks, on_node = [], dict.fromkeys(range(nodes), 0)
    for rank, (node, device) in enumerate(places):
        ranks.append(RankPlan(rank, on_node[node], node, device))
        on_node[node] += 1
    return ranks


def _spread(config: LaunchConfig, server: ServerPlan, nodes: list[list[int]]) -> str:
    where = ", ".join(f"{len(devices)} of node {node}" for node, devices in server.places)
    return (
        f"allocation_mode={config.allocation_mode}: embedded server {server.index} would have devices on several nodes ({where}), and it cannot span "
        f"them. Nodes have {len(nodes[0])} devices: give it a tensor size (t) that divides that number, or use sglang or vllm."
    )


def _arithmetic(config: LaunchConfig, mode: AllocationMode, gen: int, train: int, gpus: list[list[int]]) -> str:
    sides = []
    if gen:
        sides.append(f"{mode.gen_backend} {mode.gen} = {gen}")
    if train:
        each = f" for each of {', '.join(config.models)}" if config.controller else ""
        sides.append(f"training {mode.train}{each} = {train}")
    have = " + ".join(str(len(g)) for g in gpus)
    total = sum(map(len, gpus))
    return (
        f"allocation_mode={config.allocation_mode} needs {gen + train} devices ({', '.join(sides)}), "
        f"but there are {total} ({len(gpus)} node(s): {have}). Lower the degrees, or add machines (cluster.n_nodes) or devices."
    )
