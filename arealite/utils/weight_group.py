"""Weights over a process group of their own: the trainer's rank 0 sends, inference servers receive, in buckets.

Independent of the trainer's own groups, so servers may come and go: a group lives as long as its members do, and another set of servers gets another group.
Also keeps the outbox: the whole weights as the trainer last published them, from which a server that comes late is served too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

BUCKET_BYTES = 64 << 20
_ALIGN = 64
# Name, type (as `float32`) and shape of a tensor.
Spec = tuple[str, str, list[int]]
_outboxes: dict[str, dict[str, torch.Tensor]] = {}


def put_outbox(name: str, tensors: Iterable[tuple[str, torch.Tensor]], keep: bool = True) -> None:
    """Copy what the trainer publishes to the host. Ranks that only help to gather pass `keep=False`."""
    box = _outboxes.setdefault(name, {})
    for key, tensor in tensors:
        if not keep:
            continue
        if key not in box or box[key].shape != tensor.shape or box[key].dtype != tensor.dtype:
            box[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        box[key].copy_(tensor.detach())


def get_outbox(name: str) -> dict[str, torch.Tensor]:
    return _outboxes.get(name, {})


def specs_of(tensors: dict[str, torch.Tensor]) -> list[Spec]:
    return [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]


class WeightGroup:
    """One sender (rank 0) and its receivers, over gloo. The constructor returns when all have joined."""

    def __init__(self, address: str, port: int, rank: int, size: int, name: str, timeout_s: float):
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(
            address, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
        self.size = size
        self._store = store  # the master's end must live as long as the group
        self._group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)

    def send(self, tensors: dict[str, torch.Tensor]) -> None:
        """Broadcast all of `tensors`; while one bucket travels the next is packed."""
        in_flight: tuple[dist.Work, torch.Tensor] | None = None
        for bucket in _buckets(specs_of(tensors)):
            buffer = torch.empty(bucket[-1][2], dtype=torch.uint8)
            for (name, _, _), start, end in bucket:
                flat = tensors[name].contiguous().view(-1).view(torch.uint8)
                buffer[start : start + flat.numel()] = flat
                assert start + flat.numel() <= end
            if in_flight is not None:
                in_flight[0].wait()
            in_flight = (self._broadcast(buffer), buffer)
        if in_flight is not None:
            in_flight[0].wait()

    def receive(self, specs: list[Spec]) -> dict[str, torch.Tensor]:
        """What the sender sends, as named tensors in memory of their own."""
        tensors = {}
        for bucket in _buckets(specs):
            buffer = torch.empty(bucket[-1][2], dtype=torch.uint8)
            self._broadcast(buffer).wait()
            for (name, dtype, shape), start, _ in bucket:
                kind = getattr(torch, dtype)
                size = torch.Size(shape).numel() * kind.itemsize
                tensors[name] = buffer[start : start + size].view(kind).view(shape)
        return tensors

    def _broadcast(self, buffer: torch.Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([buffer], options)


def parse_specs(value: object) -> list[Spec]:
    """Specs as they come over HTTP; anything else raises `ValueError`."""
    if not isinstance(value, list):
        raise ValueError(f"specs must be a list, got {json.dumps(value)[:100]}")
    specs: list[Spec] = []
    for item in value:
        name, dtype, shape = item
        kind = getattr(torch, dtype) if isinstance(dtype, str) else None
        if not isinstance(name, str) or not isinstance(kind, torch.dtype):
            raise ValueError(f"not a tensor's name and type: {item!r}")
        specs.append((name, dtype, [int(n) for n in shape]))
    return specs


def _buckets(specs: list[Spec]) -> Iterator[list[tuple[Spec, int, int]]]:
    """Tensors in order with their places in a buffer; both sides cut alike. A large tensor has a bucket of its own."""
    bucket: list[tuple[Spec, int, int]] = []
    offset = 0
    for spec in specs:
        size = torch.Size(spec[2]).numel() * getattr(torch, spec[1]).itemsize
        padded = -(-size // _ALIGN) * _ALIGN
        if bucket and offset + padded > BUCKET_BYTES:
            yield bucket
            bucket, offset = [], 0
        bucket.append((spec, offset, offset + padded))
        offset += padded
    if bucket:
        yield bucket
