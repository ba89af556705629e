"""Triton kernel of prefill attention: a tile of a prompt's tokens over the blocks of its context.

The general kernel (`kernels.attend_kernel`) also knows windows and sinks. This one computes what most layers need, 1.5
times as fast with prompts of 4k tokens (benchmark/results/long_context_h200.md): blocks are looked up a step ahead, so
that loads overlap with products, and only the last steps compare positions.

Legend: N tokens, H query heads, HKV KV heads, G = H / HKV, D head size, BS tokens per block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from arealite.inference.cuda.functions import load_fp8_scales, load_fp8_values
from arealite.inference.cuda.kernels import fold_tile


@triton.jit
def load_context(
    key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, block, kv_head, cols, known, at,
    HKV: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, ALIGNED: tl.constexpr,
    MASKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Keys, values and their scales (in FP8) of the tokens `cols` [N] in their blocks."""
    cell = (block * BS + cols % BS) * HKV * D + kv_head * D
    inside = at[None, :] < D
    if MASKED:
        inside = inside & known[:, None]
    k = tl.load(key_ptr + cell[:, None] + at[None, :], mask=inside, other=0.0)
    if SCALED:
        v = load_fp8_values(value_ptr, block, kv_head, cols, at, HKV, D, BS, ALIGNED)
        key_scale = load_fp8_scales(key_scale_ptr, block, kv_head, cols, HKV, BS, ALIGNED)
        value_scale = load_fp8_scales(value_scale_ptr, block, kv_head, cols, HKV, BS, ALIGNED)
        if MASKED:
            value_scale = tl.where(known, value_scale, 0.0)
    else:
        v = tl.load(value_ptr + cell[:, None] + at[None, :], mask=inside, other=0.0)
        key_scale = tl.zeros([1], tl.float32)
        value_scale = key_scale
    return k, v, key_scale, value_scale


@triton.jit
def attend_prompt_kernel(
    q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, out_ptr, row_ptr, pos_ptr, table_ptr,
    first_ptr, count_ptr, table_stride, token_stride, head_stride, scale, softcap,
    H: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BS: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISE: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of tokens of one sequence. Grid (HKV, tiles).

    Row m of a tile is its token m // G and the query head m % G of the KV head. `scale` and `softcap` include log2(e).
    """
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(first_ptr + tile), tl.load(count_ptr + tile)
    if count > 0:  # else padding
        m = tl.arange(0, BLOCK_M)
        at = tl.arange(0, WIDTH)
        within = tl.arange(0, BLOCK_N)
        token = first + m // G
        head = kv_head * G + m % G
        valid = m < count * G
        pos = tl.load(pos_ptr + token, mask=valid, other=0)
        seen_by_all = tl.load(pos_ptr + first) + 1
        end = tl.load(pos_ptr + first + count - 1) + 1
        q_at = token[:, None].to(tl.int64) * token_stride + head[:, None] * head_stride + at[None, :]
        q = tl.load(q_ptr + q_at, mask=valid[:, None] & (at[None, :] < D), other=0.0)
        if SCALED:
            q = q.to(tl.float16)
        table = table_ptr + tl.load(row_ptr + first).to(tl.int64) * table_stride
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        unmasked = seen_by_all // BLOCK_N
        # Behind the end, the last block: block 0 is that of padding, and may hold anything.
        block = tl.load(table + tl.minimum(within, end - 1) // BS)
        for i in tl.range(0, unmasked, num_stages=STAGES):
            cols = i * BLOCK_N + within
            here = block.to(tl.int64)
            block = tl.load(table + tl.minimum(cols + BLOCK_N, end - 1) // BS)
            k, v, key_scale, value_scale = load_context(
                key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, here, kv_head, cols, cols, at,
                HKV, D, BS, ALIGNED, False, SCALED,
            )  # fmt: skip
            acc, peak, total = fold_tile(
                acc, peak, total, q, k, v, key_scale, value_scale, pos, scale, softcap, PRECISE, SOFTCAP, SCALED, False
            )
        for i in range(unmasked, tl.cdiv(end, BLOCK_N)):
            cols = i * BLOCK_N + within
            here = tl.load(table + tl.minimum(cols, end - 1) // BS).to(tl.int64)
            known = cols < end
            k, v, key_scale, value_scale = load_context(
                key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, here, kv_head, cols, known, at,
                HKV, D, BS, ALIGNED, True, SCALED,
            )  # fmt: skip
            seen = known[None, :] & (cols[None, :] <= pos[:, None])
            acc, peak, total = fold_tile(
                acc, peak, total, q, k, v, key_scale, value_scale, seen, scale, softcap, PRECISE, SOFTCAP, SCALED, True
            )
        to = (token[:, None].to(tl.int64) * H + head[:, None]) * D + at[None, :]
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + to, out, mask=valid[:, None] & (at[None, :] < D))
