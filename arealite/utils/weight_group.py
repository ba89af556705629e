"""Weights over a process group of their own: the trainer's rank 0 broadcasts, inference servers receive, tensor after tensor.

The group is formed as torch forms its own (same keys in the store), so the other side may be SGLang's. Independent of the trainer's groups, so servers may
come and go: another set of servers gets another group. gloo on CPU, NCCL on CUDA. Also keeps the outbox: the whole weights as the trainer last published
them, once, on the host, from which a server that comes late is served too; sending makes no second copy of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

BUCKET_BYTES = 256 << 20
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


def buckets(specs: list[Spec], max_bytes: int | None = None) -> Iterator[list[Spec]]:
    """Tensors in order, in portions of at most `max_bytes`; a larger tensor is a portion of its own."""
    bucket: list[Spec] = []
    size = 0
    for spec in specs:
        added = torch.Size(spec[2]).numel() * getattr(torch, spec[1]).itemsize
        if bucket and size + added > (max_bytes or BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(spec)
        size += added
    if bucket:
        yield bucket


class WeightGroup:
    """One sender (rank 0) and its receivers. The constructor returns when all have joined (NCCL: when they first send).

    `join_timeout_s` limits the meeting, `timeout_s` each transfer.
    """

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        size: int,
        name: str,
        *,
        join_timeout_s: float,
        timeout_s: float,
        device: str | torch.device = "cpu",
    ):
        self._device = torch.device(device)
        self._timeout = timedelta(seconds=timeout_s)
        joining = timedelta(seconds=join_timeout_s)
        store = dist.TCPStore(
            address, port, size, is_master=rank == 0, timeout=joining, wait_for_workers=False
        )
        self._store = store  # the master's end must live as long as the group
        keys = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
        keys = dist.PrefixStore(f"{self._device.type}/", keys)
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = dist.ProcessGroupNCCL(keys, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(keys, rank, size, joining)

    def send(self, tensors: dict[str, torch.Tensor]) -> None:
        """Broadcast all of `tensors`, no more than one bucket of them at a time."""
        for bucket in buckets(specs_of(tensors)):
            self._broadcast([tensors[n].contiguous().to(self._device) for n, _, _ in bucket])

    def receive(self, specs: list[Spec]) -> dict[str, torch.Tensor]:
        """What the sender sends, as named tensors in memory of their own."""
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for name, dtype, shape in specs
        }
        self._broadcast(list(tensors.values()))
        return tensors

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        under_way = [self._group.broadcast([tensor], options) for tensor in tensors]
        for work in under_way:
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def parse_specs(names: object, dtypes: object, shapes: object) -> list[Spec]:
    """Three lists as they come over HTTP; anything else raises `ValueError`."""
    if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
        raise ValueError("names, dtypes and shapes must be lists")
    specs: list[Spec] = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        if not isinstance(name, str) or not isinstance(kind, torch.dtype):
            raise ValueError(f"not a tensor's name and type: {name!r}, {dtype!r}")
        specs.append((name, dtype, [int(n) for n in shape]))
    return specs
