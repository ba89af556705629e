"""Triton kernels of mixtures of experts: choice, tokens grouped by expert, products of each group.

They round where the functions of transformers do, so that engine and trainer compute the same up to the order of sums.
For EARLY see `split_kernels`.

Legend: T tokens, K experts of a token, S = T · K pairs of both, E experts; `size` is that of hidden states and
`inner_size` that of an expert.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from arealite.inference.cuda.kernels import times

_NO_EXPERT = tl.constexpr(1 << 30)


@triton.jit
def choose_experts_kernel(
    logits_ptr, index_ptr, share_ptr, num_experts, top_k,
    NORMALIZED: tl.constexpr, EXPERTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Choose the experts of a token by softmax(logits), the largest share first. One program per token.

    `logits` [T, E]; `index` and `share` [T, K]. With NORMALIZED the shares add up to 1. Of equal logits the first
    experts are chosen.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
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
def group_pairs_kernel(
    index_ptr, order_ptr, tiles_ptr, num_pairs, num_tiles,
    BLOCK: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sort pairs by expert, and cut those of each expert into tiles of BM. One program per expert.

    `order` [S] gets the pairs of expert 0, then 1, …. `tiles` [S // BM + E, 3] gets the expert of each tile, its first
    place in `order` and the end of the expert's pairs there; the expert is -1 if a tile has no pairs. An expert has a
    place for one tile more than it fills, so that no program needs to know the tiles of the others.
    Pairs of an index of E or more (experts of other ranks) are left out.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    # Pairs of smaller experts, and of this one in the upper half of the number.
    counts = tl.zeros([BLOCK], tl.int64)
    ids = tl.load(index_ptr + at, mask=at < num_pairs, other=_NO_EXPERT)
    counts += (ids < expert).to(tl.int64) + ((ids == expert).to(tl.int64) << 32)
    for start in range(BLOCK, num_pairs, BLOCK):
        more = tl.load(index_ptr + start + at, mask=start + at < num_pairs, other=_NO_EXPERT)
        counts += (more < expert).to(tl.int64) + ((more == expert).to(tl.int64) << 32)
    total = tl.sum(counts, 0)
    first = (total & 0x7FFFFFFF).to(tl.int32)
    end = first + (total >> 32).to(tl.int32)
    tile = first // BM + expert
    after = tl.where(expert == tl.num_programs(0) - 1, num_tiles, end // BM + expert + 1)
    for base in range(tile, after, TILES):
        tiles = base + tl.arange(0, TILES)
        places = first + (tiles - tile) * BM
        own_at, wanted = tiles_ptr + 3 * tiles, tiles < after
        tl.store(own_at, tl.where(places < end, expert, -1), mask=wanted)
        tl.store(own_at + 1, places, mask=wanted)
        tl.store(own_at + 2, tl.zeros_like(places) + end, mask=wanted)
    for start in range(0, num_pairs, BLOCK):
        if start > 0:
            ids = tl.load(index_ptr + start + at, mask=start + at < num_pairs, other=_NO_EXPERT)
        is_own = ids == expert
        place = first + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order_ptr + place, start + at, mask=is_own)
        first += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def load_part(at, has_row, has_col, WHOLE: tl.constexpr):
    """Load a part of a matrix; without WHOLE, zeros outside of it."""
    if WHOLE:
        part = tl.load(at)
    else:
        part = tl.load(at, mask=has_row & has_col, other=0.0)
    return part


@triton.jit
def product(a, b, WIDEN: tl.constexpr):
    """A product with sums in float32.

    Triton's interpreter can multiply neither bfloat16 nor FP8: it needs WIDEN.
    """
    return tl.dot(a.to(tl.float32), b.to(tl.float32)) if WIDEN else tl.dot(a, b)


@triton.jit
def gated_experts_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, order_ptr, tiles_ptr, out_ptr, top_k, size, inner_size,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WHOLE: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[s] = silu(gate) * up of the s-th sorted pair, [S, inner_size].

    Grid (tiles of inner_size, tiles of pairs): programs beside each other read weights that lie beside each other.
    `x` [T, size]; `weight` [E, 2 · inner_size, size] has gate, then up. With SCALED both are in FP8, with scales [T]
    and [E, 2 · inner_size]. WHOLE: BK and BN divide the sizes.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    tile_at = tiles_ptr + 3 * tl.program_id(1)
    expert = tl.load(tile_at)
    if expert >= 0:
        first, end = tl.load(tile_at + 1), tl.load(tile_at + 2)
        rows = first + tl.arange(0, BM)
        cols = tl.program_id(0) * BN + tl.arange(0, BN)
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
            gate += product(x, load_part(gate_at + start, inside[:, None], has_col[None, :], WHOLE), WIDEN)
            up += product(x, load_part(up_at + start, inside[:, None], has_col[None, :], WHOLE), WIDEN)
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
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, share_ptr, order_ptr, tiles_ptr, out_ptr,
    num_tokens, top_k, size, inner_size,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    WHOLE: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[k, t] = x[s] @ weight[expert].T * share[t, k] for the s-th sorted pair.

    That is token t and its k-th expert. Grid (tiles of size, tiles of pairs). `x` is [S, inner_size], `share` [T, K]
    and `out` [K, T, size].
    With SCALED `x` and `weight` are in FP8, with scales [S] and [E, size]. WHOLE: BK and BN divide the sizes.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    tile_at = tiles_ptr + 3 * tl.program_id(1)
    expert = tl.load(tile_at)
    if expert >= 0:
        first, end = tl.load(tile_at + 1), tl.load(tile_at + 2)
        rows = first + tl.arange(0, BM)
        cols = tl.program_id(0) * BN + tl.arange(0, BN)
        inner = tl.arange(0, BK)
        has_row, has_col = rows < end, cols < size
        x_at = x_ptr + rows[:, None].to(tl.int64) * inner_size + inner[None, :]
        weight_at = weight_ptr + (expert.to(tl.int64) * size + cols[None, :]) * inner_size + inner[:, None]
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, inner_size, BK):
            inside = start + inner < inner_size
            x = tl.load(x_at + start, mask=has_row[:, None] & inside[None, :], other=0.0)
            acc += product(x, load_part(weight_at + start, inside[:, None], has_col[None, :], WHOLE), WIDEN)
        if SCALED:
            scale = tl.load(weight_scale_ptr + expert * size + cols, mask=has_col, other=0.0)
            acc *= tl.load(x_scale_ptr + rows, mask=has_row, other=0.0)[:, None] * scale[None, :]
        pairs = tl.load(order_ptr + rows, mask=has_row, other=0)
        share = tl.load(share_ptr + pairs, mask=has_row, other=0.0)
        dtype = out_ptr.dtype.element_ty
        out = (acc.to(dtype).to(tl.float32) * share[:, None].to(tl.float32)).to(dtype)
        places = (pairs % top_k) * num_tokens + pairs // top_k
        to = places[:, None].to(tl.int64) * size + cols[None, :]
        tl.store(out_ptr + to, out, mask=has_row[:, None] & has_col[None, :])
