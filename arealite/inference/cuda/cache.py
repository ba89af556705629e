"""The paged KV cache on the device: keys and values of all layers, in the model's type or in FP8.

Owned by the CUDA runner. In FP8 (e4m3) every head of a token has a scale in float32, chosen when it is written, and
values lie with the tokens of a block side by side: attention sums over tokens, and tensor cores read FP8 only along
the dimension that is summed over.

Legend: L layers, HKV KV heads, D head size, BS tokens per block.
"""

from __future__ import annotations

import torch

from arealite.inference.loading import ModelShape


class DeviceCache:
    """Keys and values of each layer.

    Both are [num_blocks, BS, HKV, D]; in FP8, values are [num_blocks, HKV, D, BS].
    """

    def __init__(
        self, shape: ModelShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (shape.num_layers, 2, num_blocks, block_size, shape.num_kv_heads)
        # Zeros: NaN in masked keys would survive the mask.
        self.data = torch.zeros(*size, shape.head_dim, dtype=dtype, device=device)
        self.keys = [layer[0] for layer in self.data]
        self.values = [layer[1] for layer in self.data]
        self.scales: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._parts = [self.data.view(torch.uint8) if dtype.itemsize == 1 else self.data]  # no FP8 in indexing
        if dtype.itemsize == 1:
            size = (shape.num_layers, 2, num_blocks, shape.num_kv_heads, block_size)
            scales = torch.ones(*size, device=device)
            self.scales = [(layer[0], layer[1]) for layer in scales]
            self._parts.append(scales)
            self.values = [
                value.view(num_blocks, shape.num_kv_heads, shape.head_dim, block_size) for value in self.values
            ]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(part.nbytes for part in self._parts)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy blocks."""
        for part in self._parts:
            part[:, :, target] = part[:, :, source]

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero blocks."""
        for part in self._parts:
            part[:, :, blocks] = 0
