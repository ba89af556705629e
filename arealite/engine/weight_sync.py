"""Handing new weights from the trainer to the inference servers, and saying where they travel.

Called once per training step by the script or trainer, on all ranks. Publishing happens while servers still generate;
they are paused only to load. When `sync_weights` returns, trainer and servers hold the same version.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils.hub import cached_file

from arealite.api.cli_args import GRPOConfig
from arealite.api.engine_api import InferenceEngine, TrainEngine
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.embedded import EmbeddedEngine
from arealite.engine.remote.base import RemoteEngine
from arealite.utils import distributed
from arealite.utils.rundir import RunDir
from arealite.weights import device_memory as device_weights

logger = logging.getLogger("arealite.weights")

_WEIGHT_FILES = ("*.safetensors", "*.bin")
_HEADROOM = 2.5  # files may hold 16 bits of what is published with 32


def make_weight_meta(
    config: GRPOConfig, run_dir: RunDir | str | Path, rollout: RemoteEngine | EmbeddedEngine | None = None
) -> WeightUpdateMeta:
    """How weights travel, by `rollout.weight_update`. With `shm` and servers that share the trainer's GPU they stay on it, if `rollout` is given to ask them."""
    folders = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    way = asked = config.rollout.weight_update
    if asked == "auto":
        way = _choose_way(config, str(folders.shared_weights), rollout)
    if way == "disk":
        # An adapter is all that changes: whoever reads a folder has the base model already.
        is_adapter = config.actor.lora_rank > 0
        return WeightUpdateMeta("disk", path=str(folders.weights), is_adapter=is_adapter)
    if way == "shm":
        path = str(folders.shared_weights)
        # On the GPU it costs a copy of the weights there: not for who has not asked for it.
        on_gpu = asked == "shm" and config.actor.device != "cpu" and torch.cuda.is_available()
        if on_gpu and rollout is not None and _can_share_gpu(rollout, path):
            path += device_weights.SUFFIX
        return WeightUpdateMeta("shm", path=path)
    return WeightUpdateMeta("broadcast")


def _can_share_gpu(rollout: RemoteEngine | EmbeddedEngine, path: str) -> bool:
    """Whether every server can map memory of rank 0's GPU: tried with a few bytes, decided for the whole run, and told."""
    answer = None
    if distributed.rank() == 0:
        try:
            why_not = _unread(rollout, f"{path}.probe{device_weights.SUFFIX}")
        except RuntimeError as error:  # CUDA refuses to share
            why_not = str(error)
        way = f"pass through host memory: {why_not}" if why_not else "stay on the GPU (CUDA IPC)"
        logger.info("rollout.weight_update=shm: weights %s", way)
        answer = not why_not
    return bool(distributed.broadcast_json(answer))


def _choose_way(config: GRPOConfig, path: str, rollout: RemoteEngine | EmbeddedEngine | None) -> str:
    """Shared memory if every server reads this machine's and the weights fit there, else disk: decided for the whole run, and told."""
    why_not = None
    if distributed.rank() == 0:
        free = shutil.disk_usage(Path(path).parent).free
        need = int(_HEADROOM * _files_size(config.actor.path))
        if config.actor.lora_rank > 0:
            why_not = "adapters are folders"
        elif not isinstance(rollout, RemoteEngine | EmbeddedEngine):
            why_not = "the servers cannot be asked from here"
        elif not 0 < need < free:
            why_not = f"{Path(path).parent} has {free >> 20} MiB free, the weights may need {need >> 20} MiB"
        else:
            why_not = _unread(rollout, f"{path}.probe")
        logger.info("rollout.weight_update=auto: %s", f"disk ({why_not})" if why_not else "shm")
    return "disk" if distributed.broadcast_json(why_not) else "shm"


def _unread(rollout: RemoteEngine | EmbeddedEngine, name: str) -> str:
    """Why not every server can read what this process puts into memory; empty if all can. Tried with a few bytes."""
    probe, expected = device_weights.make_probe(name)
    try:
        found = [info.get("probe", "") for info in rollout.server_info(name)]
    finally:
        probe.unlink()
    told = (text or "a server does not tell" for text in found if text != expected)
    return next(told, "") if found else "no server answers"


def _files_size(path: str) -> int:
    """Bytes of a model's weights as they lie on disk: a folder, or what was downloaded for a hub name."""
    found = path if Path(path).is_dir() else str(cached_file(path, "config.json"))
    folder = Path(found) if Path(found).is_dir() else Path(found).parent
    return sum(f.stat().st_size for kind in _WEIGHT_FILES for f in folder.glob(kind))


def sync_weights(actor: TrainEngine, rollout: InferenceEngine, meta: WeightUpdateMeta) -> None:
    """Bring every server to the actor's weights as `meta.version`."""
    publish = meta
    if meta.type == "disk":
        # A folder of its own for each version: what a server still reads is never changed.
        publish = replace(meta, path=str(Path(meta.path) / f"v{meta.version}"))
    if isinstance(rollout, RemoteEngine):
        rollout.begin_update(publish)
    actor.update_weights(publish)
    rollout.update_weights(publish)
    distributed.barrier()
    actor.set_version(meta.version)
    rollout.set_version(meta.version)
    if meta.type == "disk" and distributed.rank() == 0:
        for folder in Path(meta.path).glob("v*"):
            if folder != Path(publish.path):
                shutil.rmtree(folder, ignore_errors=True)
