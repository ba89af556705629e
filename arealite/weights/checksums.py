"""Checksums of trained weights, to find the first tensor in which a replayed run differs.

A sample of each tensor is hashed: all of it up to `_MAX_ELEMENTS` elements of the model, at least 4,096 of a tensor.
Where the sample misses a difference, the next step shows it: every weight takes part in the loss.
"""

import zlib
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from arealite.utils import distributed
from arealite.weights.fingerprint import MAX_ELEMENTS

_MAX_ELEMENTS = 1 << 20


# Names of the tensors of all ranks, by model.
_names: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


@torch.no_grad()
def take(model: nn.Module) -> dict[str, tuple[int, float]]:
    """Return CRC-32 and mean of a sample of each trained tensor, of all ranks; every rank calls it."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    limit = max(MAX_ELEMENTS, _MAX_ELEMENTS // max(1, len(named)))
    own = [p.to_local() if isinstance(p, DTensor) else p for p in named.values()]
    samples = [p.reshape(-1)[:: max(1, -(-p.numel() // limit))] for p in own]
    rows = torch.tensor(_sums(samples), dtype=torch.float64).reshape(-1, 2)
    everything, _ = distributed.all_gather_rows(rows)
    if model not in _names:
        _names[model] = _gather_names(list(named))
    return {name: (int(row[0]), row[1]) for name, row in zip(_names[model], everything.tolist(), strict=True)}


def _sums(samples: list[torch.Tensor]) -> list[tuple[float, float]]:
    """Return CRC-32 and mean of each sample.

    Those of one dtype are copied to the host at once, because a busy GPU answers late, and computed together.
    """
    sums = [(0.0, 0.0)] * len(samples)
    for dtype in {sample.dtype for sample in samples if len(sample)}:
        chosen = [i for i, sample in enumerate(samples) if sample.dtype == dtype and len(sample)]
        joined = torch.cat([samples[i] for i in chosen]).cpu()
        ends = np.cumsum([0, *(len(samples[i]) for i in chosen)])
        means = np.add.reduceat(joined.double().numpy(), ends[:-1]) / np.diff(ends)
        raw = joined.view(torch.uint8).numpy().data
        parts = pairwise((ends * joined.element_size()).tolist())
        for i, (start, end), mean in zip(chosen, parts, means.tolist(), strict=True):
            sums[i] = zlib.crc32(raw[start:end]), mean
    return sums


def _gather_names(own: list[str]) -> list[str]:
    """Return the names of all ranks in rank order; those of several ranks say which one holds the part."""
    size = distributed.world_size()
    if size == 1:
        return own
    lists: list[list[str]] = [distributed.broadcast_json(own, source) for source in range(size)]
    return [f"{name} (rank {number})" for number, names in enumerate(lists) for name in names]
