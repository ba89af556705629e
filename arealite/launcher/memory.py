"""Estimates the memory of every device of a job before anything is started.

Printed by `--dry-run` and `arealite plan`, with what to change if it is too little. Needs the config.json of each
model, no torch and no GPU: without one here, `cluster.gpu_memory_gib` says how large they are. The formulas are in
`arealite.utils.memory.estimate`.
"""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import psutil
from omegaconf import OmegaConf

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.backends import BACKENDS
from arealite.api.cli_args import OptimizerConfig, ServerConfig, TrainEngineConfig
from arealite.launcher.job import Job
from arealite.launcher.placement import Placement
from arealite.launcher.reward_memory import reward_needs
from arealite.utils.memory.estimate import (
    CUDA_CONTEXT,
    PROCESS,
    Needs,
    choose_sizes,
    cpu_sizes,
    reserved_bytes,
    server_needs,
    stage_parameters,
    sums_gradients,
    training_needs,
    weight_bytes,
    without_low_bit,
)
from arealite.utils.memory.model_size import ModelSize, read_model_size

NO_ROOM = "WILL NOT FIT"  # a device that is too small
_TRAINED, _FROZEN = ("actor", "model", "critic"), ("ref", "teacher")
# What SGLang and vLLM take of a GPU unless a flag says otherwise.
_SHARES = {"sglang": ("mem_fraction_static", 0.88), "vllm": ("gpu_memory_utilization", 0.9)}
# Prompts have no limit unless `train_dataset.max_length` is set: longer ones are rare.
_USUAL_PROMPT = 1024
# Above this share of a device the estimate may be too low.
_TIGHT = 0.9
_MOST_ADVICE = 4

Values = Mapping[str, Any]
Place = tuple[int, int | None]


@dataclass
class Process:
    """One process on a device: what stays of each engine, and the largest pass on top of it."""

    name: str
    context: float
    engines: dict[str, Needs]

    @property
    def total(self) -> float:
        lasting = sum(sum(needs.lasting.values()) for needs in self.engines.values())
        return self.context + lasting + max(sum(needs.passing.values()) for needs in self.engines.values())

    def describe(self) -> list[str]:
        """Return one line, or with several engines one for each of them too."""
        largest = max(self.engines, key=lambda name: sum(self.engines[name].passing.values()))
        parts: dict[str, list[str]] = {}
        for name, needs in self.engines.items():
            shown = needs.lasting | (needs.passing if name == largest else {})
            notes = {part: f" ({note})" for part, note in needs.notes.items()}
            parts[name] = [f"{part} {_gib(size)}{notes.get(part, '')}" for part, size in shown.items()]
        context, title = f"process {_gib(self.context)}", f"{self.name} {_gib(self.total)}"
        if len(parts) == 1:
            return [f"{title}: {', '.join([*parts.popitem()[1], context])}"]
        return [f"{title}: {context}, and"] + [
            f"  {name}: {', '.join(own) or 'on the host'}" for name, own in parts.items()
        ]


@dataclass
class Device:
    """A GPU or the host of a node, and the processes that share it."""

    name: str
    total: float | None
    processes: list[Process]

    @property
    def needed(self) -> float:
        return sum(process.total for process in self.processes)

    @property
    def fits(self) -> bool:
        return self.total is None or self.needed <= self.total


def describe_memory(job: Job, runs_here: bool) -> str:
    """Return the estimate for each device, and what to change if one is too small.

    `runs_here`: this machine's memory is that of the job's hosts.
    """
    values: Values = OmegaConf.to_container(OmegaConf.create(job.config.resolved_yaml), resolve=False)  # pyright: ignore
    missing = [path for path in _model_paths(job, values) if read_model_size(path) is None]
    if missing or not _model_paths(job, values):
        what = f"the sizes of {missing[0]} are not known here" if missing else "the configuration names no model"
        return f"memory: not estimated, because {what}"
    devices = estimate(job, values, runs_here)
    lines = ["memory in GiB, estimated (at most, with the longest answers):"]
    for _, group in groupby(devices, key=lambda d: [(p.name.split()[0], round(p.total)) for p in d.processes]):
        same = list(group)
        name = same[0].name if len(same) == 1 else f"{same[0].name} to {same[-1].name}, each"
        of = f" of {_gib(same[0].total)}" if same[0].total else ""
        lines.append(f"  {name}: {_gib(max(d.needed for d in same))}{of}")
        lines += [f"    {line}" for process in same[0].processes for line in process.describe()]
    return "\n".join([*lines, *_verdict(job, values, devices)])


def estimate(job: Job, values: Values, runs_here: bool) -> list[Device]:
    """Return what each device of the job will hold. `values` is the whole configuration."""
    placement, total = job.placement(), _gpu_bytes(values) if job.on_gpu else None
    sizes = {path: read_model_size(path) for path in _model_paths(job, values)}
    servers, host = _Servers(job, placement, values, sizes), float(psutil.virtual_memory().total) if runs_here else None
    devices: list[Device] = []
    for place in _places(placement):
        free = total if (on_gpu := place[1] is not None) else host
        processes = servers.on(place, free)
        used = sum(process.total for process in processes)
        processes += _ranks(job, place, values, sizes, None if free is None else free - used)
        context, scored = CUDA_CONTEXT if on_gpu else PROCESS, reward_needs(values, placement, place)
        processes += [Process("reward model", context, {path: needs}) for path, needs in scored.items()]
        name = f"node {place[0]} gpu {place[1]}" if on_gpu else f"node {place[0]} host"
        devices += [Device(name, free, processes)] if processes else []
    return devices + (_hosts(placement, devices, host) if job.on_gpu else [])


def _hosts(placement: Placement, devices: list[Device], total: float | None) -> list[Device]:
    """Return the hosts of nodes with GPUs: interpreters, offloaded states, and models while they load."""
    hosts = []
    for node in sorted({int(device.name.split()[1]) for device in devices}):
        here = [p for device in devices if device.name.startswith(f"node {node} gpu") for p in device.processes]
        processes = []
        for process in here:
            engines = {name: Needs(needs.host) for name, needs in process.engines.items() if needs.host}
            loads = process.name.endswith("rank 0") or process.name.startswith("server")
            size = max(1, placement.mode.train_world_size) if process.name.endswith("rank 0") else 1
            largest = max(
                needs.loaded or size * (needs.lasting | needs.host).get("weights", 0.0)
                for needs in process.engines.values()
            )
            # Optimizer states and gradients come when nothing is loaded any more.
            later = sum(v for needs in engines.values() for k, v in needs.lasting.items() if k != "weights")
            loading = max(0.0, largest - later) if loads else 0.0
            engines |= {"all": Needs({}, {"loading": loading})} if loading or not engines else {}
            processes.append(Process(process.name, PROCESS, engines))
        hosts.append(Device(f"node {node} host", total, processes))
    return hosts


def _model_paths(job: Job, values: Values) -> list[str]:
    paths = [str(values[name]["path"]) for name in (*_TRAINED, *_FROZEN) if _has_model(values, name)]
    is_served = bool(job.placement().servers) and bool(job.config.model_path)
    return list(dict.fromkeys([*paths, *([job.config.model_path] if is_served else [])]))


def _has_model(values: Values, name: str) -> bool:
    return isinstance(values.get(name), dict) and bool(values[name].get("path"))


def _places(placement: Placement) -> list[Place]:
    """Return the devices that the job uses; a node without GPUs is one device."""
    found: list[Place] = []
    for server in placement.servers:
        for node, devices in server.places:
            found += [(node, d) for d in devices if placement.on_gpu] or [(node, None)]
    for *_, rank in placement.trainers:
        found.append((rank.node, rank.device if placement.on_gpu else None))
    return sorted(set(found), key=lambda place: (place[0], -1 if place[1] is None else place[1]))


class _Servers:
    """The servers of a job."""

    def __init__(self, job: Job, placement: Placement, values: Values, sizes: Mapping[str, ModelSize | None]):
        self.placement, self.values = placement, values
        self.size = sizes.get(job.config.model_path)
        config = _make(ServerConfig, values.get("server"))
        mode, halved = placement.mode, placement.shares_gpus
        share = config.mem_fraction / 2 if halved else config.mem_fraction
        self.config = replace(config, mem_fraction=share, tensor_parallel=mode.gen.tensor if mode.gen else 1)
        self.backend = mode.gen_backend or ""
        self.halved = halved

    def on(self, place: Place, total: float | None) -> list[Process]:
        """Return the servers, or parts of servers, on one device."""
        node, device = place
        own = [(s, d) for s in self.placement.servers for n, d in s.places if n == node]
        # Servers with a GPU are not on the host, too.
        here = [s for s, d in own if (device in d if d and self.placement.on_gpu else device is None)]
        if not here or self.size is None:
            return []
        context = CUDA_CONTEXT if device is not None else PROCESS
        return [Process(f"server {s.index}", context, {"server": self._needs(total, device is not None)}) for s in here]

    def _adapted(self) -> float:
        """Return the parameters of layers that LoRA changes, if adapters are sent instead of merged weights."""
        actor, rollout = self.values.get("actor") or {}, self.values.get("rollout") or {}
        if not actor.get("lora_rank") or actor.get("frozen_weight_dtype", "auto") != "auto":
            return 0.0
        if rollout.get("weight_update", "auto") not in ("auto", "disk"):
            return 0.0
        assert self.size is not None
        return self.size.adapted_parameters(actor.get("lora_targets") or ())

    def _needs(self, total: float | None, on_gpu: bool) -> Needs:
        assert self.size is not None
        if self.backend not in _SHARES:
            is_updated = self.placement.mode.train is not None
            return server_needs(self.size, self.config, total, on_gpu, is_updated, self._adapted())
        flag, default = _SHARES[self.backend]
        flags = BACKENDS[self.backend].shared_gpu_flags if self.halved else {}
        share = float((flags | dict(self.values.get(self.backend) or {})).get(flag, default))
        stages = self.placement.mode.gen.pipeline if self.placement.mode.gen else 1
        weights = 2.0 * stage_parameters(self.size, stages) / self.config.tensor_parallel
        rest = max(0.0, share * (total or 0.0) - weights)
        return Needs(
            {"weights": weights, "KV cache and graphs": rest}, notes={"KV cache and graphs": f"{flag}={share}"}
        )


def _ranks(
    job: Job, place: Place, values: Values, sizes: Mapping[str, ModelSize | None], left: float | None
) -> Iterator[Process]:
    """Yield the trainer ranks on one device, which has `left` bytes besides its servers."""
    placement, (node, device) = job.placement(), place
    scalar = {"critic", "model"} if job.config.trains_reward_model else {"critic"}
    for process, engine, rank in placement.trainers:
        if rank.node != node or (device is not None and rank.device != device) or placement.mode.train is None:
            continue
        if device is None and placement.on_gpu and rank.device is not None:
            continue
        names = [n for n in (*_TRAINED, *_FROZEN) if _has_model(values, n) and engine in (None, n)]
        context = CUDA_CONTEXT if device is not None else PROCESS
        configs = {name: _engine_config(name, values[name]) for name in names}
        models = {name: sizes[str(values[name]["path"])] for name in names}
        known = {n: s.with_scalar_head() if n in scalar else s for n, s in models.items() if s is not None}
        weights = sum(weight_bytes(s, configs[n], placement.mode.train) for n, s in known.items())
        free = None if left is None else left - context - weights
        engines = {
            name: _engine_needs(
                name, size, configs[name], placement.mode.train, free, device is not None, values, name in scalar
            )
            for name, size in known.items()
        }
        for needs in list(engines.values())[1:]:
            # One for all engines of a process.
            needs.lasting.pop("communication", None)
        if engines:
            yield Process(process, context, engines)


def _engine_needs(
    name: str,
    size: ModelSize,
    config: TrainEngineConfig,
    train: ParallelStrategy,
    free: float | None,
    on_gpu: bool,
    values: Values,
    has_scalar_head: bool,
) -> Needs:
    whole = stage_parameters(without_low_bit(size, config), train.pipeline)
    own = whole * train.pipeline / train.world_size if not config.lora_rank else 0.0
    if not on_gpu:
        plan = cpu_sizes(config)
    else:
        # Without a known device as much as the engine takes at most.
        stage_trained = whole if train.pipeline > 1 else own
        summed = stage_trained if own and sums_gradients(config, train) else 0.0
        gathered = without_low_bit(size, config).gathered_at_once(train, whole)
        room = 10e12 if free is None else free - reserved_bytes(config, own, gathered, summed)
        plan = choose_sizes(size, config, room)
    tokens = _step_tokens(name, size, train, values)
    return training_needs(size, config, plan, on_gpu, train, tokens, scalar_head=has_scalar_head)


def _step_tokens(name: str, size: ModelSize, train: ParallelStrategy, values: Values) -> int | None:
    """Return the most tokens of an optimizer step on a data-parallel rank; None if nothing limits them."""
    data = values.get("train_dataset") or {}
    rows = int(data.get("batch_size") or 8)
    longest = data.get("max_length")
    gconfig = values.get("gconfig")
    if gconfig:
        rows *= int(gconfig.get("n_samples") or 1)
        longest = int(longest or _USUAL_PROMPT) + int(gconfig.get("max_new_tokens") or 512)
    elif longest is None:
        return None
    section = values.get(name) or {}
    rows = -(-rows // (train.data * int(section.get("ppo_n_minibatches") or 1)))
    return rows * min(longest, size.context)


def _engine_config(name: str, section: Values) -> TrainEngineConfig:
    config = _make(TrainEngineConfig, {k: v for k, v in section.items() if k != "optimizer"})
    if name in _FROZEN or ("optimizer" in section and section["optimizer"] is None):
        return replace(config, optimizer=None)
    return replace(config, optimizer=_make(OptimizerConfig, section.get("optimizer")))


def _make(cls: type, section: Any) -> Any:
    """Make a section from its values; those that refer to variables are left out."""
    known = {each.name for each in fields(cls)}
    values = {k: v for k, v in dict(section or {}).items() if k in known}
    return cls(**{k: v for k, v in values.items() if not (isinstance(v, str) and "${" in v)})


def _gpu_bytes(values: Values) -> float | None:
    """Return the memory of the smallest GPU: as configured, else of this machine; None if there is none."""
    given = (values.get("cluster") or {}).get("gpu_memory_gib")
    if given:
        return float(given) * 2**30
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    listing = subprocess.run(command, text=True, capture_output=True, timeout=60).stdout
    found = [float(line) for line in listing.split() if line.strip().isdigit()]
    return min(found) * 2**20 if found else None


def _verdict(job: Job, values: Values, devices: list[Device]) -> Iterator[str]:
    """Yield what does not fit, and changes that help."""
    if any(device.total is None and "gpu" in device.name for device in devices):
        yield "  the memory of the GPUs is not known here: set cluster.gpu_memory_gib=80 to see whether this fits"
    shown: set[str] = set()
    for device in devices:
        kind = ", ".join(process.name.split()[0] for process in device.processes)
        if device.total is None or kind in shown or device.needed <= _TIGHT * device.total:
            continue
        shown.add(kind)
        if device.fits:
            yield f"  {device.name} is nearly full: the estimate may be some percent too low"
            continue
        yield f"{NO_ROOM}: {device.name} needs {_gib(device.needed)} GiB and has {_gib(device.total)}"
        advice = list(_advice(job, values, device))
        yield "set one of:" if advice else "use more or larger devices (allocation_mode), or a smaller model"
        yield from (f"  {line}" for line in advice[:_MOST_ADVICE])


def _advice(job: Job, values: Values, small: Device) -> Iterator[str]:
    """Yield settings with which a device has room, the mildest first."""
    seen: set[str] = set()
    for changes in _changes(values, small):
        # The first of a series of smaller and smaller values is enough.
        kind = " ".join(sorted(changes))
        if kind in seen:
            continue
        changed = OmegaConf.create(dict(values))
        for key, value in changes.items():
            OmegaConf.update(changed, key, value, force_add=True)
        with_changes: Any = OmegaConf.to_container(changed, resolve=False)
        again = estimate(job, with_changes, runs_here=True)
        then = next(device for device in again if device.name == small.name)
        if then.fits:
            seen.add(kind)
            yield " ".join(f"{k}={_text(v)}" for k, v in changes.items()) + f"   (then {_gib(then.needed)} GiB)"


def _changes(values: Values, worst: Device) -> Iterator[dict[str, Any]]:
    main = next((name for name in _TRAINED if _has_model(values, name)), None)
    if any(process.name.startswith("server") for process in worst.processes):
        share = float((values.get("server") or {}).get("mem_fraction") or 0.8)
        yield from ({"server.mem_fraction": part} for part in (0.6, 0.4, 0.2, 0.1) if part < share)
    if main is None:
        return
    yield from ({f"{name}.param_dtype": "bfloat16"} for name in _FROZEN if _has_model(values, name))
    yield {f"{main}.gradient_checkpointing": True}
    for tokens in (16384, 8192, 4096, 2048):
        yield {f"{main}.max_tokens_per_mb": tokens, f"{main}.gradient_checkpointing": True}
    yield {f"{main}.optimizer.type": "adamw_8bit"}
    small = {f"{main}.param_dtype": "bfloat16", f"{main}.gradient_checkpointing": True}
    yield small | {f"{main}.optimizer.type": "adamw_bf16"}
    yield small | {f"{main}.optimizer.type": "adamw_8bit", f"{main}.max_tokens_per_mb": 4096}
    if not (values[main].get("lora_rank")):
        yield small | {f"{main}.lora_rank": 16}
        yield {f"{main}.lora_rank": 16, "server.mem_fraction": 0.3} | small
    size = read_model_size(str(values[main]["path"]))
    if size is not None and not size.experts:
        base = small | {f"{main}.lora_rank": values[main].get("lora_rank") or 16}
        yield from (base | {f"{main}.frozen_weight_dtype": kind} for kind in ("fp8", "nf4"))
    yield {f"{main}.cpu_offload": True, f"{main}.gradient_checkpointing": True}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gib(size: float | None) -> str:
    return f"{(size or 0.0) / 2**30:.1f}"
