"""Triton kernels that sample from logits on the device and advance the state of the sequences.

The same draw as `sampler.sample`, in one pass over the logits per part of the vocabulary. Where that one takes the maximum of logit + Gumbel noise,
this takes the maximum of exp(logit) / exponential noise: the same order with one logarithm less, and the exponentials are the
ones the log-sum-exp needs. Then the parts are joined and the device's tables are written.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def sample_parts_kernel(
    logits_ptr, row_ptr, pos_ptr, temperature_ptr, seed_ptr,
    best_ptr, token_ptr, peak_ptr, total_ptr, vocab_size, part_size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, part of the vocabulary)."""
    line, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_ptr + line)
    given = tl.load(temperature_ptr + row)
    greedy = given == 0.0
    inverse = 1.0 / tl.where(greedy, 1.0, given)
    # The token to sample stands one after the one just computed.
    pos = (tl.load(pos_ptr + line) + 1).to(tl.uint32)
    seed_low = tl.load(seed_ptr + row * 2).to(tl.uint32)
    seed_high = tl.load(seed_ptr + row * 2 + 1).to(tl.uint32)
    key = _mix(seed_low ^ _mix(pos + seed_high))
    best = tl.full([BLOCK], -1.0, tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    peak = float("-inf")
    start = part * part_size
    end = tl.minimum(start + part_size, vocab_size)
    base = logits_ptr + line.to(tl.int64) * vocab_size
    for offset in range(start, end, BLOCK):
        ids = offset + tl.arange(0, BLOCK)
        x = tl.load(base + ids, mask=ids < end, other=float("-inf")).to(tl.float32) * inverse
        higher = tl.maximum(peak, tl.max(x, 0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp(peak - anchor)
        weight = tl.exp(x - anchor)
        total = total * fade + weight
        bits = _mix((ids.to(tl.uint32) * 0x9E3779B9) ^ key)
        # (bits >> 9 + 0.5) / 2^23 by way of a float in [1, 2): conversions are slow on the device.
        uniform = (
            ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0 + 5.9604644775390625e-08
        )
        score = tl.where(greedy, weight, weight / -tl.log(uniform))
        best = best * fade
        token = tl.where(score > best, ids, token)
        best = tl.maximum(best, score)
        peak = higher
    top = tl.max(best, 0)
    at = line * PARTS + part
    tl.store(best_ptr + at, top)
    tl.store(token_ptr + at, tl.min(tl.where(best == top, token, 2147483647), 0))
    tl.store(peak_ptr + at, peak)
    tl.store(total_ptr + at, tl.sum(total, 0))


@triton.jit
def finish_sample_kernel(
    logits_ptr, row_ptr, temperature_ptr, best_ptr, token_ptr, peak_ptr, total_ptr,
    out_token_ptr, out_logprob_ptr, vocab_size, PARTS: tl.constexpr,
):  # fmt: skip
    """Join the parts: the token and its log-prob. One program per sequence."""
    line = tl.program_id(0)
    at = line * PARTS + tl.arange(0, PARTS)
    peak = tl.load(peak_ptr + at)
    high = tl.max(peak, 0)
    fade = tl.exp(peak - high)
    best = tl.load(best_ptr + at) * fade
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, tl.load(token_ptr + at), 2147483647), 0)
    total = tl.sum(tl.load(total_ptr + at) * fade, 0)
    # All logits NaN leave no token behind; the NaN log-prob tells the host.
    token = tl.where(token == 2147483647, 0, token)
    given = tl.load(temperature_ptr + tl.load(row_ptr + line))
    x = tl.load(logits_ptr + line.to(tl.int64) * vocab_size + token).to(tl.float32)
    x = x / tl.where(given == 0.0, 1.0, given)
    tl.store(out_token_ptr + line, token)
    tl.store(out_logprob_ptr + line, x - high - tl.log(total))


@triton.jit
def advance_kernel(
    row_ptr, out_token_ptr, last_token_ptr, position_ptr, dummy,
):  # fmt: skip
    """Make the sampled token the next input of its sequence; rows of padding stay where they are."""
    line = tl.program_id(0)
    row = tl.load(row_ptr + line)
    if row != dummy:
        tl.store(last_token_ptr + row, tl.load(out_token_ptr + line))
        tl.store(position_ptr + row, tl.load(position_ptr + row) + 1)
