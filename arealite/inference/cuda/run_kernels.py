"""Triton kernels of decode attention for long contexts: work divided into runs of equal length.

Attention of a step reads keys and values of all sequences once, so its time is that of the memory if every
multiprocessor reads the same amount. The tiles (BLOCK_N tokens of one sequence and one KV head) of all sequences stand
in one line, and each program of a fixed grid takes a run of this line, over the ends of sequences. So a few long
sequences among short ones, or one sequence alone, keep the whole device busy. A sequence that lies inside one run is
written at once, the parts of others are joined by a second kernel.

Legend: N tokens, H query heads, HKV KV heads, G = H / HKV, D head size, BS tokens per block. An item is a group of
consecutive tokens of one sequence: one token, or a token with its draft.
"""

from __future__ import annotations

import triton
import triton.language as tl

from arealite.inference.cuda.functions import load_fp8_scales, load_fp8_values
from arealite.inference.cuda.kernels import fold_tile


@triton.jit
def plan_runs_kernel(
    pos_ptr, first_ptr, count_ptr, begin_ptr, run_ptr, num_items, num_runs, min_tiles,
    HKV: tl.constexpr, BLOCK_N: tl.constexpr, ITEMS: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Divide the tiles of all items into runs. One program per run.

    Writes the number of tiles before each item to `begin` (and after the last, the number of all), and length, first
    item, first KV head and first tile of each run to `run`.
    """
    run = tl.program_id(0)
    item = tl.arange(0, ITEMS)
    inside = item < num_items
    if DECODE:
        last = item
    else:
        count = tl.load(count_ptr + item, mask=inside, other=0)
        inside = inside & (count > 0)
        last = tl.load(first_ptr + item, mask=inside, other=0) + count - 1
    length = tl.load(pos_ptr + last, mask=inside, other=-1) + 1
    tiles = (length + BLOCK_N - 1) // BLOCK_N
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    size = tl.maximum(tl.cdiv(total * HKV, num_runs), min_tiles)
    if run == 0:
        tl.store(begin_ptr + item, ends - tiles, mask=item < num_items)
        tl.store(begin_ptr + num_items, total)
    start = run * size
    mine = (ends - tiles) * HKV <= start
    mine = mine & (ends * HKV > start)
    own = tl.sum(tl.where(mine, tiles, 0), 0)
    offset = start - tl.sum(tl.where(mine, ends - tiles, 0), 0) * HKV
    length_of_run = tl.minimum(size, total * HKV - start)
    tl.store(run_ptr + run * 4, tl.maximum(length_of_run, 0))
    tl.store(run_ptr + run * 4 + 1, tl.sum(tl.where(mine, item, 0), 0))
    tl.store(run_ptr + run * 4 + 2, offset // tl.maximum(own, 1))
    tl.store(run_ptr + run * 4 + 3, offset % tl.maximum(own, 1))


@triton.jit
def attend_runs_kernel(
    q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, out_ptr, part_ptr, lse_ptr,
    row_ptr, pos_ptr, table_ptr, first_ptr, count_ptr, run_ptr,
    table_stride, token_stride, head_stride, block_stride, cell_stride, kv_stride, scale, softcap,
    H: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BS: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    DECODE: tl.constexpr, PRECISE: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Attention over one run of tiles. Grid (runs,).

    Row m of an item is its token m // G and the query head m % G of the KV head. `scale` and `softcap` include
    log2(e). With SCALED, keys and values are in FP8, each times the scale of its token and head.
    """
    run = tl.program_id(0)
    left = tl.load(run_ptr + run * 4)
    item = tl.load(run_ptr + run * 4 + 1)
    kv_head = tl.load(run_ptr + run * 4 + 2)
    tile = tl.load(run_ptr + run * 4 + 3)
    m = tl.arange(0, BLOCK_M)
    at = tl.arange(0, WIDTH)
    while left > 0:
        if DECODE:
            first, count = item, 1
        else:
            first, count = tl.load(first_ptr + item), tl.load(count_ptr + item)
        token = first + m // G
        head = kv_head * G + m % G
        valid = m < count * G
        pos = tl.load(pos_ptr + token, mask=valid, other=0)
        length = tl.load(pos_ptr + first + count - 1) + 1
        q_at = token[:, None].to(tl.int64) * token_stride + head[:, None] * head_stride + at[None, :]
        q = tl.load(q_ptr + q_at, mask=valid[:, None] & (at[None, :] < D), other=0.0)
        if SCALED:
            q = q.to(tl.float16)
        num_tiles = tl.cdiv(length, BLOCK_N)
        taken = tl.minimum(num_tiles - tile, left)
        table = table_ptr + tl.load(row_ptr + first).to(tl.int64) * table_stride
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        # Blocks are looked up a tile ahead: tiles overlap only if no load depends on one of the same iteration.
        within = tl.arange(0, BLOCK_N)
        key_scale = tl.zeros([BLOCK_N], tl.float32)
        value_scale = tl.zeros([BLOCK_N], tl.float32)
        if BS % BLOCK_N == 0:  # one block holds a tile
            block = tl.load(table + tile * BLOCK_N // BS)
        else:
            # Behind the end, the last block: block 0 is that of padding, and may hold anything.
            block = tl.load(table + tl.minimum(tile * BLOCK_N + within, length - 1) // BS)
        for i in tl.range(tile, tile + taken, num_stages=STAGES):
            cols = i * BLOCK_N + within
            known = cols < length
            wide = block.to(tl.int64)
            ahead = cols + BLOCK_N
            if BS % BLOCK_N == 0:
                place = wide * block_stride + kv_head * kv_stride
                cell = (i * BLOCK_N % BS + within) * cell_stride
                block = tl.load(table + tl.minimum((i + 1) * BLOCK_N, length - 1) // BS)
            else:
                place = 0
                cell = wide * block_stride + cols % BS * cell_stride + kv_head * kv_stride
                block = tl.load(table + tl.minimum(ahead, length - 1) // BS)
            full = known[:, None] & (at[None, :] < D)
            k = tl.load(key_ptr + place + cell[:, None] + at[None, :], mask=full, other=0.0)
            if SCALED:
                v = load_fp8_values(value_ptr, wide, kv_head, cols, at, HKV, D, BS, ALIGNED)
                key_scale = load_fp8_scales(key_scale_ptr, wide, kv_head, cols, HKV, BS, ALIGNED)
                value_scale = load_fp8_scales(value_scale_ptr, wide, kv_head, cols, HKV, BS, ALIGNED)
                value_scale = tl.where(known, value_scale, 0.0)
            else:
                v = tl.load(value_ptr + place + cell[:, None] + at[None, :], mask=full, other=0.0)
            seen = known[None, :] & (cols[None, :] <= pos[:, None])
            acc, peak, total = fold_tile(
                acc, peak, total, q, k, v, key_scale, value_scale, seen, scale, softcap, PRECISE, SOFTCAP, SCALED
            )
        written = valid[:, None] & (at[None, :] < D)
        if taken == num_tiles:
            to = (token[:, None].to(tl.int64) * H + head[:, None]) * D + at[None, :]
            tl.store(out_ptr + to, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=written)
        else:
            # At most two items of a run are not whole: one that began before it, one that begins in it.
            line = (run * 2 + tl.where(tile == 0, 1, 0)) * ROWS + m
            safe = tl.where(total > 0, total, 1.0)
            tl.store(part_ptr + line[:, None].to(tl.int64) * D + at[None, :], acc / safe[:, None], mask=written)
            tl.store(lse_ptr + line, tl.where(total > 0, peak + tl.log2(safe), float("-inf")), mask=valid)
        left -= taken
        tile = 0
        kv_head += 1
        item = tl.where(kv_head == HKV, item + 1, item)
        kv_head = tl.where(kv_head == HKV, 0, kv_head)


@triton.jit
def merge_runs_kernel(
    part_ptr, lse_ptr, out_ptr, first_ptr, count_ptr, begin_ptr, run_ptr,
    H: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Join the parts of the items that lie in several runs. Grid (items, HKV * ROWS)."""
    item = tl.program_id(0)
    kv_head, m = tl.program_id(1) // ROWS, tl.program_id(1) % ROWS
    if DECODE:
        first, count = item, 1
    else:
        first, count = tl.load(first_ptr + item), tl.load(count_ptr + item)
    size = tl.load(run_ptr)  # of the first run: no other is longer
    before = tl.load(begin_ptr + item)
    num_tiles = tl.load(begin_ptr + item + 1) - before
    start = before * HKV + kv_head * num_tiles
    head_run = start // tl.maximum(size, 1)
    last_run = (start + num_tiles - 1) // tl.maximum(size, 1)
    if (head_run < last_run) & (m < count * G):
        at = tl.arange(0, WIDTH)
        peak = float("-inf")
        total = 0.0
        acc = tl.zeros([WIDTH], tl.float32)
        for begin in range(head_run, last_run + 1, SPLITS):
            run = begin + tl.arange(0, SPLITS)
            inside = run <= last_run
            line = (run * 2 + (run == head_run).to(tl.int32)) * ROWS + m
            lse = tl.load(lse_ptr + line, mask=inside, other=float("-inf"))
            higher = tl.maximum(peak, tl.max(lse, 0))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(lse - anchor)
            full = inside[:, None] & (at[None, :] < D)
            part = tl.load(part_ptr + line[:, None].to(tl.int64) * D + at[None, :], mask=full, other=0.0)
            fade = tl.exp2(peak - anchor)
            acc = acc * fade + tl.sum(part * weight[:, None], 0)
            total = total * fade + tl.sum(weight, 0)
            peak = higher
        to = ((first + m // G).to(tl.int64) * H + kv_head * G + m % G) * D + at
        tl.store(out_ptr + to, (acc / total).to(out_ptr.dtype.element_ty), mask=at < D)
