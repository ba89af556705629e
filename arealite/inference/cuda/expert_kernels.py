"""Triton kernel of experts in FP8: one product for the tokens of each expert.

Legend: S pairs of a token and an expert, sorted by expert; E experts, K inputs, N outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_fp8_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, ends_ptr, out_ptr, num_experts, N, K,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """out[rows of e] = x[rows of e] @ weight[e].T, times the scales. Grid (tiles of rows, of columns).

    `x` [S, K] and `weight` [E, N, K] are in FP8. A tile has rows of one expert, whose rows end at `ends[e]`; tiles
    behind the last do nothing. With WIDEN, products are computed in float16, which holds FP8 exactly.
    """
    tile = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    known = each < num_experts
    ends = tl.load(ends_ptr + each, mask=known, other=0)
    starts = tl.load(ends_ptr + each - 1, mask=known & (each > 0), other=0)
    tiles = tl.where(known, (ends - starts + BM - 1) // BM, 0)
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((after <= tile).to(tl.int32), 0)
    if expert < num_experts:
        is_own = each == expert
        end = tl.sum(tl.where(is_own, ends, 0), 0)
        first_tile = tl.sum(tl.where(is_own, after - tiles, 0), 0)
        first = tl.sum(tl.where(is_own, starts, 0), 0) + (tile - first_tile) * BM
        rows = first + tl.arange(0, BM)
        cols = tl.program_id(1) * BN + tl.arange(0, BN)
        inner = tl.arange(0, BK)
        has_row, has_col = rows < end, cols < N
        x_at = x_ptr + rows[:, None].to(tl.int64) * K + inner[None, :]
        weight_at = weight_ptr + (expert.to(tl.int64) * N + cols[None, :]) * K + inner[:, None]
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, K, BK):
            inside = start + inner < K
            x = tl.load(x_at + start, mask=has_row[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_at + start, mask=has_col[None, :] & inside[:, None], other=0.0)
            if WIDEN:
                acc += tl.dot(x.to(tl.float16), weight.to(tl.float16))
            else:
                acc += tl.dot(x, weight)
        x_scale = tl.load(x_scale_ptr + rows, mask=has_row, other=0.0)
        weight_scale = tl.load(weight_scale_ptr + expert.to(tl.int64) * N + cols, mask=has_col, other=0.0)
        out = acc * x_scale[:, None] * weight_scale[None, :]
        to = rows[:, None].to(tl.int64) * N + cols[None, :]
        tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_col[None, :])
