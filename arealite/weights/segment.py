"""Weights in memory that several processes map: what host memory and device memory have in common.

The trainer creates a segment once and copies into it at each update; a server maps it once and copies out of it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, TypeVar

import torch

from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.utils import distributed
from arealite.weights.fingerprint import fingerprint
from arealite.weights.transport import T, Transport, WeightClient, WeightOwner, Weights

SegmentT = TypeVar("SegmentT", bound="Segment")


class Segment(abc.ABC):
    """Named tensors in shared memory. `tensors` are views: every process that maps it sees writes."""

    path: Path
    tensors: Weights

    @classmethod
    @abc.abstractmethod
    def create(cls: type[SegmentT], path: str | Path, like: Mapping[str, torch.Tensor]) -> SegmentT:
        """Create a segment for tensors with the dtypes and shapes of `like`; their values are not copied."""

    @classmethod
    @abc.abstractmethod
    def attach(cls: type[SegmentT], path: str | Path) -> SegmentT:
        """Map a segment of another process; raises `WeightUpdateError` if it cannot be mapped."""

    @classmethod
    @abc.abstractmethod
    def detach(cls, path: str | Path) -> None:
        """Forget a mapping, so that the next `attach` maps the segment again."""

    def flush(self) -> None:
        """Wait until what was copied into the tensors is visible to other processes."""

    @abc.abstractmethod
    def unlink(self) -> None:
        """Remove the segment. Mappings in other processes stay valid until they detach."""


class SegmentTransport(Transport):
    """Publishes all versions in one segment at `path`."""

    segment_class: ClassVar[type[Segment]]
    suffix: ClassVar[str] = ""

    def __init__(self, path: str):
        super().__init__(path)
        self._segment: Segment | None = None

    def publish(self, owner: WeightOwner, meta: WeightUpdateMeta) -> None:
        if self._segment is None and distributed.rank() == 0:
            self._segment = self.segment_class.create(self.path, owner.empty_weights())
        for name, tensor in owner.gather_weights():
            if self._segment is not None:
                self._segment.tensors[name].copy_(tensor)
        if self._segment is not None:
            self._segment.flush()
        distributed.barrier()

    def probe(self, read: Callable[[str], list[str]]) -> str:
        path = f"{self.path.removesuffix(self.suffix)}.probe{self.suffix}"
        probe = self.segment_class.create(path, {"probe": torch.empty(64, dtype=torch.int64)})
        try:
            probe.tensors["probe"].random_()
            probe.flush()
            expected, found = fingerprint(probe.tensors["probe"]), read(path)
        finally:
            probe.unlink()
        if not found:
            return "no server answers"
        return next((text or "a server does not read probes" for text in found if text != expected), "")

    @classmethod
    def read_probe(cls, path: str) -> str:
        """Return what this process reads in another process's probe; the reason if it cannot."""
        try:
            return fingerprint(cls.segment_class.attach(path).tensors["probe"])
        except (WeightUpdateError, KeyError) as error:
            return str(error)
        finally:
            cls.segment_class.detach(path)

    def open(self, meta: WeightUpdateMeta) -> Weights:
        return self.segment_class.attach(meta.path).tensors

    def close(self) -> None:
        if self._segment is not None:
            with suppress(OSError):
                self._segment.unlink()
            self._segment = None

    async def _load(self, client: WeightClient[T], server: T, meta: WeightUpdateMeta) -> None:
        await client.load_segment(server, meta)
