"""Weights over a process group of their own: the trainer's rank 0 broadcasts, inference servers receive, tensor after tensor.

The group is formed as torch forms its own (same keys in the store), so the other side may be SGLang's. Independent of the trainer's groups, so servers may
come and go: another set of servers gets another group. gloo on CPU, NCCL on CUDA. Also keeps the outbox: the whole weights as the trainer last published
them, once, on the host, from which a server that comes late is served too; sending makes no second copy of it, and need not wait until it is full.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

BUCKET_BYTES = 256 << 20
# Name, type (as `float32`) and shape of a tensor.
Spec = tuple[str, str, list[int]]


class Outbox(dict[str, torch.Tensor]):
    """Published weights by name. One thread fills it anew, another may take what has come already."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._awaited: set[str] = set()
        self._failure: BaseException | None = None

    def expect(self) -> None:
        """From now on `take` waits for new tensors."""
        self._awaited, self._failure = set(self), None

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.expect()
        try:
            for name, tensor in tensors:
                mine = self.get(name)
                if mine is None or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
                    self[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                self[name].copy_(tensor.detach())
                with self._change:
                    self._awaited.discard(name)
                    self._change.notify_all()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            with self._change:
                self._change.notify_all()

    def take(self, names: list[str], timeout_s: float) -> list[torch.Tensor]:
        """These tensors, as soon as the new ones are there."""

        def is_over() -> bool:
            return self._failure is not None or not self._awaited.intersection(names)

        with self._change:
            if not self._change.wait_for(is_over, timeout_s):
                raise RuntimeError(f"{names[0]} was not gathered within {timeout_s:g} s")
        if self._failure is not None:
            raise RuntimeError("the trainer could not gather its weights") from self._failure
        return [self[name] for name in names]


_outboxes: dict[str, Outbox] = {}


def put_outbox(name: str, tensors: Iterable[tuple[str, torch.Tensor]], keep: bool = True) -> None:
    """Copy what the trainer publishes to the host. Ranks that only help to gather pass `keep=False`."""
    if keep:
        _outboxes.setdefault(name, Outbox()).fill(tensors)
    else:
        for _ in tensors:
            pass


def get_outbox(name: str) -> Outbox:
    return _outboxes.get(name, Outbox())


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
        store = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=joining, wait_for_workers=False)
        self._store = store  # the master's end must live as long as the group
        keys = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
        keys = dist.PrefixStore(f"{self._device.type}/", keys)
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = dist.ProcessGroupNCCL(keys, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(keys, rank, size, joining)

    def send(self, box: Outbox) -> None:
        """Broadcast what is in `box`, bucket after bucket, each as soon as it is there."""
        for bucket in buckets(specs_of(box)):
            tensors = box.take([name for name, _, _ in bucket], self._timeout.total_seconds())
            self._broadcast([tensor.contiguous().to(self._device) for tensor in tensors])

    def receive(self, specs: list[Spec]) -> dict[str, torch.Tensor]:
        """What the sender sends, as named tensors in memory of their own."""
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=self._device) for name, dtype, shape in specs
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
