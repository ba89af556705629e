"""Weights in memory that several processes map: a segment in host memory or in device memory.

The trainer creates a segment once and copies into it at each update; a server maps it once and copies out of it.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

import torch

from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.utils import distributed
from arealite.weights.device_memory import SUFFIX, DeviceWeights
from arealite.weights.fingerprint import fingerprint
from arealite.weights.host_memory import SharedWeights
from arealite.weights.transport import T, Transport, WeightClient, WeightOwner, Weights


class SegmentTransport(Transport):
    """Publishes all versions in one segment at `path`."""

    segment_class: ClassVar[type[SharedWeights] | type[DeviceWeights]]
    suffix: ClassVar[str] = ""

    def __init__(self, path: str):
        super().__init__(path)
        self._segment: SharedWeights | DeviceWeights | None = None

    def publish(self, owner: WeightOwner, meta: WeightUpdateMeta) -> None:
        if distributed.rank() == 0:
            if self._segment is None:
                self.segment_class.create(self.path, owner.empty_weights())
            # Makes it again if it was removed.
            self._segment = self.segment_class.attach(self.path)
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
        except KeyError:
            return f"{path} is not a probe"
        except WeightUpdateError as error:
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
        self.segment_class.restore(meta.path)
        await client.load_segment(server, meta)


class HostMemoryTransport(SegmentTransport):
    """Weights in a mapped file on the trainer's machine."""

    segment_class = SharedWeights


class DeviceMemoryTransport(SegmentTransport):
    """Weights in a buffer on the trainer's GPU."""

    segment_class = DeviceWeights
    suffix = SUFFIX


def release_removed() -> None:
    """Forget all mapped segments whose files are gone. None of them may be in use meanwhile."""
    SharedWeights.release_removed()
    DeviceWeights.release_removed()
