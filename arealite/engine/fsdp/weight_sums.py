"""Checksums of trained weights, to find the first tensor in which a replayed run differs.

A sample of each tensor is hashed: all of it up to `_MAX_ELEMENTS` elements of the model, at least 4,096 of a tensor.
Where the sample misses a difference, the next step shows it: every weight takes part in the loss.
"""

import zlib
from weakref import WeakKeyDictionary

import torch
from torch import nn

from arealite.engine.fsdp.parallel import local
from arealite.utils import distributed
from arealite.weights.fingerprint import MAX_ELEMENTS

_MAX_ELEMENTS = 1 << 20


# Names of the tensors of all ranks, by model.
_names: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


@torch.no_grad()
def take(model: nn.Module) -> dict[str, tuple[int, float]]:
    """Return CRC-32 and mean of a sample of each trained tensor, of all ranks; every rank calls it."""
    named = [(name, local(p)) for name, p in model.named_parameters() if p.requires_grad]
    limit = max(MAX_ELEMENTS, _MAX_ELEMENTS // max(1, len(named)))
    samples = [p.reshape(-1)[:: max(1, -(-p.numel() // limit))] for _, p in named]
    rows = [_sums(sample) for sample in _to_host(samples)]
    everything, _ = distributed.all_gather_rows(torch.tensor(rows, dtype=torch.float64).reshape(-1, 2))
    if model not in _names:
        _names[model] = _gather_names([name for name, _ in named])
    return {name: (int(row[0]), row[1]) for name, row in zip(_names[model], everything.tolist(), strict=True)}


def _to_host(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy samples to the host, all at once if they have one dtype: a busy GPU answers late.

    They are copied on the host, too: a tensor that is read as an array can no longer be resized, which FSDP does.
    """
    if not samples or not samples[0].is_cuda or len({sample.dtype for sample in samples}) > 1:
        return [sample.to("cpu", copy=True) for sample in samples]
    return list(torch.cat(samples).cpu().split([len(sample) for sample in samples]))


def _sums(sample: torch.Tensor) -> tuple[float, float]:
    raw = sample.contiguous().view(torch.uint8).numpy()
    return zlib.crc32(raw.data), float(sample.double().mean()) if sample.numel() else 0.0


def _gather_names(own: list[str]) -> list[str]:
    """Return the names of all ranks in rank order; those of several ranks say which one holds the part."""
    size = distributed.world_size()
    if size == 1:
        return own
    lists: list[list[str]] = [distributed.broadcast_json(own, source) for source in range(size)]
    return [f"{name} (rank {number})" for number, names in enumerate(lists) for name in names]
