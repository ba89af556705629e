"""Weights in shared memory: one file on a memory file system, in safetensors' layout, mapped by both sides.

The trainer creates it once and copies into it at each update; a server on the same machine attaches once and copies out.
No tensor is serialised: an update costs two memory copies. The layout is fixed when the file is made. A process maps a file
once, whoever asks for it: the first look at each page of a map costs as much as a copy.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from arealite.api.errors import WeightUpdateError

logger = logging.getLogger("arealite.weights")

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGN = 64
_mapped: dict[Path, SharedWeights] = {}


class SharedWeights:
    """Named tensors that live in a mapped file. `tensors` are views: writing to them writes the file."""

    def __init__(self, path: Path, descriptor: int):
        self.path = path
        self._map = file_map = mmap.mmap(descriptor, 0)
        self._identity = _identity(os.fstat(descriptor))
        self._pinned = _pin(torch.frombuffer(file_map, dtype=torch.uint8))
        header_size = int.from_bytes(file_map[:8], "little")
        header = json.loads(file_map[8 : 8 + header_size])
        header.pop("__metadata__", None)
        self.tensors = {name: self._view(entry, 8 + header_size) for name, entry in header.items()}

    @classmethod
    def create(cls, path: str | Path, like: dict[str, torch.Tensor]) -> SharedWeights:
        """Make the file with room for tensors shaped as in `like` (their values are not copied)."""
        header, size = safetensors_header({n: (t.shape, t.dtype) for n, t in like.items()}, _ALIGN)
        path, total = Path(path), len(header) + size
        free = os.statvfs(path.parent)
        if total > free.f_bavail * free.f_frsize:
            raise WeightUpdateError(
                f"{path.parent} has {free.f_bavail * free.f_frsize / 1e9:.1f} GB free, the weights need {total / 1e9:.1f} GB: "
                "enlarge it, or set rollout.weight_update=disk"
            )
        # A killed run's: whoever maps it keeps it until it sees the new one.
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, total)
            os.pwrite(descriptor, header, 0)
            _mapped[path] = cls(path, descriptor)
        finally:
            os.close(descriptor)
        return _mapped[path]

    @classmethod
    def attach(cls, path: str | Path) -> SharedWeights:
        path = Path(path)
        try:
            if path not in _mapped or _mapped[path]._identity != _identity(path.stat()):
                if path in _mapped:
                    _mapped.pop(path)._unpin()
                with path.open("r+b") as file:
                    _mapped[path] = cls(path, file.fileno())
            return _mapped[path]
        except OSError as error:
            what = f"cannot attach shared weights {path}"
            raise WeightUpdateError(
                f"{what}: {error.strerror} (on another machine? then set rollout.weight_update=disk or broadcast)"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise WeightUpdateError(f"{path} does not hold shared weights: {error!r}") from error

    @staticmethod
    def forget(path: str | Path) -> None:
        """Map the file anew when it is asked for again."""
        _mapped.pop(Path(path), None)

    def publish(self) -> None:
        """What was copied into the tensors is seen by others at once."""

    def unlink(self) -> None:
        """Remove the file; maps that exist stay valid."""
        _mapped.pop(self.path, None)
        self._unpin()
        self.path.unlink(missing_ok=True)

    def _unpin(self) -> None:
        """Before the memory can be given back: CUDA would take what is mapped there next for this."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # pyright: ignore
        self._pinned = 0

    def _view(self, entry: dict, data_start: int) -> torch.Tensor:
        start, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        if start == end:
            return torch.empty(entry["shape"], dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=end - start, offset=data_start + start)
        return flat.view(dtype).view(entry["shape"])


def safetensors_header(specs: dict[str, tuple[torch.Size, torch.dtype]], align: int = 1) -> tuple[bytes, int]:
    """The beginning of a safetensors file that holds these tensors in this order, and how many bytes of data follow it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, dtype) in specs.items():
        end = offset + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = -(-end // align) * align
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % max(align, 8))
    return len(text).to_bytes(8, "little") + text, offset


def _pin(memory: torch.Tensor) -> int:
    """Where it lies, once it is pinned: copies to and from a GPU are then several times faster. 0 if that is refused: they are only slower."""
    if not torch.cuda.is_initialized():
        return 0
    cudart: Any = torch.cuda.cudart()
    refusal = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if refusal == cudart.cudaError.success:
        return memory.data_ptr()
    logger.info("weights in shared memory are not pinned: %s", cudart.cudaGetErrorString(refusal))
    with suppress(RuntimeError):  # the next kernel would fail with this error, which is told already
        torch.zeros(1, device="cuda")
    return 0


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino
