"""Weight updates: chooses how weights travel and brings every server to the trainer's weights.

`sync_weights` is called once per training step by the script or trainer, on all ranks. Servers generate while the
trainer publishes. When it returns, trainer and servers hold the same version. `make_transport` is the one place where
`WeightUpdateMeta.type` decides anything.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils.hub import cached_file

from arealite.api.cli_args import GRPOConfig
from arealite.api.engine_api import InferenceEngine, TrainEngine
from arealite.api.errors import ConfigError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.utils import distributed
from arealite.utils.console import show_message
from arealite.utils.rundir import RunDir
from arealite.utils.status.waits import waiting
from arealite.utils.trace import tracing
from arealite.weights.device_memory import SUFFIX
from arealite.weights.disk import DiskTransport
from arealite.weights.process_group import ProcessGroupTransport
from arealite.weights.segment import DeviceMemoryTransport, HostMemoryTransport, SegmentTransport
from arealite.weights.stream.publish import StreamTransport
from arealite.weights.transport import Transport

logger = logging.getLogger("arealite.weights")

_WEIGHT_FILES = ("*.safetensors", "*.bin")
# Files may hold 16 bits per number where 32 are published.
_HEADROOM = 2.5


def transport_class(meta: WeightUpdateMeta) -> type[Transport]:
    """Return the transport for `meta`."""
    if meta.type == "shm":
        return _memory_transport(meta.path)
    if meta.type in ("stream", "delta"):
        return StreamTransport
    return DiskTransport if meta.type == "disk" else ProcessGroupTransport


def make_transport(meta: WeightUpdateMeta, current: Transport | None = None) -> Transport:
    """Return `current` if it serves `meta`; else close it and return a new transport."""
    cls = transport_class(meta)
    if current is not None:
        if type(current) is cls and current.path == meta.path:
            return current
        current.close()
    return cls(meta.path)


def read_probe(path: str) -> str:
    """Return what this process reads in a trainer's probe at `path`; the reason if it cannot."""
    return _memory_transport(path).read_probe(path)


def _memory_transport(path: str) -> type[SegmentTransport]:
    return DeviceMemoryTransport if path.endswith(SUFFIX) else HostMemoryTransport


def sync_weights(actor: TrainEngine, rollout: InferenceEngine, meta: WeightUpdateMeta) -> None:
    """Bring every server to the actor's weights as `meta.version`."""
    if isinstance(rollout, InferenceEngine) and not rollout.takes_weights:
        actor.set_version(meta.version)
        return rollout.set_version(meta.version)
    transport = make_transport(meta)
    published = transport.versioned(meta)
    rollout.begin_update(published)
    traced = tracing.span("weights", "publish", f"publish v{meta.version}")
    with traced, waiting("publish", f"weights of version {meta.version}"):
        actor.update_weights(published)
    rollout.update_weights(published)
    distributed.barrier()
    actor.set_version(meta.version)
    rollout.set_version(meta.version)
    transport.remove_old(published)


def needs_first_sync(config: GRPOConfig, rollout: InferenceEngine) -> bool:
    """Return whether servers may hold other weights than a new trainer. Called by all ranks.

    They have the base as it is in `actor.path`, not in low bits. Servers that this run did not start may have the
    weights of another run.
    """
    return config.actor.frozen_weight_dtype != "auto" or distributed.broadcast_json(rollout.has_other_weights())


def make_weight_meta(
    config: GRPOConfig, run_dir: RunDir | str | Path, rollout: InferenceEngine | None = None
) -> WeightUpdateMeta:
    """Choose how weights travel, by `rollout.weight_update`. Called by all ranks.

    `auto` is shared memory if all servers can read it, else disk. With `shm`, weights stay on the GPU if all servers
    share it. Without `rollout` servers cannot be asked: `auto` is disk and `shm` is host memory.
    """
    folders = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    disk = WeightUpdateMeta("disk", str(folders.weights), is_adapter=config.actor.sends_adapters)
    way = config.rollout.weight_update
    if way == "disk":
        return disk
    if way == "broadcast":
        return WeightUpdateMeta("broadcast")
    if way in ("stream", "delta"):
        if config.actor.lora_rank > 0:
            raise ConfigError(
                f"rollout.weight_update={way} sends shards, but adapters are merged with whole weights: set auto"
            )
        return WeightUpdateMeta("delta" if way == "delta" else "stream")
    host = WeightUpdateMeta("shm", _decide(lambda: str(folders.shared_weights)))
    if way == "auto":
        why_not = _decide(lambda: _why_not_shared(config, host, rollout))
        _log("auto: %s", f"disk ({why_not})" if why_not else "shm")
        # Device memory would cost a second copy of the weights on the GPU: it is used on request only.
        return disk if why_not else host
    if rollout is None or config.actor.device == "cpu" or not torch.cuda.is_available():
        return host
    device = replace(host, path=host.path + SUFFIX)
    why_not = _decide(lambda: _probe(device, rollout))
    _log("shm: weights %s", f"pass through host memory: {why_not}" if why_not else "stay on the GPU (CUDA IPC)")
    return host if why_not else device


def _decide(choose: Callable[[], str]) -> str:
    """Decide on rank 0 for all ranks."""
    return distributed.broadcast_json(choose() if distributed.rank() == 0 else None)


def _log(message: str, decision: str) -> None:
    if distributed.rank() == 0:
        logger.info(f"rollout.weight_update={message}", decision)


def _why_not_shared(config: GRPOConfig, meta: WeightUpdateMeta, rollout: InferenceEngine | None) -> str:
    """Return why weights cannot travel in shared memory; empty if they can."""
    if config.actor.sends_adapters:
        return "adapters are folders"
    if rollout is None:
        return "the servers cannot be asked from here"
    folder = Path(meta.path).parent
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    need = int(_HEADROOM * _files_size(config.actor.path))
    if not 0 < need < free:
        return f"{folder} has {free >> 20} MiB free, the weights may need {need >> 20} MiB"
    return _probe(meta, rollout)


def _probe(meta: WeightUpdateMeta, rollout: InferenceEngine) -> str:
    """Return why not every server can open what this process publishes at `meta`; empty if all can."""
    try:
        return make_transport(meta).probe(rollout.read_probe)
    except WeightUpdateError as error:
        show_message(f"warning: weights cannot pass through shared memory, which is faster than the disk: {error}")
        return str(error)
    except RuntimeError as error:
        # CUDA refuses to share memory.
        return str(error)


def _files_size(path: str) -> int:
    """Return the bytes of a model's weights on disk: of a folder, or downloaded for a hub name."""
    found = path if Path(path).is_dir() else str(cached_file(path, "config.json"))
    folder = Path(found) if Path(found).is_dir() else Path(found).parent
    return sum(f.stat().st_size for kind in _WEIGHT_FILES for f in folder.glob(kind))
