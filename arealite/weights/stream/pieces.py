"""Pieces of tensors: which part of a tensor a rank holds, and which of its elements have changed.

A trainer's rank holds shards, a server's rank the slices that it computes with. Both are boxes (an offset and a shape
in the whole tensor), cut by rows into units of bounded size: what travels is the meeting of a unit that is held with a
unit that is wanted, so weights go from any layout to any other without a whole tensor anywhere.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from arealite.weights.fingerprint import stride

UNIT_BYTES = 16 << 20
# An update with a larger share of changed elements is sent in full: an index costs about as much as an element.
MAX_CHANGED_SHARE = 0.125
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: torch.Size | tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def from_json(cls, offset: list[int], shape: list[int]) -> Box:
        """Read a box that another process has sent; raises `ValueError` or `TypeError` for anything else."""
        box = cls(tuple(int(n) for n in offset), tuple(int(n) for n in shape))
        if len(box.offset) != len(box.shape) or min((*box.offset, *box.shape), default=0) < 0:
            raise ValueError(f"not a part of a tensor: {box}")
        return box

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """Return the part that both have; None if there is none."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = [min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True)]
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    def view(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """Return the part `box` of a tensor that holds this box."""
        starts = [b - a for a, b in zip(self.offset, box.offset, strict=True)]
        return tensor[tuple(slice(start, start + size) for start, size in zip(starts, box.shape, strict=True))]

    def rows(self, itemsize: int, max_bytes: int) -> Iterator[Box]:
        """Cut into boxes of at most `max_bytes`, or one row."""
        if not self.shape:
            yield self
            return
        row_bytes = itemsize * math.prod(self.shape[1:])
        count = max(1, max_bytes // max(row_bytes, 1))
        for start in range(0, self.shape[0], count):
            size = min(count, self.shape[0] - start)
            yield Box((self.offset[0] + start, *self.offset[1:]), (size, *self.shape[1:]))


def move_indices(index: torch.Tensor, source: Box, target: Box) -> tuple[torch.Tensor, torch.Tensor]:
    """Translate flat indices of `source` to `target`; return which are there, and where."""
    if source == target or not source.shape:
        return torch.ones_like(index, dtype=torch.bool), index
    places = torch.unravel_index(index, source.shape)
    inside, result = torch.ones_like(index, dtype=torch.bool), torch.zeros_like(index)
    for place, start, new_start, size in zip(places, source.offset, target.offset, target.shape, strict=True):
        moved = place + (start - new_start)
        inside &= (moved >= 0) & (moved < size)
        result = result * size + moved
    return inside, result[inside]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor as integers, flat."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])


def find_changes(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """Return the flat indices of elements whose bits differ; None if they are too many to be sent alone."""
    # numpy counts and searches booleans several times faster than torch does.
    differs = bits(old).numpy() != bits(new).numpy()
    if np.count_nonzero(differs) > MAX_CHANGED_SHARE * differs.size:
        return None
    return torch.from_numpy(np.flatnonzero(differs).astype(np.int32 if differs.size < 1 << 31 else np.int64))


def encode_changes(index: torch.Tensor, values: torch.Tensor) -> bytes:
    """Encode sorted indices (as gaps) and values, compressed by zlib."""
    places = index.long().numpy()
    gaps = np.diff(places, prepend=0)
    wide = bool(len(gaps)) and int(gaps.max()) >= 1 << 16
    raw = gaps.astype(np.uint32 if wide else np.uint16)
    data = _planes(raw) + _planes(bits(values.contiguous()).numpy())
    return len(places).to_bytes(8, "little") + bytes([4 if wide else 2]) + zlib.compress(data, 1)


def decode_changes(data: bytes, dtype: torch.dtype, box: Box) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of `encode_changes`; raises `ValueError` if they do not fit."""
    count, width = int.from_bytes(data[:8], "little"), data[8]
    size = count * (width + dtype.itemsize)
    if width not in (2, 4) or count > box.numel:
        raise ValueError(f"{count} changes with gaps of {width} bytes in {box.numel} elements")
    try:
        raw = zlib.decompressobj().decompress(data[9:], size) if size else b""
    except zlib.error as error:
        raise ValueError(f"damaged changes: {error}") from error
    if len(raw) != size:
        raise ValueError(f"{len(raw)} bytes of changes, expected {size}")
    gaps = _from_planes(raw[: count * width], width).view(np.uint32 if width == 4 else np.uint16)
    index = torch.from_numpy(np.cumsum(gaps, dtype=np.int64))
    if count and int(index[-1]) >= box.numel:
        raise ValueError(f"change {int(index[-1])} of {box.numel} elements")
    values = torch.from_numpy(_from_planes(raw[count * width :], dtype.itemsize))
    return index, values.view(dtype)


def _planes(values: np.ndarray) -> bytes:
    """Return all first bytes, then all second bytes, and so on: high bytes are alike and compress well."""
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _from_planes(raw: bytes, width: int) -> np.ndarray:
    return np.frombuffer(raw, np.uint8).reshape(width, -1).T.copy().reshape(-1)


def sampled_places(shape: tuple[int, ...], box: Box) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which elements of a fingerprint's sample lie in `box`, and their flat indices there."""
    step = stride(math.prod(shape))
    inside, index = move_indices(torch.arange(0, math.prod(shape), step), Box.whole(shape), box)
    return inside.nonzero().squeeze(1), index
