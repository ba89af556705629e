"""Chooses the transport of an update: the one place where `WeightUpdateMeta.type` decides anything."""

from __future__ import annotations

from arealite.api.io_struct import WeightUpdateMeta
from arealite.weights.device_memory import SUFFIX, DeviceMemoryTransport
from arealite.weights.disk import DiskTransport
from arealite.weights.host_memory import HostMemoryTransport
from arealite.weights.process_group import ProcessGroupTransport
from arealite.weights.segment import SegmentTransport
from arealite.weights.transport import Transport

TRANSPORTS: dict[str, type[Transport]] = {
    "disk": DiskTransport,
    "shm": HostMemoryTransport,
    "broadcast": ProcessGroupTransport,
}


def transport_class(meta: WeightUpdateMeta) -> type[Transport]:
    """Return the transport for `meta`. Shared memory is on the GPU if its path ends in `.cuda`."""
    return _segment_transport(meta.path) if meta.type == "shm" else TRANSPORTS[meta.type]


def make_transport(meta: WeightUpdateMeta, current: Transport | None = None) -> Transport:
    """Return `current` if it serves `meta`; else close it and return a new transport."""
    cls = transport_class(meta)
    if current is not None:
        if type(current) is cls and current.path == meta.path:
            return current
        current.close()
    return cls(meta.path)


def read_probe(path: str) -> str:
    """Return what this process reads in a trainer's probe at `path`; the reason if it cannot."""
    return _segment_transport(path).read_probe(path)


def _segment_transport(path: str) -> type[SegmentTransport]:
    return DeviceMemoryTransport if path.endswith(SUFFIX) else HostMemoryTransport
