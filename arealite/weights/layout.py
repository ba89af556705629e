"""`TensorLayout`: names, dtypes, shapes and byte offsets of tensors in one buffer.

The one description of tensors that travel between processes: over a process group, in shared or device memory, in a
safetensors file, through Ray or a socket. Layouts from other processes are checked; nothing is unpickled here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
}  # fmt: skip
_SAFETENSORS_NAMES = {dtype: name for name, dtype in _SAFETENSORS_DTYPES.items()}


class TensorSpec(NamedTuple):
    """Dtype and shape of one tensor, and where its bytes begin in the buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

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

    # --------------------------------------------------------------------------------------------- buffers

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

    # ------------------------------------------------------------------------------------------ as text

    def to_json(self) -> dict[str, Any]:
        tensors = {n: [_name(s.dtype), list(s.shape), s.offset] for n, s in self.specs.items()}
        return {"size_bytes": self.size_bytes, "tensors": tensors}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> TensorLayout:
        """Read what `to_json` wrote; raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        specs = {
            str(name): TensorSpec(_dtype(dtype), _shape(shape), int(offset))
            for name, (dtype, shape, offset) in fields["tensors"].items()
        }
        return cls(specs, int(fields["size_bytes"]))._checked()

    def to_lists(self) -> tuple[list[str], list[str], list[list[int]]]:
        """Return names, dtypes and shapes: the form in which HTTP endpoints of inference servers take them."""
        specs = self.specs.values()
        return list(self.specs), [_name(s.dtype) for s in specs], [list(s.shape) for s in specs]

    @classmethod
    def from_lists(cls, names: object, dtypes: object, shapes: object) -> TensorLayout:
        """Read what `to_lists` returned; raises `ValueError` or `TypeError` for anything else."""
        if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
            raise ValueError("names, dtypes and shapes must be lists")
        kinds = []
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            if not isinstance(name, str):
                raise ValueError(f"a tensor's name must be a string, got {name!r}")
            kinds.append((name, _dtype(dtype), _shape(shape)))
        return cls._lay_out(kinds, 8)

    def to_safetensors(self) -> bytes:
        """Return the header of a safetensors file whose data is the buffer; it ends on a multiple of 64 bytes."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, spec in self.specs.items():
            offsets = [spec.offset, spec.end]
            header[name] = {"dtype": _SAFETENSORS_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 64)
        return len(text).to_bytes(8, "little") + text

    @classmethod
    def from_safetensors(cls, text: bytes, size_bytes: int) -> TensorLayout:
        """Read the JSON of a safetensors header; raises `ValueError`, `TypeError` or `KeyError` if it is none."""
        header = json.loads(text)
        header.pop("__metadata__", None)
        specs = {
            name: TensorSpec(_SAFETENSORS_DTYPES[e["dtype"]], _shape(e["shape"]), int(e["data_offsets"][0]))
            for name, e in header.items()
        }
        return cls(specs, size_bytes)._checked()

    def _checked(self) -> TensorLayout:
        for name, spec in self.specs.items():
            if spec.offset < 0 or spec.end > self.size_bytes:
                raise ValueError(f"{name} lies outside its buffer of {self.size_bytes} bytes: {spec}")
        return self


def _view(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if not spec.size_bytes:
        return torch.empty(spec.shape, dtype=spec.dtype, device=buffer.device)
    return buffer[spec.offset : spec.end].view(spec.dtype).view(spec.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: object) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"not a dtype: {name!r}")
    return _DTYPES[name]


def _shape(sizes: Any) -> tuple[int, ...]:
    shape = tuple(int(n) for n in sizes)
    if any(n < 0 for n in shape):
        raise ValueError(f"not a shape: {sizes!r}")
    return shape
