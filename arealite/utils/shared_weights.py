"""Weights in shared memory: one file on a memory file system, in safetensors' layout, mapped by both sides.

The trainer creates it once and copies into it at each update; a server on the same machine attaches once and copies out.
No tensor is serialised: an update costs two memory copies. The layout is fixed when the file is made. A process maps a file
once, whoever asks for it: the first look at each page of a map costs as much as a copy.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import torch

from arealite.api.errors import WeightUpdateError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGN = 64
_mapped: dict[Path, SharedWeights] = {}


class SharedWeights:
    """Named tensors that live in a mapped file. `tensors` are views: writing to them writes the file."""

    def __init__(self, path: Path, descriptor: int):
        self.path = path
        self._map = file_map = mmap.mmap(descriptor, 0)
        self._identity = _identity(os.fstat(descriptor))
        if torch.cuda.is_initialized():
            # pinned, it is copied several times faster; where that is refused, it is only slower
            whole = torch.frombuffer(file_map, dtype=torch.uint8)
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostRegister(whole.data_ptr(), whole.numel(), 0)
        header_size = int.from_bytes(file_map[:8], "little")
        header = json.loads(file_map[8 : 8 + header_size])
        header.pop("__metadata__", None)
        self.tensors = {name: self._view(entry, 8 + header_size) for name, entry in header.items()}

    @classmethod
    def create(cls, path: str | Path, like: dict[str, torch.Tensor]) -> SharedWeights:
        """Make the file with room for tensors shaped as in `like` (their values are not copied)."""
        header, offset = {}, 0
        for name, tensor in like.items():
            size = tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += -(-size // _ALIGN) * _ALIGN
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        path = Path(path)
        total = 8 + len(text) + offset
        free = os.statvfs(path.parent)
        if total > free.f_bavail * free.f_frsize:
            raise WeightUpdateError(
                f"{path.parent} has {free.f_bavail * free.f_frsize / 1e9:.1f} GB free, the weights need {total / 1e9:.1f} GB: "
                "enlarge it, or set rollout.weight_update=disk"
            )
        path.unlink(
            missing_ok=True
        )  # what a killed run left: whoever maps it keeps it until it sees the new one
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, total)
            os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
            _mapped[path] = cls(path, descriptor)
        finally:
            os.close(descriptor)
        return _mapped[path]

    @classmethod
    def attach(cls, path: str | Path) -> SharedWeights:
        path = Path(path)
        try:
            if path not in _mapped or _mapped[path]._identity != _identity(path.stat()):
                with path.open("r+b") as file:
                    _mapped[path] = cls(path, file.fileno())
            return _mapped[path]
        except OSError as error:
            raise WeightUpdateError(
                f"cannot attach shared weights {path}: {error.strerror}"
            ) from error

    def publish(self) -> None:
        """What was copied into the tensors is seen by others at once."""

    def unlink(self) -> None:
        """Remove the file; maps that exist stay valid."""
        _mapped.pop(self.path, None)
        self.path.unlink(missing_ok=True)

    def _view(self, entry: dict, data_start: int) -> torch.Tensor:
        start, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        if start == end:
            return torch.empty(entry["shape"], dtype=dtype)
        flat = torch.frombuffer(
            self._map, dtype=torch.uint8, count=end - start, offset=data_start + start
        )
        return flat.view(dtype).view(entry["shape"])


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino
