"""Handing new weights from the trainer to the inference servers, and saying where they travel.

Called once per training step by the script or trainer, on all ranks. Publishing happens while servers still generate;
they are paused only to load. When `sync_weights` returns, trainer and servers hold the same version.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

from arealite.api.cli_args import GRPOConfig
from arealite.api.engine_api import InferenceEngine, TrainEngine
from arealite.api.io_struct import WeightUpdateMeta
from arealite.utils import distributed
from arealite.utils.rundir import RunDir

_SHARED_MEMORY = Path("/dev/shm")


def make_weight_meta(config: GRPOConfig, run_dir: RunDir | str | Path) -> WeightUpdateMeta:
    """How weights travel, by `rollout.weight_update`. The name in shared memory is the same after a restart, so that a
    crashed run leaves at most one segment, which the next one takes over."""
    way = config.rollout.weight_update
    folder = run_dir.path if isinstance(run_dir, RunDir) else Path(run_dir).absolute()
    if way == "disk":
        # An adapter is all that changes: whoever reads a folder has the base model already.
        is_adapter = config.actor.lora_rank > 0
        return WeightUpdateMeta("disk", path=str(folder / "weights"), is_adapter=is_adapter)
    if way == "shm":
        key = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        return WeightUpdateMeta("shm", path=str(_SHARED_MEMORY / f"arealite-{key}"))
    return WeightUpdateMeta("broadcast")


def sync_weights(actor: TrainEngine, rollout: InferenceEngine, meta: WeightUpdateMeta) -> None:
    """Bring every server to the actor's weights as `meta.version`."""
    publish = meta
    if meta.type == "disk":
        # A folder of its own for each version: what a server still reads is never changed.
        publish = replace(meta, path=str(Path(meta.path) / f"v{meta.version}"))
    actor.update_weights(publish)
    rollout.update_weights(publish)
    distributed.barrier()
    actor.set_version(meta.version)
    rollout.set_version(meta.version)
    if meta.type == "disk" and distributed.rank() == 0:
        for folder in Path(meta.path).glob("v*"):
            if folder != Path(publish.path):
                shutil.rmtree(folder, ignore_errors=True)
