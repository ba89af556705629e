"""Weights shared on the GPU: a file that says where they lie, and CUDA IPC handles to map them in another process.

The trainer makes one buffer with room for all of them and copies into it at each update; a server on the same GPU maps it once and copies out of it, device to
device. The file is JSON (names, types, shapes, handles in base64): nothing is unpickled. The buffer lives until the trainer lets go of it, so what was published
last can be read by a server that comes late. Not every pair of processes can do this (other GPUs visible, other containers): `make_probe` and `read_probe` find
out beforehand.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import torch

from arealite.api.errors import WeightUpdateError
from arealite.weights.fingerprint import fingerprint
from arealite.weights.host_memory import SharedWeights

SUFFIX = ".cuda"
_ALIGN = 256
_made: dict[str, DeviceWeights] = {}  # by this process: it cannot map its own handles
_mapped: dict[str, tuple[str, DeviceWeights]] = {}


def attach(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a segment in shared memory, or, if its name ends in `.cuda`, on the GPU."""
    if not path.endswith(SUFFIX):
        return SharedWeights.attach(path).tensors
    return DeviceWeights.attach(path).tensors


def visible_gpus() -> list[str]:
    """Names of the GPUs this process sees that are the same in every process."""
    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]


def make_probe(path: str) -> tuple[DeviceWeights | SharedWeights, str]:
    """A small segment in shared memory, or on the current GPU if the name says so, and what whoever can map it reads there."""
    kind = DeviceWeights if path.endswith(SUFFIX) else SharedWeights
    made = kind.create(path, {"probe": torch.empty(64, dtype=torch.int64)})
    made.tensors["probe"].random_()
    made.publish()
    return made, fingerprint(made.tensors["probe"])


def read_probe(path: str) -> str:
    """What this process reads of another's probe; the reason if it cannot."""
    try:
        return fingerprint(attach(path)["probe"])
    except (WeightUpdateError, KeyError) as error:
        return str(error)
    finally:
        _mapped.pop(path, None)
        SharedWeights.forget(path)


class DeviceWeights:
    """Named tensors in one buffer on a GPU. `tensors` are views: writing to them is seen by whoever has mapped it."""

    def __init__(self, path: str, buffer: torch.Tensor, layout: dict[str, dict[str, Any]]):
        self.path, self.buffer = path, buffer
        self.tensors = {name: self._view(**entry) for name, entry in layout.items()}

    @classmethod
    def create(cls, path: str, like: dict[str, torch.Tensor]) -> DeviceWeights:
        """Make room on the current GPU for tensors shaped as in `like`, and the file that tells where."""
        layout, offset = {}, 0
        for name, tensor in like.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            layout[name] = {"dtype": dtype, "shape": list(tensor.shape), "offset": offset}
            offset += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        buffer = torch.empty(offset, dtype=torch.uint8, device="cuda")
        _, *handle = buffer.untyped_storage()._share_cuda_()
        gpu = visible_gpus()[torch.cuda.current_device()]
        fields = [base64.b64encode(f).decode() if isinstance(f, bytes) else f for f in handle]
        aside = Path(f"{path}.partial")
        aside.write_text(json.dumps({"gpu": gpu, "handle": fields, "tensors": layout}))
        aside.chmod(0o600)
        aside.rename(path)
        _made[path] = cls(path, buffer, layout)
        return _made[path]

    @classmethod
    def attach(cls, path: str) -> DeviceWeights:
        """Map what another process has made; what this one made, as it is."""
        if path in _made:
            return _made[path]
        try:
            text = Path(path).read_text()
            if path not in _mapped or _mapped[path][0] != text:
                _mapped[path] = (text, cls._map(path, json.loads(text)))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise WeightUpdateError(f"cannot map the weights of {path}: {error}") from error
        return _mapped[path][1]

    @classmethod
    def _map(cls, path: str, described: dict[str, Any]) -> DeviceWeights:
        gpus = visible_gpus()
        if described["gpu"] not in gpus:
            raise WeightUpdateError(
                f"the trainer's weights lie on GPU {described['gpu']}, which this process does not see: start it with that "
                "one visible, or set rollout.weight_update=disk"
            )
        device = gpus.index(described["gpu"])
        handle = [base64.b64decode(f) if isinstance(f, str) else f for f in described["handle"]]
        storage = torch.UntypedStorage._new_shared_cuda(device, *handle)
        buffer = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)
        return cls(path, buffer, described["tensors"])

    def publish(self) -> None:
        """Wait until what was copied into the tensors is there for others."""
        torch.cuda.synchronize(self.buffer.device)

    def unlink(self) -> None:
        """Remove the file and forget the buffer."""
        _made.pop(self.path, None)
        if os.path.exists(self.path):
            os.unlink(self.path)

    def _view(self, dtype: str, shape: list[int], offset: int) -> torch.Tensor:
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        return self.buffer[offset : offset + size].view(kind).view(shape)
