"""`TensorLayout`: names, dtypes, shapes and byte offsets of tensors in one buffer.

The one description of tensors that travel between processes: over a process group, in shared or device memory, in a
safetensors file, through Ray or a socket. Layouts from other processes are checked; nothing is unpickled here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_SAFETENSORS_NAMES = {dtype: name for name, dtype in _SAFETENSORS_DTYPES.items()}


class TensorSpec(NamedTuple):
    """Dtype and shape of one tensor, and where its bytes begin in the buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        # Not torch's product, which overflows without an error.
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


@dataclass(frozen=True)
class TensorLayout:
    """Named tensors in one buffer. Layouts are equal if every tensor lies in the same place."""

    specs: dict[str, TensorSpec]
    size_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], align: int = 8) -> TensorLayout:
        """Lay out tensors like these (they may be on `meta`), each at a multiple of `align` bytes."""
        return cls._lay_out([(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()], align)

    @classmethod
    def _lay_out(cls, kinds: list[tuple[str, torch.dtype, tuple[int, ...]]], align: int) -> TensorLayout:
        specs: dict[str, TensorSpec] = {}
        offset = 0
        for name, dtype, shape in kinds:
            specs[name] = TensorSpec(dtype, shape, offset)
            offset = -(-specs[name].end // align) * align
        return cls(specs, offset)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors as views of a `uint8` buffer: writing to them writes the buffer."""
        return {name: _view(buffer, spec) for name, spec in self.specs.items()}

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Copy the tensors into one new `uint8` buffer on the host."""
        buffer = torch.empty(self.size_bytes, dtype=torch.uint8)
        for name, view in self.views(buffer).items():
            view.copy_(tensors[name].detach())
        return buffer

    def allocate(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Return uninitialized tensors, each in memory of its own."""
        return {name: torch.empty(s.shape, dtype=s.dtype, device=device) for name, s in self.specs.items()}

    def portions(self, max_bytes: int) -> Iterator[TensorLayout]:
        """Split into layouts of at most `max_bytes`, in order; a larger tensor is a portion of its own."""
        portion: dict[str, TensorSpec] = {}
        size = 0
        for name, spec in self.specs.items():
            if portion and size + spec.size_bytes > max_bytes:
                yield TensorLayout(portion, self.size_bytes)
                portion, size = {}, 0
            portion[name] = spec
            size += spec.size_bytes
        if portion:
            yield TensorLayout(portion, self.size_bytes)

    @classmethod
    def join(cls, portions: Sequence[TensorLayout]) -> TensorLayout:
        """Return the layout that was split into these portions."""
        return cls({n: s for portion in portions for n, s in portion.specs.items()}, portions[0].size_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON; each tensor as in the header of a safetensors file."""
        tensors = {
            name: {"dtype": _SAFETENSORS_NAMES[s.dtype], "shape": list(s.shape), "data_offsets": [s.offset, s.end]}
            for name, s in self.specs.items()
        }
        return {"size_bytes": self.size_bytes, "tensors": tensors}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> TensorLayout:
        """Read what `to_json` wrote; raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        size_bytes = int(fields["size_bytes"])
        specs: dict[str, TensorSpec] = {}
        for name, entry in fields["tensors"].items():
            begin, _ = entry["data_offsets"]
            spec = TensorSpec(_SAFETENSORS_DTYPES[entry["dtype"]], _shape(entry["shape"]), int(begin))
            if spec.offset < 0 or spec.end > size_bytes:
                raise ValueError(f"{name} lies outside its buffer of {size_bytes} bytes: {spec}")
            specs[str(name)] = spec
        return cls(specs, size_bytes)

    def to_lists(self) -> tuple[list[str], list[str], list[list[int]]]:
        """Return names, dtypes and shapes: the form in which HTTP endpoints of inference servers take them."""
        specs = self.specs.values()
        dtypes = [str(s.dtype).removeprefix("torch.") for s in specs]
        return list(self.specs), dtypes, [list(s.shape) for s in specs]

    @classmethod
    def from_lists(cls, names: object, dtypes: object, shapes: object) -> TensorLayout:
        """Read what `to_lists` returned; raises `ValueError` or `TypeError` for anything else."""
        if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
            raise ValueError("names, dtypes and shapes must be lists")
        kinds = []
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            if not isinstance(name, str):
                raise ValueError(f"a tensor's name must be a string, got {name!r}")
            kinds.append((name, dtype_of(dtype), _shape(shape)))
        return cls._lay_out(kinds, 8)

    def to_safetensors(self) -> bytes:
        """Return the header of a safetensors file with this buffer, padded to a multiple of 64 bytes."""
        text = json.dumps({"__metadata__": {"format": "pt"}, **self.to_json()["tensors"]}).encode()
        text += b" " * (-(8 + len(text)) % 64)
        return len(text).to_bytes(8, "little") + text

    @classmethod
    def from_safetensors(cls, text: bytes, size_bytes: int) -> TensorLayout:
        """Read the JSON of a safetensors header; raises the errors of `from_json`."""
        header = json.loads(text)
        header.pop("__metadata__", None)
        return cls.from_json({"size_bytes": size_bytes, "tensors": header})


def _view(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if not spec.size_bytes:
        return torch.empty(spec.shape, dtype=spec.dtype, device=buffer.device)
    return buffer[spec.offset : spec.end].view(spec.dtype).view(spec.shape)


def dtype_of(name: object) -> torch.dtype:
    """Return the dtype with this name, such as `float32`; raises `ValueError` for any other name."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"not a dtype: {name!r}")
    return _DTYPES[name]


def _shape(sizes: Any) -> tuple[int, ...]:
    shape = tuple(int(n) for n in sizes)
    if any(n < 0 for n in shape):
        raise ValueError(f"not a shape: {sizes!r}")
    return shape
