"""Triton functions that kernels share: a cache in FP8, sums of parts.

Parts are those of products (`split_k`).

Legend: HKV KV heads, D head size, BS tokens per block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_parts(
    part_ptr, bias_ptr, place, bias_place, inside, part_stride,
    PARTS: tl.constexpr, BIASED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Numbers of a product at some places.

    With PARTS > 1, the sum of its parts in float32 plus the bias, rounded to TYPE.
    """
    x = tl.load(part_ptr + place, mask=inside, other=0.0)
    if PARTS > 1:
        x = x.to(tl.float32)
        for i in tl.static_range(1, PARTS):
            x += tl.load(part_ptr + i * part_stride + place, mask=inside, other=0.0).to(tl.float32)
        if BIASED:
            x += tl.load(bias_ptr + bias_place, mask=inside, other=0.0).to(tl.float32)
        x = x.to(TYPE)
    return x


@triton.jit
def fp8_scale(largest):
    """The scale that maps the largest number of a vector to the largest one of FP8 (e4m3)."""
    return tl.where(largest > 0.0, tl.maximum(largest / 448.0, 1e-30), 1.0)


@triton.jit
def write_fp8_values(
    source_ptr, bias_ptr, part_stride, head_stride, value_ptr, scale_ptr, block, offset,
    PARTS: tl.constexpr, BIASED: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the values of one token, and their scales, to a cache in FP8.

    Its blocks hold values as [HKV, D, BS].
    """
    head = tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, WIDTH)[None, :]
    inside = (head < HKV) & (at < D)
    # Loaded by the threads that store them: Triton 3.6 exchanges single bytes between threads wrongly.
    place = tl.max_contiguous(head * head_stride + at, [1, 1])
    x = sum_parts(source_ptr, bias_ptr, place, place, inside, part_stride, PARTS, BIASED, bias_ptr.dtype.element_ty)
    x = x.to(tl.float32)
    scale = fp8_scale(tl.max(tl.abs(x), 1))[:, None]
    first = (block * HKV + head) * BS + offset
    tl.store(scale_ptr + first + at, scale, mask=inside & (at == 0))
    cell = ((block * HKV + head) * D + at) * BS + offset
    tl.store(value_ptr + cell, (x / scale).to(value_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_fp8_values(
    value_ptr, block, kv_head, cols, at,
    HKV: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Values [WIDTH, N] of the tokens `cols` [N] in their blocks.

    ALIGNED tokens at a time lie side by side. Tokens behind the end of a sequence are loaded too: what its last block
    holds there is finite. A mask would split the loads into single bytes.
    """
    cell = (block * HKV + kv_head) * D * BS + cols % BS
    cell = tl.max_contiguous(tl.multiple_of(cell, ALIGNED), ALIGNED)
    return tl.load(value_ptr + cell[None, :] + at[:, None] * BS, mask=at[:, None] < D, other=0.0)


@triton.jit
def load_fp8_scales(
    scale_ptr, block, kv_head, cols,
    HKV: tl.constexpr, BS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Scales [N] of the tokens `cols` [N] in their blocks, also of tokens behind the end of a sequence."""
    cell = (block * HKV + kv_head) * BS + cols % BS
    return tl.load(scale_ptr + tl.max_contiguous(tl.multiple_of(cell, ALIGNED), ALIGNED))
