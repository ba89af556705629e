"""Triton kernels of mixtures of experts: choice, tokens grouped by expert, products of each group.

They round where the functions of transformers do, so that engine and trainer compute the same up to the order of sums.

Legend: T tokens, K experts of a token, S = T · K pairs of both, E experts; `size` is that of hidden states and
`inner_size` that of an expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from arealite.inference.cuda.kernels import times


@triton.jit
def choose_experts_kernel(
    logits_ptr, index_ptr, share_ptr, num_experts, top_k, NORMALIZED: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """Choose the experts of a token by softmax(logits), the largest share first. One program per token.

    `logits` [T, E]; `index` and `share` [T, K]. With NORMALIZED the shares add up to 1. Of equal logits the first
    experts are chosen.
    """
    token = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, EXPERTS)
    logits = tl.load(logits_ptr + token * num_experts + each, mask=each < num_experts, other=-float("inf"))
    wide = logits.to(tl.float32)
    left = tl.exp(wide - tl.max(wide, 0))
    total = tl.sum(left, 0)
    left = tl.where(each < num_experts, left, -1.0)
    if NORMALIZED:
        rest, total = left, 0.0
        for _ in range(top_k):
            largest, expert = tl.max(rest, 0, return_indices=True)
            total += largest
            rest = tl.where(each == expert, -1.0, rest)
    for place in range(top_k):
        largest, expert = tl.max(left, 0, return_indices=True)
        left = tl.where(each == expert, -1.0, left)
        tl.store(index_ptr + token * top_k + place, expert)
        tl.store(share_ptr + token * top_k + place, largest / total)


@triton.jit
def group_pairs_kernel(index_ptr, order_ptr, ends_ptr, num_pairs, BLOCK: tl.constexpr):
    """Sort pairs by expert.

    `order` [S] gets the pairs of expert 0, then 1, …, whose last ones end at `ends` [E]. One program per expert.
    Pairs of an index of E or more (experts of other ranks) are left out.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before, own = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        inside = start + at < num_pairs
        ids = tl.load(index_ptr + start + at, mask=inside, other=0)
        before += (inside & (ids < expert)).to(tl.int32)
        own += (inside & (ids == expert)).to(tl.int32)
    first = tl.sum(before, 0)
    tl.store(ends_ptr + expert, first + tl.sum(own, 0))
    for start in range(0, num_pairs, BLOCK):
        inside = start + at < num_pairs
        is_own = inside & (tl.load(index_ptr + start + at, mask=inside, other=0) == expert)
        place = first + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order_ptr + place, start + at, mask=is_own)
        first += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def find_tile(ends_ptr, tile, num_experts, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """Return the expert of a tile of BM sorted pairs, the first pair and the end of the expert's pairs.

    Tiles have pairs of one expert. A tile behind the last one gets the expert `num_experts`.
    """
    each = tl.arange(0, EXPERTS)
    known = each < num_experts
    ends = tl.load(ends_ptr + each, mask=known, other=0)
    starts = tl.load(ends_ptr + each - 1, mask=known & (each > 0), other=0)
    tiles = tl.where(known, (ends - starts + BM - 1) // BM, 0)
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((known & (after <= tile)).to(tl.int32), 0)
    is_own = each == expert
    first = tl.sum(tl.where(is_own, starts + (tile - after + tiles) * BM, 0), 0)
    return expert, first, tl.sum(tl.where(is_own, ends, 0), 0)


@triton.jit
def product(a, b, WIDEN: tl.constexpr):
    """A product with sums in float32.

    Triton's interpreter can multiply neither bfloat16 nor FP8: it needs WIDEN.
    """
    return tl.dot(a.to(tl.float32), b.to(tl.float32)) if WIDEN else tl.dot(a, b)


@triton.jit
def gated_experts_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, order_ptr, ends_ptr, out_ptr,
    num_experts, top_k, size, inner_size,
    SCALED: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """out[s] = silu(gate) * up of the s-th sorted pair, [S, inner_size].

    Grid (tiles of pairs, tiles of inner_size). `x` [T, size]; `weight` [E, 2 · inner_size, size] has gate, then up.
    With SCALED both are in FP8, with scales [T] and [E, 2 · inner_size].
    """
    expert, first, end = find_tile(ends_ptr, tl.program_id(0), num_experts, EXPERTS, BM)
    if expert < num_experts:
        rows = first + tl.arange(0, BM)
        cols = tl.program_id(1) * BN + tl.arange(0, BN)
        inner = tl.arange(0, BK)
        has_row, has_col = rows < end, cols < inner_size
        tokens = tl.load(order_ptr + rows, mask=has_row, other=0) // top_k
        x_at = x_ptr + tokens[:, None].to(tl.int64) * size + inner[None, :]
        gate_at = weight_ptr + (expert.to(tl.int64) * 2 * inner_size + cols[None, :]) * size + inner[:, None]
        up_at = gate_at + inner_size * size
        gate, up = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
        for start in range(0, size, BK):
            inside = start + inner < size
            x = tl.load(x_at + start, mask=has_row[:, None] & inside[None, :], other=0.0)
            wanted = has_col[None, :] & inside[:, None]
            gate += product(x, tl.load(gate_at + start, mask=wanted, other=0.0), WIDEN)
            up += product(x, tl.load(up_at + start, mask=wanted, other=0.0), WIDEN)
        if SCALED:
            scale_at = weight_scale_ptr + expert * 2 * inner_size + cols
            scale = tl.load(x_scale_ptr + tokens)[:, None]
            gate *= scale * tl.load(scale_at, mask=has_col, other=0.0)[None, :]
            up *= scale * tl.load(scale_at + inner_size, mask=has_col, other=0.0)[None, :]
        dtype = out_ptr.dtype.element_ty
        wide = gate.to(dtype).to(tl.float32)
        out = times((wide / (1.0 + tl.exp(-wide))).to(dtype), up.to(dtype))
        to = rows[:, None].to(tl.int64) * inner_size + cols[None, :]
        tl.store(out_ptr + to, out, mask=has_row[:, None] & has_col[None, :])


@triton.jit
def down_experts_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, share_ptr, order_ptr, ends_ptr, out_ptr,
    num_experts, size, inner_size,
    SCALED: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[s] @ weight[expert].T * share[pair] for the s-th sorted pair.

    Grid (tiles of pairs, tiles of size). `x` [S, inner_size] is sorted, `share` [S] and `out` [S, size] are not.
    With SCALED `x` and `weight` are in FP8, with scales [S] and [E, size].
    """
    expert, first, end = find_tile(ends_ptr, tl.program_id(0), num_experts, EXPERTS, BM)
    if expert < num_experts:
        rows = first + tl.arange(0, BM)
        cols = tl.program_id(1) * BN + tl.arange(0, BN)
        inner = tl.arange(0, BK)
        has_row, has_col = rows < end, cols < size
        x_at = x_ptr + rows[:, None].to(tl.int64) * inner_size + inner[None, :]
        weight_at = weight_ptr + (expert.to(tl.int64) * size + cols[None, :]) * inner_size + inner[:, None]
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, inner_size, BK):
            inside = start + inner < inner_size
            x = tl.load(x_at + start, mask=has_row[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_at + start, mask=has_col[None, :] & inside[:, None], other=0.0)
            acc += product(x, weight, WIDEN)
        if SCALED:
            scale = tl.load(weight_scale_ptr + expert * size + cols, mask=has_col, other=0.0)
            acc *= tl.load(x_scale_ptr + rows, mask=has_row, other=0.0)[:, None] * scale[None, :]
        pairs = tl.load(order_ptr + rows, mask=has_row, other=0)
        share = tl.load(share_ptr + pairs, mask=has_row, other=0.0)
        dtype = out_ptr.dtype.element_ty
        out = (acc.to(dtype).to(tl.float32) * share[:, None].to(tl.float32)).to(dtype)
        to = pairs[:, None].to(tl.int64) * size + cols[None, :]
        tl.store(out_ptr + to, out, mask=has_row[:, None] & has_col[None, :])
