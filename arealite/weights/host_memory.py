"""Weights in host memory: one safetensors file on a memory file system, mapped by both sides.

For servers on the trainer's machine. No tensor is serialized: an update costs two memory copies. The layout is fixed
when the file is created. A process maps a file once, because touching each page of a new mapping costs as much as a
copy.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from arealite.api.errors import WeightUpdateError
from arealite.weights.files import cannot_create, cause_of, opened, safetensors_header
from arealite.weights.layout import TensorLayout

logger = logging.getLogger("arealite.weights")

_ALIGN = 64
_mapped: dict[Path, SharedWeights] = {}
# Segments that this process created. The trainer's thread and the event loop may find one removed at the same time.
_created: dict[Path, SharedWeights] = {}
_restoring = threading.Lock()


class SharedWeights:
    """A segment in a mapped file. `tensors` are views: every process that maps it sees writes."""

    def __init__(self, path: Path, descriptor: int):
        self.path = path
        header, size = safetensors_header(descriptor)
        layout = TensorLayout.from_safetensors(header, size)
        self._map = file_map = mmap.mmap(descriptor, 0)
        self._identity = _identity(os.fstat(descriptor))
        memory = torch.frombuffer(file_map, dtype=torch.uint8)
        self._pinned = _pin(memory)
        self.tensors = layout.views(memory[8 + len(header) :])

    @classmethod
    def create(cls, path: str | Path, like: Mapping[str, torch.Tensor]) -> SharedWeights:
        """Create a segment for tensors with the dtypes and shapes of `like`; their values are not copied."""
        layout = TensorLayout.of(like, _ALIGN)
        header = layout.to_safetensors()
        path, total = Path(path), len(header) + layout.size_bytes
        try:
            free = shutil.disk_usage(path.parent).free
            if total > free:
                raise OSError(errno.ENOSPC, f"{free / 1e9:.1f} GB are free, the weights need {total / 1e9:.1f} GB")
            # A file of a killed run: processes that map it keep it until they see the new one.
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, total)
                os.pwrite(descriptor, header, 0)
                _created[path] = cls(path, descriptor)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise cannot_create(path, error) from error
        return _created[path]

    @classmethod
    def restore(cls, path: str | Path) -> None:
        """Make a segment of this process again, with the same values, if its file was removed or replaced.

        systemd removes the shared memory of a user who logs out.
        """
        path = Path(path)
        with _restoring:
            held = _created.get(path)
            if held is None or held._is_in_place():
                return
            logger.warning("the shared weights %s were removed while the run uses them: making them again", path)
            made = cls.create(path, held.tensors)
            for name, tensor in made.tensors.items():
                tensor.copy_(held.tensors[name])
            held._unpin()

    def _is_in_place(self) -> bool:
        """Whether the file is still the one that was mapped; raises `WeightUpdateError` if it was cut."""
        try:
            found = _identity(self.path.lstat())
        except FileNotFoundError:
            return False
        if found[:2] == self._identity[:2] and found != self._identity:
            raise WeightUpdateError(f"the shared weights {self.path} were cut to {found[2]} bytes by another process")
        return found == self._identity

    @classmethod
    def attach(cls, path: str | Path) -> SharedWeights:
        """Map a segment; raises `WeightUpdateError` if it cannot be mapped.

        The size is checked at each call: reading a mapping beyond the end of its file would kill the process.
        """
        path = Path(path)
        if path in _created:
            cls.restore(path)
            return _created[path]
        try:
            with opened(path, for_writing=True, is_private=True) as descriptor:
                if path not in _mapped or _mapped[path]._identity != _identity(os.fstat(descriptor)):
                    cls.detach(path)
                    _mapped[path] = cls(path, descriptor)
                return _mapped[path]
        except WeightUpdateError:
            raise
        except OSError as error:
            raise WeightUpdateError(
                f"cannot attach shared weights {path}: {error.strerror} (on another machine? then set "
                "rollout.weight_update=disk or broadcast)"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError, RecursionError) as error:
            raise WeightUpdateError(f"{path} does not hold shared weights ({cause_of(error)})") from error

    @classmethod
    def release_removed(cls) -> None:
        """Forget mappings of files that are gone: the weights of an ended run would stay in memory.

        None of the segments may be in use meanwhile.
        """
        for path in [path for path in _mapped if not path.exists()]:
            cls.detach(path)

    @classmethod
    def detach(cls, path: str | Path) -> None:
        """Forget a mapping, so that the next `attach` maps the segment again."""
        for held in (_mapped.pop(Path(path), None), _created.pop(Path(path), None)):
            if held is not None:
                held._unpin()

    def flush(self) -> None:
        """Do nothing: other processes see a copy into host memory at once."""

    def unlink(self) -> None:
        """Remove the segment. Mappings in other processes stay valid until they detach."""
        _created.pop(self.path, None)
        self._unpin()
        self.path.unlink(missing_ok=True)

    def _unpin(self) -> None:
        """Unregister the memory before it is unmapped: CUDA would take a later mapping there for this one."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # pyright: ignore
        self._pinned = 0


def _pin(memory: torch.Tensor) -> int:
    """Pin the memory, for several times faster copies to a GPU. Returns its address, 0 if CUDA refuses."""
    if not torch.cuda.is_initialized():
        return 0
    cudart: Any = torch.cuda.cudart()
    status = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if status == cudart.cudaError.success:
        return memory.data_ptr()
    logger.info("shared weights are not pinned: %s", cudart.cudaGetErrorString(status))
    # The next kernel launch would report this error again: let one fail here.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return 0


def _identity(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_dev, stat.st_ino, stat.st_size
