"""Triton kernels of the forward pass: norm, rotary embedding, cache write, attention, SiLU gate.

Each does in one pass what the Hugging Face module does in several, and rounds where that module rounds, so that the
engine and a trainer with the same modules compute the same numbers up to the order of sums.

Legend: N tokens, H query heads, HKV KV heads, G = H / HKV, D head size, BS tokens per block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from arealite.inference.cuda.functions import fp8_scale, load_fp8_scales, load_fp8_values, sum_parts, write_fp8_values


@triton.jit
def times(a, b):
    """A product rounded to the operands' type, also if the compiler fuses operations around it."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit
def add_norm_kernel(
    delta_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, size, eps, part_stride,
    HAS_DELTA: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """residual += delta; out = RMSNorm(residual) * weight; with SCALED in FP8. One program per token.

    With PARTS > 1, `delta` is a sum of so many parts. For EARLY see `split_kernels`.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(residual_ptr + row + at, mask=inside, other=0.0)
    if HAS_DELTA:
        to = weight_ptr.dtype.element_ty
        delta = sum_parts(delta_ptr, weight_ptr, row + at, at, inside, part_stride, PARTS, False, to)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / size + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    normed = times(weight, (wide * scale).to(weight.dtype))
    if SCALED:
        unit = fp8_scale(tl.max(tl.abs(normed.to(tl.float32)), 0))
        tl.store(scale_ptr + tl.program_id(0), unit)
        tl.store(out_ptr + row + at, (normed.to(tl.float32) / unit).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptr + row + at, normed, mask=inside)


@triton.jit
def load_gated(x_ptr, at, size):
    """silu(x[:size]) * x[size:] at some places."""
    gate = tl.load(x_ptr + at, mask=at < size, other=0.0)
    up = tl.load(x_ptr + size + at, mask=at < size, other=0.0)
    wide = gate.to(tl.float32)
    return times((wide / (1.0 + tl.exp(-wide))).to(gate.dtype), up)


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """out = silu(x[:, :size]) * x[:, size:]. Grid (N, blocks)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + token * size + at, load_gated(x_ptr + token * 2 * size, at, size), mask=at < size)


@triton.jit
def quantize_kernel(x_ptr, out_ptr, scale_ptr, size, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize tokens to FP8 with a scale each. One program per token.

    With GATED, quantize what `silu_mul_kernel` computes. Two passes: a token of a large model exceeds the registers.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        if GATED:
            x = load_gated(x_ptr + token * 2 * size, start + at, size)
        else:
            x = tl.load(x_ptr + token * size + start + at, mask=start + at < size, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    unit = fp8_scale(tl.max(largest, 0))
    tl.store(scale_ptr + token, unit)
    for start in range(0, size, BLOCK):
        if GATED:
            x = load_gated(x_ptr + token * 2 * size, start + at, size)
        else:
            x = tl.load(x_ptr + token * size + start + at, mask=start + at < size, other=0.0)
        x = (x.to(tl.float32) / unit).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * size + start + at, x, mask=start + at < size)


@triton.jit
def rope_write_kernel(
    qkv_ptr, bias_ptr, q_ptr, row_ptr, pos_ptr, rope_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, key_ptr, value_ptr,
    key_scale_ptr, value_scale_ptr, table_ptr, table_stride, eps, part_stride,
    PARTS: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, BS: tl.constexpr, NORM: tl.constexpr, MOVED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys, and write keys and values to the cache. One program per token.

    Queries go to `q_ptr`, which may be `qkv_ptr`.

    `HEADS`, `KV_HEADS` and `HALF` are the powers of two that hold H + 2 HKV heads, HKV heads and D / 2 numbers. With
    `MOVED`, `rope_ptr` has the row of each token in the tables of angles; else that is its position. With SCALED the
    cache is in FP8, each head of a token has a scale, and values lie [HKV, D, BS] in a block. With PARTS > 1, `qkv` is
    a sum of so many parts. For EARLY see `split_kernels`.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    inside = (head < H + 2 * HKV) & (at < D // 2)
    of_token = token * (H + 2 * HKV) * D
    place = head * D + at
    number = q_ptr.dtype.element_ty
    low = sum_parts(
        qkv_ptr + of_token, bias_ptr, place, place, inside, part_stride, PARTS, BIASED, number
    )  # fmt: skip
    place += D // 2
    high = sum_parts(
        qkv_ptr + of_token, bias_ptr, place, place, inside, part_stride, PARTS, BIASED, number
    )  # fmt: skip
    base = q_ptr + of_token + head * D + at
    is_query = head < H
    is_value = head >= H + HKV
    if NORM:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        square = tl.sum(wide_low * wide_low + wide_high * wide_high, 1)[:, None] / D
        scale = 1.0 / tl.sqrt(square + eps)
        half = at < D // 2
        q_low = tl.load(q_norm_ptr + at, mask=half, other=0.0)
        q_high = tl.load(q_norm_ptr + D // 2 + at, mask=half, other=0.0)
        k_low = tl.load(k_norm_ptr + at, mask=half, other=0.0)
        k_high = tl.load(k_norm_ptr + D // 2 + at, mask=half, other=0.0)
        normed_low = times(tl.where(is_query, q_low, k_low), (wide_low * scale).to(low.dtype))
        normed_high = times(tl.where(is_query, q_high, k_high), (wide_high * scale).to(low.dtype))
        low = tl.where(is_value, low, normed_low)
        high = tl.where(is_value, high, normed_high)
    pos = tl.load(pos_ptr + token)
    turn = pos
    if MOVED:
        turn = tl.load(rope_ptr + token)
    angle = turn * D + at
    cos_low = tl.load(cos_ptr + angle, mask=at < D // 2, other=0.0)
    cos_high = tl.load(cos_ptr + angle + D // 2, mask=at < D // 2, other=0.0)
    sin_low = tl.load(sin_ptr + angle, mask=at < D // 2, other=0.0)
    sin_high = tl.load(sin_ptr + angle + D // 2, mask=at < D // 2, other=0.0)
    turned_low = (times(low, cos_low).to(tl.float32) - times(high, sin_low).to(tl.float32)).to(low.dtype)
    turned_high = (times(high, cos_high).to(tl.float32) + times(low, sin_high).to(tl.float32)).to(low.dtype)
    tl.store(base, turned_low, mask=inside & is_query)
    tl.store(base + D // 2, turned_high, mask=inside & is_query)
    row = tl.load(row_ptr + token).to(tl.int64)
    block = tl.load(table_ptr + row * table_stride + pos // BS).to(tl.int64)
    cell = (block * BS + pos % BS) * HKV * D
    is_key = inside & (head >= H) & (head < H + HKV)
    if SCALED:
        turned_low, turned_high = turned_low.to(tl.float32), turned_high.to(tl.float32)
        scale = fp8_scale(tl.maximum(tl.max(tl.abs(turned_low), 1), tl.max(tl.abs(turned_high), 1)))[:, None]
        turned_low, turned_high = turned_low / scale, turned_high / scale
        scale_at = block * HKV * BS + (head - H) * BS + pos % BS
        tl.store(key_scale_ptr + scale_at + at, scale, mask=is_key & (at == 0))
    to_key = key_ptr + cell + (head - H) * D + at
    if SCALED:
        to_key = tl.max_contiguous(to_key, [1, 8])  # as the loads: see `write_fp8_values`
    tl.store(to_key, turned_low.to(key_ptr.dtype.element_ty), mask=is_key)
    tl.store(to_key + D // 2, turned_high.to(key_ptr.dtype.element_ty), mask=is_key)
    if SCALED:
        skipped = (H + HKV) * D
        write_fp8_values(
            qkv_ptr + of_token + skipped, bias_ptr + skipped, part_stride, D, value_ptr, value_scale_ptr, block,
            pos % BS, PARTS, BIASED, HKV, D, BS, KV_HEADS, 2 * HALF,
        )  # fmt: skip
    else:
        to_value = value_ptr + cell + (head - H - HKV) * D + at
        tl.store(to_value, low.to(key_ptr.dtype.element_ty), mask=inside & is_value)
        tl.store(to_value + D // 2, high.to(key_ptr.dtype.element_ty), mask=inside & is_value)


@triton.jit
def write_cache_kernel(
    source_ptr, cache_ptr, scale_ptr, row_ptr, pos_ptr, table_ptr, table_stride, head_stride, token_stride,
    HKV: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BS: tl.constexpr,
    SCALED: tl.constexpr, TOKENS_LAST: tl.constexpr,
):  # fmt: skip
    """Write keys or values, given as [HKV, N, D] with any strides, into the cache. One program per token.

    With TOKENS_LAST, they lie [HKV, D, BS] in a block (values in FP8), else [BS, HKV, D].
    """
    token = tl.program_id(0).to(tl.int64)
    pos = tl.load(pos_ptr + token)
    row = tl.load(row_ptr + token).to(tl.int64)
    block = tl.load(table_ptr + row * table_stride + pos // BS).to(tl.int64)
    source_ptr += token * token_stride
    if TOKENS_LAST:
        write_fp8_values(
            source_ptr, source_ptr, 0, head_stride, cache_ptr, scale_ptr, block, pos % BS,
            1, False, HKV, D, BS, HEADS, WIDTH,
        )  # fmt: skip
    else:
        head = tl.arange(0, HEADS)[:, None]
        at = tl.arange(0, WIDTH)[None, :]
        inside = (head < HKV) & (at < D)
        x = tl.load(source_ptr + head * head_stride + at, mask=inside, other=0.0)
        if SCALED:
            scale = fp8_scale(tl.max(tl.abs(x.to(tl.float32)), 1))[:, None]
            x = x.to(tl.float32) / scale
            tl.store(scale_ptr + (block * HKV + head) * BS + pos % BS + at, scale, mask=inside & (at == 0))
        cell = (block * BS + pos % BS) * HKV * D + head * D + at
        if SCALED:
            cell = tl.max_contiguous(cell, [1, 8])  # as the loads: see `write_fp8_values`
        tl.store(cache_ptr + cell, x.to(cache_ptr.dtype.element_ty), mask=inside)


@triton.jit
def fold_tile(
    acc, peak, total, q, k, v, key_scale, value_scale, seen, scale, softcap,
    PRECISE: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr = True,
):  # fmt: skip
    """Add a tile of keys and values to the running softmax of the queries: new `acc`, `peak`, `total`.

    With SCALED, keys [N, D] and values [D, N] are in FP8 and `q` in float16, which holds FP8 exactly. With MASKED, a
    query uses the keys that it has `seen`, else all.
    """
    if PRECISE:
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    else:
        score = tl.dot(q, tl.trans(k.to(q.dtype))) * scale
    if SCALED:
        score = score * key_scale[None, :]
    if SOFTCAP:
        score = softcap * (1.0 - 2.0 / (1.0 + tl.exp(score * (2.0 / softcap))))  # tanh
    if MASKED:
        score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    anchor = higher
    if MASKED:
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - anchor[:, None])
    fade = tl.exp2(peak - anchor)
    total = total * fade + tl.sum(weight, 1)
    if SCALED:
        # Relative to the largest scale of the tile, so that the weights keep their precision in float16.
        unit = tl.maximum(tl.max(value_scale, 0), 1e-30)
        weight = weight * (value_scale / unit)[None, :]
        acc = acc * fade[:, None] + tl.dot(weight.to(tl.float16), tl.trans(v.to(tl.float16))) * unit
    elif PRECISE:
        acc = acc * fade[:, None] + tl.dot(weight, v, input_precision="ieee")
    else:
        acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v)
    return acc, higher, total


@triton.jit
def attend_kernel(
    q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, out_ptr, part_ptr, lse_ptr, row_ptr, pos_ptr, table_ptr,
    first_ptr, count_ptr, sink_ptr, num_tokens, table_stride, token_stride, head_stride, scale, softcap,
    H: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, DECODE: tl.constexpr, PRECISE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of tokens of one sequence over the sequence's blocks.

    Grid (tiles, HKV, SPLITS).

    The query heads that share a KV head are packed into the rows of a tile (row m is token m // G, head m % G), so
    keys and values are read once for all of them. `scale` and `softcap` include log2(e), `WINDOW` 0 means none. A sink
    is a key per head without a value: the sums start from it.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if DECODE:
        first, count = tile, 1
    else:
        first, count = tl.load(first_ptr + tile), tl.load(count_ptr + tile)  # count 0: padding
    m = tl.arange(0, BLOCK_M)
    token = first + m // G
    head = kv_head * G + m % G
    valid = m < count * G
    at = tl.arange(0, WIDTH)
    pos = tl.load(pos_ptr + token, mask=valid, other=0)
    last = tl.load(pos_ptr + first + count - 1, mask=count > 0, other=-1)
    q_at = token[:, None].to(tl.int64) * token_stride + head[:, None] * head_stride + at[None, :]
    q = tl.load(q_ptr + q_at, mask=valid[:, None] & (at[None, :] < D), other=0.0)
    if SCALED:
        q = q.to(tl.float16)

    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(tl.load(pos_ptr + first) - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    end = last + 1
    if SPLITS > 1:
        span = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK_N) * BLOCK_N
        begin = begin + split * span
        end = tl.minimum(begin + span, end)
    table = table_ptr + tl.load(row_ptr + first).to(tl.int64) * table_stride
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sink_ptr + head, mask=valid, other=0.0).to(tl.float32)
        peak = tl.where(split == 0, sink * 1.4426950408889634, peak)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    key_scale = tl.zeros([BLOCK_N], tl.float32)
    value_scale = tl.zeros([BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        known = cols < end
        # Behind the end, the last block: block 0 is that of padding, and may hold anything.
        block = tl.load(table + tl.minimum(cols, end - 1) // BS).to(tl.int64)
        cell = (block * BS + cols % BS) * HKV * D + kv_head * D
        full = known[:, None] & (at[None, :] < D)
        k = tl.load(key_ptr + cell[:, None] + at[None, :], mask=full, other=0.0)
        if SCALED:
            v = load_fp8_values(value_ptr, block, kv_head, cols, at, HKV, D, BS, ALIGNED)
            key_scale = load_fp8_scales(key_scale_ptr, block, kv_head, cols, HKV, BS, ALIGNED)
            value_scale = load_fp8_scales(value_scale_ptr, block, kv_head, cols, HKV, BS, ALIGNED)
            value_scale = tl.where(known, value_scale, 0.0)
        else:
            v = tl.load(value_ptr + cell[:, None] + at[None, :], mask=full, other=0.0)
        seen = known[None, :] & (cols[None, :] <= pos[:, None])
        if WINDOW > 0:
            seen = seen & (cols[None, :] > pos[:, None] - WINDOW)
        acc, peak, total = fold_tile(
            acc, peak, total, q, k, v, key_scale, value_scale, seen, scale, softcap, PRECISE, SOFTCAP, SCALED
        )
    written = valid[:, None] & (at[None, :] < D)
    if SPLITS > 1:
        line = (split * num_tokens + token) * H + head
        safe = tl.where(total > 0, total, 1.0)
        tl.store(part_ptr + line[:, None].to(tl.int64) * D + at[None, :], acc / safe[:, None], mask=written)
        tl.store(lse_ptr + line, tl.where(total > 0, peak + tl.log2(safe), float("-inf")), mask=valid)
    else:
        to = (token[:, None].to(tl.int64) * H + head[:, None]) * D + at[None, :]
        tl.store(out_ptr + to, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=written)


@triton.jit
def merge_splits_kernel(
    part_ptr, lse_ptr, out_ptr, num_lines,
    D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Join the partial results of split attention. One program per (token, head)."""
    line = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    at = tl.arange(0, WIDTH)
    lse = tl.load(lse_ptr + split * num_lines + line)
    weight = tl.exp2(lse - tl.max(lse, 0))
    where = (split[:, None] * num_lines + line).to(tl.int64) * D + at[None, :]
    part = tl.load(part_ptr + where, mask=at[None, :] < D, other=0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    out_at = line.to(tl.int64) * D + at
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=at < D)
