"""Triton kernel of products of few tokens with a weight, divided over the inputs (split-K).

With few tokens a product takes as long as its weight is read, so that every multiprocessor must read a part of it.
Programs sum parts of the inputs, and the kernel that uses the product adds these sums (`functions.sum_parts`).

With EARLY a kernel may start while the one before it still runs (programmatic dependent launch): it waits for the
other's results, but not for its own launch. A kernel of such a chain lets the next one start at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from arealite.inference.cuda.group_kernels import product


@triton.jit
def split_product_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr, num_tokens, num_outputs, num_inputs, part_size,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_PART: tl.constexpr, BIASED: tl.constexpr,
    SCALED: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Products of `x` [M, K] and `weight` [N, K] over `part_size` inputs.

    Grid (N / BN, parts); M is at most BM.

    With IS_PART `out` is [parts, M, N] in float32, without bias; else [M, N]. With SCALED `x` and `weight` are in FP8,
    with scales [M] and [N].
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    rows = tl.arange(0, BM)
    has_row = rows[:, None] < num_tokens
    inner = tl.arange(0, BK)
    x_at = x_ptr + rows[:, None] * num_inputs + inner[None, :]
    weight_at = weight_ptr + cols[None, :] * num_inputs + inner[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(part * part_size, tl.minimum((part + 1) * part_size, num_inputs), BK):
        x = tl.load(x_at + start, mask=has_row, other=0.0)
        acc += product(x, tl.load(weight_at + start, eviction_policy="evict_first"), WIDEN)
    if SCALED:
        scale = tl.load(x_scale_ptr + rows, mask=rows < num_tokens, other=0.0)
        acc *= scale[:, None] * tl.load(weight_scale_ptr + cols)[None, :]
    place = rows[:, None] * num_outputs + cols[None, :]
    if IS_PART:
        tl.store(out_ptr + part * num_tokens * num_outputs + place, acc, mask=has_row)
    else:
        if BIASED:
            acc += tl.load(bias_ptr + cols)[None, :].to(tl.float32)
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=has_row)
