"""Attention over the paged KV cache on the CPU.

A step is a `PagedBatch` of tiles: `b` sequences of `t` new tokens each, padded; padding goes to block 0, which no
sequence reads. Each layer writes its new keys and values into their blocks and attends tile by tile: over the tile's
own new tokens (a prompt from its start), over gathered blocks, or over contiguous rows (`dense_cache`).

Legend: N tokens of the step, b sequences and t tokens of a tile, L keys of a tile, H heads, Hkv KV heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F


@dataclass
class Tile:
    """`b` sequences with `t` new tokens each; tokens `first .. first + b*t` of the step."""

    first: int
    positions: torch.Tensor  # [b, t] absolute positions of the new tokens
    span: int  # L
    # (layer, new keys and values [b * t, Hkv, D]) -> the keys and values to attend to, [b, L, Hkv, D]
    read: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    causal: bool = False  # the keys are the new tokens: query i sees keys up to i
    aligned: bool = False  # one new token per sequence, which sees every key
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """The mask that is added to the scores, [b, 1, t, L]; made once for all layers with this window."""
        if window not in self.masks:
            keys = torch.arange(self.span)
            query = self.positions[:, None, :, None]
            hidden = keys > query
            if window is not None:
                hidden |= keys <= query - window
            self.masks[window] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return self.masks[window]


@dataclass
class PagedBatch:
    """One forward pass: where new keys and values are written, and what each tile reads."""

    keys: list[torch.Tensor]  # per layer [num_blocks, block_size, Hkv, D]
    values: list[torch.Tensor]
    write_to: torch.Tensor  # [N] flat token positions in the cache
    positions: torch.Tensor  # [N]
    tiles: list[Tile]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [N, H, D]
        key: torch.Tensor,  # [N, Hkv, D]
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write keys and values to the cache, then attend; returns [N, H, D]."""
        for cache, new in ((self.keys[layer], key), (self.values[layer], value)):
            cache.flatten(0, 1).index_copy_(0, self.write_to, new)
        parts = []
        for tile in self.tiles:
            part = slice(tile.first, tile.first + tile.positions.numel())
            k, v = tile.read(layer, key[part], value[part])
            parts.append(_attend(tile, query[part], k, v, scale, window, softcap, sinks))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attention(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any
    ) -> torch.Tensor:
        """`attend` in the layout of transformers: [1, heads, N, D] in, [1, N, H, D] out."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return self.attend(layer, q, k, v, *options).unsqueeze(0)


def _attend(
    tile: Tile,
    query: torch.Tensor,  # [b * t, H, D]
    keys: torch.Tensor,  # [b, L, Hkv, D]
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one tile, [b * t, H, D]."""
    (b, t), (num_heads, dim), num_kv = tile.positions.shape, query.shape[1:], keys.shape[2]
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    if t == 1 and softcap is None and sinks is None:
        # The query heads of one KV head take the place of query positions, so that keys are not repeated.
        q = query.view(b, num_kv, num_heads // num_kv, dim)
        mask = None if tile.aligned and window is None else tile.mask(window, q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return out.reshape(b, num_heads, dim)
    q = query.view(b, t, num_heads, dim).transpose(1, 2)
    if softcap is not None or sinks is not None:
        out = _explicit_attention(q, k, v, tile.mask(window, q.dtype), scale, softcap, sinks)
    elif tile.causal and (window is None or t <= window):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=num_heads != num_kv)
    else:
        mask = tile.mask(window, q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=num_heads != num_kv)
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
    """Attention with soft-capped scores, c·tanh(score / c), and sinks (a key per head without a value)."""
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
