"""Scatters batches from rank 0 over the trainer's ranks: layouts as JSON, tensors as bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from arealite.api.io_struct import Batch
from arealite.utils import distributed
from arealite.weights.layout import TensorLayout


def scatter_batches(shares: list[Batch] | None, group: dist.ProcessGroup | None = None) -> Batch:
    """Return this rank's share, on the host. Rank 0 passes one share per replica (`data_size`)."""
    if distributed.world_size() == 1:
        assert shares is not None
        return shares[0]
    rank, replica_size = dist.get_rank(group), distributed.replica_size()
    layouts = None
    if rank == 0:
        assert shares is not None and len(shares) == distributed.data_size()
        layouts = [TensorLayout.of(share) for share in shares]
    described = distributed.broadcast_json(layouts and [layout.to_json() for layout in layouts], 0, group)
    if layouts is not None and shares is not None:
        packed = [layout.pack(share) for layout, share in zip(layouts, shares, strict=True)]
        for other in range(1, distributed.world_size()):
            dist.send(packed[other // replica_size], other, group)
        return shares[0]
    layout = TensorLayout.from_json(described[rank // replica_size])
    buffer = torch.empty(layout.size_bytes, dtype=torch.uint8)
    dist.recv(buffer, 0, group)
    return layout.views(buffer)
