"""Places inference servers and trainer ranks on the devices of a job's nodes.

`make_placement` turns `allocation_mode` into a `Placement`, or raises with the arithmetic. All launchers use it;
`--dry-run` prints the result. Pure, apart from looking up the devices of this machine.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from itertools import count, takewhile

from arealite.api.alloc_mode import AllocationMode
from arealite.api.errors import AllocationError, ConfigError
from arealite.launcher.launch_config import LaunchConfig


@dataclass(frozen=True)
class ServerPlacement:
    """One inference server: its devices as (node, device indices), with one entry per node that it spans."""

    index: int
    places: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class RankPlacement:
    """One trainer process."""

    rank: int
    local_rank: int
    node: int
    device: int | None


@dataclass(frozen=True)
class Placement:
    """Servers and ranks of one run, placed on nodes.

    Devices are indices among those of a node; without `on_gpu` they are slots for processes. In controller mode the
    only rank is the driver, and Ray places the ranks of `engines`.
    """

    mode: AllocationMode
    servers: tuple[ServerPlacement, ...]
    ranks: tuple[RankPlacement, ...]
    threads: int
    on_gpu: bool
    engines: tuple[str, ...] = ()
    # Where they fit, by engine: Ray may choose other devices of the same kind.
    engine_ranks: tuple[tuple[str, RankPlacement], ...] = ()
    # Addresses of servers that already run (`rollout.server_addrs`); then `servers` is empty.
    external_servers: tuple[str, ...] = ()

    def servers_on(self, node: int) -> list[ServerPlacement]:
        return [s for s in self.servers if any(n == node for n, _ in s.places)]

    def ranks_on(self, node: int) -> list[RankPlacement]:
        return [rank for rank in self.ranks if rank.node == node]

    @property
    def trainers(self) -> list[tuple[str, str | None, RankPlacement]]:
        """Processes with models, by name; the second is the only engine of a process in controller mode."""
        if self.engines:
            return [(f"{engine} rank {rank.rank}", engine, rank) for engine, rank in self.engine_ranks]
        return [(f"rank {rank.rank}", None, rank) for rank in self.ranks]

    @property
    def shares_gpus(self) -> bool:
        """Whether a server and a rank have a GPU in common."""
        taken = {(node, device) for s in self.servers for node, gpus in s.places for device in gpus}
        return self.on_gpu and any((rank.node, rank.device) in taken for rank in self.ranks)

    def describe(self) -> str:
        """List what runs where, one process per line."""
        unit = "gpu" if self.on_gpu else "slot"
        size = self.mode.train_world_size
        count = size * len(self.engines) or len(self.ranks)
        num_servers = f"{len(self.external_servers)} running" if self.external_servers else str(len(self.servers))
        servers = "server" if len(self.external_servers or self.servers) == 1 else "servers"
        lines = [f"{self.mode}: {num_servers} {servers}, {count} trainer {'rank' if count == 1 else 'ranks'}"]
        lines += [f"  running server: {address}" for address in self.external_servers]
        for server in self.servers:
            places = [f"node {n} {unit} {','.join(map(str, d)) or '-'}" for n, d in server.places]
            lines.append(f"  server {server.index}: {'; '.join(places)}")
        if self.engines:
            lines += ["  driver: node 0, runs the script", "  rollout: 1 actor with the executor"]
            group = f"{size} rank(s), one {unit} each, in a placement group of their own"
            return "\n".join([*lines, *(f"  {engine}: {group}" for engine in self.engines)])
        for rank in self.ranks:
            device = "-" if rank.device is None else rank.device
            shared = " (shared with a server)" if self.shares_gpus else ""
            lines.append(f"  rank {rank.rank}: node {rank.node} {unit} {device}{shared}")
        return "\n".join(lines)


def visible_gpus() -> list[str]:
    """List the GPUs this process may use as in CUDA_VISIBLE_DEVICES: indices, `GPU-…` or `MIG-…`."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # Like CUDA, stop at the first name that is not a device (`-1`, Slurm's `NoDevFiles`).
        return list(takewhile(lambda n: n.isdigit() or n.startswith(("GPU-", "MIG-")), names))
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], text=True, capture_output=True, timeout=60)
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return [str(index) for index in range(count)]


def local_slots(config: LaunchConfig) -> tuple[list[list[int]], bool]:
    """Return (devices of this machine, numbered from 0; whether they are GPUs).

    Both sides get the same GPUs if there are enough for each side alone but not for both. Without GPUs there are as
    many slots as the job needs: cores do not limit processes.
    """
    gpus = len(visible_gpus())
    gen, train = _count_devices(config, gpus > 0)
    if gen + train > gpus >= max(gen, train) > 0:
        return [[*range(gen), *range(train)]], True
    return [list(range(gpus or gen + train))], gpus > 0


def cluster_slots(config: LaunchConfig) -> tuple[list[list[int]], bool]:
    """Return (devices of every node as configured, whether they are GPUs)."""
    cluster, mode = config.cluster, config.mode
    gen_on_cpu = mode.gen is None or bool(config.server_addrs) or config.server.device == "cpu"
    train_on_cpu = mode.train is None or config.train_device == "cpu"
    on_gpu = not (gen_on_cpu and train_on_cpu)
    nodes = cluster.n_nodes or -(-sum(_count_devices(config, False)) // cluster.n_gpus_per_node)
    return [list(range(cluster.n_gpus_per_node)) for _ in range(max(1, nodes))], on_gpu


def _count_devices(config: LaunchConfig, on_gpu: bool) -> tuple[int, int]:
    """Count the devices of (servers, trainers). A side on the CPU takes no GPU."""
    mode = config.mode
    gen_on_cpu = mode.gen_backend == "embedded" and config.server.device == "cpu"
    gen = 0 if config.server_addrs or (on_gpu and gen_on_cpu) else mode.gen_world_size
    copies = max(1, len(config.models)) if config.controller else 1
    return gen, 0 if on_gpu and config.train_device == "cpu" else mode.train_world_size * copies


def make_placement(config: LaunchConfig, nodes: list[list[int]], on_gpu: bool) -> Placement:
    """Place servers first, then ranks, filling nodes in order. `nodes` lists the devices of each."""
    mode = config.mode
    num_servers = 0 if config.server_addrs else mode.num_servers
    if num_servers and not config.model_path:
        raise ConfigError(
            f"allocation_mode={config.allocation_mode} starts servers, but no model is named: "
            "set actor.path or server.model_path"
        )
    slots = [(node, device) for node, devices in enumerate(nodes) for device in devices]
    num_gen, num_train = _count_devices(config, on_gpu)
    if num_gen + num_train > len(slots):
        raise AllocationError(_explain_shortage(config, num_gen, num_train, nodes))
    engines = tuple(config.models) if config.controller else ()
    gen_slots = slots if num_gen else None
    servers = tuple(_place_server(i, mode, gen_slots, len(nodes)) for i in range(num_servers))
    _check_spread(config, servers, nodes)
    rank_slots = slots[num_gen:] if num_train and not engines else None
    ranks = _place_ranks(1 if engines else max(1, mode.train_world_size), rank_slots, len(nodes))
    engine_ranks = []
    for i, engine in enumerate(engines):
        own = slots[num_gen + i * mode.train_world_size :] if num_train else None
        engine_ranks += [(engine, rank) for rank in _place_ranks(mode.train_world_size, own, len(nodes))]
    num_processes = len(servers) + len(ranks) + mode.train_world_size * len(engines)
    threads = config.launcher.threads_per_process or _threads_per_process(-(-num_processes // len(nodes)))
    running = tuple(config.server_addrs)
    return Placement(mode, servers, tuple(ranks), threads, on_gpu, engines, tuple(engine_ranks), running)


def _threads_per_process(num_processes: int) -> int:
    """OMP_NUM_THREADS if it is set, else an equal share of the cores."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    share = int(wanted) if wanted.isdigit() else len(os.sched_getaffinity(0)) // num_processes
    return max(1, share)


def _place_server(index: int, mode: AllocationMode, slots: list[tuple[int, int]] | None, nodes: int) -> ServerPlacement:
    if slots is None:
        return ServerPlacement(index, ((index % nodes, ()),))
    assert mode.gen is not None
    size = mode.gen.instance_size
    mine = slots[index * size : (index + 1) * size]
    used = sorted({node for node, _ in mine})
    return ServerPlacement(index, tuple((n, tuple(g for node, g in mine if node == n)) for n in used))


def _place_ranks(num_ranks: int, slots: list[tuple[int, int]] | None, nodes: int) -> list[RankPlacement]:
    places: list[tuple[int, int | None]]
    if slots is None:  # no device needed: spread evenly
        per_node = -(-num_ranks // nodes)
        places = [(rank // per_node, None) for rank in range(num_ranks)]
    else:
        places = list(slots[:num_ranks])
    local_ranks = {node: count() for node in range(nodes)}
    return [RankPlacement(rank, next(local_ranks[node]), node, device) for rank, (node, device) in enumerate(places)]


def _check_spread(config: LaunchConfig, servers: tuple[ServerPlacement, ...], nodes: list[list[int]]) -> None:
    """Raise for an embedded server whose devices are on several nodes."""
    server = next((s for s in servers if len(s.places) > 1), None)
    if config.mode.gen_backend != "embedded" or server is None:
        return
    where = ", ".join(f"{len(devices)} of node {node}" for node, devices in server.places)
    raise ConfigError(
        f"allocation_mode={config.allocation_mode}: embedded server {server.index} would have devices on several nodes "
        f"({where}), and it cannot span them. Nodes have {len(nodes[0])} devices: give it a tensor size (t) that "
        "divides that number, or use sglang or vllm."
    )


def _explain_shortage(config: LaunchConfig, num_gen: int, num_train: int, nodes: list[list[int]]) -> str:
    mode, sides = config.mode, []
    if num_gen:
        sides.append(f"{mode.gen_backend} {mode.gen} = {num_gen}")
    if num_train:
        each = f" for each of {', '.join(config.models)}" if config.controller else ""
        sides.append(f"training {mode.train}{each} = {num_train}")
    have = " + ".join(str(len(devices)) for devices in nodes)
    return (
        f"allocation_mode={config.allocation_mode} needs {num_gen + num_train} devices ({', '.join(sides)}), "
        f"but there are {sum(map(len, nodes))} ({len(nodes)} node(s): {have}). Lower the degrees, or add machines "
        "(cluster.n_nodes) or devices."
    )
