"""The weights a trainer has published, as a server finds them: read again to compare fingerprints.

On disk (whole, or only the adapter), in shared memory, on the GPU, or in the outbox of this process.
"""

from __future__ import annotations

from pathlib import Path

import torch

from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.adapters import FILE_STEM, read_tensors
from arealite.weights.device_memory import attach
from arealite.weights.process_group import get_outbox


def read_published(meta: WeightUpdateMeta) -> dict[str, torch.Tensor]:
    """Named tensors at `meta.path`, mapped and not copied."""
    if meta.type == "shm":
        return attach(meta.path)
    if meta.type == "broadcast":
        return get_outbox(meta.path)
    return read_tensors(Path(meta.path), FILE_STEM if meta.is_adapter else "model")
