"""Tensor parallelism of the embedded engine: which parameters are cut, how, and over whom.

Used by the loader and by `weights.ServedWeights`, on every rank alike. A server on one device has `Shards()`, which cuts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Shards:
    """This rank's part of each parameter. `dims` names the dimension that is cut; what is not in it is whole on every rank."""

    rank: int = 0
    size: int = 1
    dims: dict[str, int] = field(default_factory=dict)

    def cut(self, name: str, value: torch.Tensor) -> torch.Tensor:
        dim = self.dims.get(name)
        return value if dim is None else value.chunk(self.size, dim)[self.rank]

    def cut_factors(
        self, name: str, down: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of this rank's part of `up @ down`."""
        dim = self.dims.get(name)
        if dim == 0:
            up = up.chunk(self.size)[self.rank]
        elif dim == 1:
            down = down.chunk(self.size, 1)[self.rank]
        return down, up

    def whole_shape(self, name: str, part: torch.Size) -> torch.Size:
        dim = self.dims.get(name)
        shape = list(part)
        if dim is not None:
            shape[dim] *= self.size
        return torch.Size(shape)
