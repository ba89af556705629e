"""Attention over the paged KV cache, plugged into Hugging Face models through their attention interface.

The model runner calls the model with `paged=PagedBatch(...)`; transformers hands that object down to `paged_attention`,
which writes the new keys and values into their blocks and attends over each sequence's own blocks. Tokens come as
tiles: `b` sequences of `t` new tokens each, padded (padding writes into block 0 and is read by nobody).

Legend: N tokens of the step, b sequences and t tokens of a tile, L keys of a tile, H heads, Hkv KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "arealite_paged"


@dataclass
class Tile:
    """`b` sequences with `t` new tokens each; tokens `first .. first + b*t` of the step."""

    first: int
    positions: torch.Tensor  # [b, t] absolute positions of the new tokens
    blocks: torch.Tensor  # [b * nb] block ids, sequence by sequence
    num_blocks: int  # nb: blocks per sequence
    from_start: bool  # a single sequence with nothing cached: plain causal attention
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, block_size: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores [b, 1, t, L], made once for all layers of a kind."""
        if window not in self.masks:
            keys = torch.arange(self.num_blocks * block_size)
            query = self.positions[:, None, :, None]
            hidden = keys > query
            if window is not None:
                hidden |= keys <= query - window
            self.masks[window] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(
                hidden, float("-inf")
            )
        return self.masks[window]


@dataclass
class PagedBatch:
    """One forward pass: where new keys and values go, and which blocks each tile reads."""

    keys: list[torch.Tensor]  # per layer [num_blocks, block_size, Hkv, D]
    values: list[torch.Tensor]
    block_size: int
    write_to: torch.Tensor  # [N] flat token positions in the cache
    tiles: list[Tile]

    def attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write keys and values [1, Hkv, N, D], attend with queries [1, H, N, D]; returns [1, N, H, D]."""
        keys, values = self.keys[layer], self.values[layer]
        num_kv, dim = keys.shape[2:]
        keys.view(-1, num_kv, dim).index_copy_(0, self.write_to, key[0].transpose(0, 1))
        values.view(-1, num_kv, dim).index_copy_(0, self.write_to, value[0].transpose(0, 1))
        query = query[0].transpose(0, 1)  # [N, H, D]
        parts = [
            _attend(tile, query, keys, values, self.block_size, scale, window, softcap, sinks)
            for tile in self.tiles
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, N, D]
    key: torch.Tensor,  # [1, Hkv, N, D]
    value: torch.Tensor,
    attention_mask: None,
    *,
    paged: Any,  # a PagedBatch, or on CUDA a DeviceBatch
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer; returns [1, N, H, D]."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer, window = module.layer_idx, sliding_window
    return paged.attention(layer, query, key, value, scale, window, softcap, s_aux), None


def _attend(
    tile: Tile,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_size: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one tile, [b * t, H, D]."""
    (b, t), (num_heads, dim), num_kv = tile.positions.shape, query.shape[1:], keys.shape[2]
    span = tile.num_blocks * block_size
    k = keys.index_select(0, tile.blocks).view(b, span, num_kv, dim).transpose(1, 2)
    v = values.index_select(0, tile.blocks).view(b, span, num_kv, dim).transpose(1, 2)
    q = query[tile.first : tile.first + b * t]
    if softcap is not None or sinks is not None:
        q = q.view(b, t, num_heads, dim).transpose(1, 2)
        mask = tile.mask(block_size, window, q.dtype)
        out = _explicit_attention(q, k, v, mask, scale, softcap, sinks)
        return out.transpose(1, 2).reshape(b * t, num_heads, dim)
    if t == 1:
        # The query heads of one KV head stand in for query positions: keys are not repeated.
        mask = tile.mask(block_size, window, q.dtype)
        out = F.scaled_dot_product_attention(
            q.view(b, num_kv, num_heads // num_kv, dim), k, v, attn_mask=mask, scale=scale
        )
        return out.reshape(b, num_heads, dim)
    q = q.view(b, t, num_heads, dim).transpose(1, 2)
    if tile.from_start and (window is None or t <= window):
        out = F.scaled_dot_product_attention(
            q, k[:, :, :t], v[:, :, :t], is_causal=True, scale=scale, enable_gqa=True
        )
    else:
        mask = tile.mask(block_size, window, q.dtype)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=num_heads != num_kv
        )
    return out.transpose(1, 2).reshape(b * t, num_heads, dim)


def _explicit_attention(
    q: torch.Tensor,  # [b, H, t, D]
    k: torch.Tensor,  # [b, Hkv, L, D]
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What torch's own attention does not have: scores bounded by c·tanh(score / c), and a key per head that has no value."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights @ v.repeat_interleave(group, 1)


def make_tile(first: int, positions: np.ndarray, tables: np.ndarray) -> Tile:
    """A tile from host arrays: positions [b, t] and block tables [b, nb]."""
    return Tile(
        first,
        torch.from_numpy(positions),
        torch.from_numpy(np.ascontiguousarray(tables)).reshape(-1),
        tables.shape[1],
        from_start=positions.shape[0] == 1 and int(positions[0, 0]) == 0,
    )


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The paged attention makes its own masks."""


def register_paged_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers; harmless when repeated."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, no_mask)
