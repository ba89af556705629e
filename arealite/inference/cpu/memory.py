"""Memory for caches on the CPU."""

import math
import mmap
from collections.abc import Sequence

import torch


def lazy_zeros(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that occupy memory only where they are written.

    `torch.zeros` writes to all of it at once.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    pages = mmap.mmap(-1, max(1, num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes].view(dtype).view(*size)
