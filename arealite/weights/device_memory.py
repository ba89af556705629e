"""Weights in device memory: one buffer on the trainer's GPU, which servers map by CUDA IPC.

The file at `path` says where the buffer is; it is JSON (GPU, IPC handle, layout), nothing is unpickled. The buffer
lives until the trainer unlinks it, so a server that joins late can still read it. Not every pair of processes can
share memory (other visible GPUs, other containers): the transport's `probe` finds out beforehand.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from arealite.api.errors import WeightUpdateError
from arealite.weights.cuda_ipc import allocate, open_handle
from arealite.weights.files import cannot_create, cause_of, logger, read_small, replace_private
from arealite.weights.layout import TensorLayout

SUFFIX = ".cuda"
_ALIGN = 256
_GPU_NAME = re.compile(r"[\w-]{1,64}")
# Segments that this process created: CUDA cannot map the handles of its own process.
_created: dict[Path, DeviceWeights] = {}
_mapped: dict[Path, tuple[bytes, DeviceWeights]] = {}


class DeviceWeights:
    """A segment in one buffer on a GPU, with the methods of `SharedWeights`. `tensors` are views of it."""

    def __init__(self, path: str | Path, buffer: torch.Tensor, layout: TensorLayout):
        self.path, self._buffer = Path(path), buffer
        self.tensors = layout.views(buffer)
        # What the file holds, in the process that has created it.
        self._text = ""

    @classmethod
    def create(cls, path: str | Path, like: Mapping[str, torch.Tensor]) -> DeviceWeights:
        layout = TensorLayout.of(like, _ALIGN)
        try:
            memory = allocate(layout.size_bytes)
            handle = base64.b64encode(memory.handle()).decode()
        except RuntimeError as error:
            raise WeightUpdateError(
                f"cannot share {layout.size_bytes / 1e9:.1f} GB of GPU memory for the weights: {error}. Lower "
                "server.mem_fraction, or set rollout.weight_update=disk"
            ) from error
        made = cls(path, memory.tensor(), layout)
        gpu = visible_gpus()[memory.device]
        made._text = json.dumps({"gpu": gpu, "handle": handle, "layout": layout.to_json()})
        made._write()
        _created[made.path] = made
        return made

    def _write(self) -> None:
        try:
            replace_private(self.path, self._text)
        except OSError as error:
            raise cannot_create(self.path, error) from error

    @classmethod
    def restore(cls, path: str | Path) -> None:
        """Write the file of a segment of this process again if it was removed."""
        held = _created.get(Path(path))
        if held is not None and not held.path.exists():
            logger.warning("the shared weights %s were removed while the run uses them: making them again", path)
            held._write()

    @classmethod
    def attach(cls, path: str | Path) -> DeviceWeights:
        path = Path(path)
        if path in _created:
            cls.restore(path)
            return _created[path]
        try:
            text = read_small(path)
            if path not in _mapped or _mapped[path][0] != text:
                _mapped[path] = (text, cls._map(path, json.loads(text)))
        except WeightUpdateError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            raise WeightUpdateError(f"cannot map the weights of {path}: {cause_of(error)}") from error
        return _mapped[path][1]

    @classmethod
    def release_removed(cls) -> None:
        """Forget mappings whose file is gone: an ended run's weights would stay in GPU memory."""
        for path in [path for path in _mapped if not path.exists()]:
            cls.detach(path)

    @classmethod
    def _map(cls, path: Path, fields: dict[str, Any]) -> DeviceWeights:
        gpus = visible_gpus()
        if fields["gpu"] not in gpus:
            gpu = fields["gpu"] if _GPU_NAME.fullmatch(str(fields["gpu"])) else "?"
            raise WeightUpdateError(
                f"the trainer's weights are on GPU {gpu}, which this process does not see: start it with that GPU "
                "visible, or set rollout.weight_update=disk"
            )
        layout = TensorLayout.from_json(fields["layout"])
        handle = base64.b64decode(fields["handle"], validate=True)
        memory = open_handle(handle, layout.size_bytes, gpus.index(fields["gpu"]))
        return cls(path, memory.tensor(), layout)

    @classmethod
    def detach(cls, path: str | Path) -> None:
        _mapped.pop(Path(path), None)

    def flush(self) -> None:
        """Wait until what was copied into the tensors is visible to other processes."""
        torch.cuda.synchronize(self._buffer.device)

    def unlink(self) -> None:
        """Remove the file and free the memory: callers of `open` in this process lose their views."""
        _created.pop(self.path, None)
        self.path.unlink(missing_ok=True)
        self.tensors.clear()
        self._buffer = torch.empty(0)


def visible_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees. They are the same in every process."""
    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
