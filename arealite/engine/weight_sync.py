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

from arealite.api.cli_args import GRPOConfig
from arealite.api.engine_api import InferenceEngine, TrainEngine
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.embedded import EmbeddedEngine
from arealite.engine.remote import RemoteEngine
from arealite.utils import device_weights, distributed
from arealite.utils.rundir import RunDir

logger = logging.getLogger("arealite.weights")


def make_weight_meta(
    config: GRPOConfig,
    run_dir: RunDir | str | Path,
    rollout: RemoteEngine | EmbeddedEngine | None = None,
) -> WeightUpdateMeta:
    """How weights travel, by `rollout.weight_update`. With `shm` and servers that share the trainer's GPU they stay on it, if `rollout` is given to ask them."""
    way = config.rollout.weight_update
    folders = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    if way == "disk":
        # An adapter is all that changes: whoever reads a folder has the base model already.
        is_adapter = config.actor.lora_rank > 0
        return WeightUpdateMeta("disk", path=str(folders.weights), is_adapter=is_adapter)
    if way == "shm":
        path = str(folders.shared_weights)
        trains_on_gpu = config.actor.device != "cpu" and torch.cuda.is_available()
        if trains_on_gpu and rollout is not None and _can_share_gpu(rollout, path):
            path += device_weights.SUFFIX
        return WeightUpdateMeta("shm", path=path)
    return WeightUpdateMeta("broadcast")


def _can_share_gpu(rollout: RemoteEngine | EmbeddedEngine, path: str) -> bool:
    """Whether every server can map memory of rank 0's GPU: tried with a few bytes, decided for the whole run, and told."""
    answer = None
    if distributed.rank() == 0:
        name = f"{path}.probe{device_weights.SUFFIX}"
        try:
            probe, expected = device_weights.make_probe(name)
            found = [info.get("probe", "") for info in rollout.server_info(name)]
            probe.unlink()
        except RuntimeError as error:  # CUDA refuses to share
            found, expected = [str(error)], ""
        answer = bool(found) and all(text == expected for text in found)
        why = next((text for text in found if text != expected), "no server tells")
        way = "stay on the GPU (CUDA IPC)" if answer else f"pass through host memory: {why}"
        logger.info("rollout.weight_update=shm: weights %s", way)
    return bool(distributed.broadcast_json(answer))


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
