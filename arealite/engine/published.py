"""The weights a trainer has published, as a server finds them: read again to compare fingerprints.

On disk, in shared memory, or in the outbox of this process.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.utils.shared_weights import SharedWeights
from arealite.utils.weight_group import get_outbox


def read_published(meta: WeightUpdateMeta) -> dict[str, torch.Tensor]:
    """Named tensors at `meta.path`, mapped and not copied."""
    if meta.type == "shm":
        return SharedWeights.attach(meta.path).tensors
    if meta.type == "broadcast":
        return get_outbox(meta.path)
    folder = Path(meta.path)
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    try:
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        for name in names:
            with safe_open(folder / name, framework="pt") as file:
                tensors.update((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise WeightUpdateError(
            f"cannot read the weights published at {folder}: {error}"
        ) from error
    return tensors
