"""Triton kernels that sample from logits on the device and advance the state of the sequences.

The same draw as `sampler.sample` (Gumbel noise as a function of seed, position and token id), in one pass over the logits: maximum
of logit + noise, and log-sum-exp, per part of the vocabulary; then the parts are joined and the device's tables are written.
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
    temperature = tl.where(greedy, 1.0, given)
    # The token to sample stands one after the one just computed.
    pos = (tl.load(pos_ptr + line) + 1).to(tl.uint32)
    key = _mix(
        tl.load(seed_ptr + row * 2).to(tl.uint32)
        ^ _mix(pos + tl.load(seed_ptr + row * 2 + 1).to(tl.uint32))
    )
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    start = part * part_size
    end = tl.minimum(start + part_size, vocab_size)
    base = logits_ptr + line.to(tl.int64) * vocab_size
    for offset in range(start, end, BLOCK):
        ids = offset + tl.arange(0, BLOCK)
        x = tl.load(base + ids, mask=ids < end, other=float("-inf")).to(tl.float32) / temperature
        bits = _mix((ids.to(tl.uint32) * 0x9E3779B9) ^ key)
        uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
        noise = -tl.log(-tl.log(uniform))
        score = x + tl.where(greedy, 0.0, noise)
        token = tl.where(score > best, ids, token)
        best = tl.maximum(best, score)
        higher = tl.maximum(peak, x)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - anchor) + tl.exp(x - anchor)
        peak = higher
    top = tl.max(best, 0)
    at = line * PARTS + part
    tl.store(best_ptr + at, top)
    tl.store(token_ptr + at, tl.min(tl.where(best == top, token, 2147483647), 0))
    high = tl.max(peak, 0)
    tl.store(peak_ptr + at, high)
    safe = tl.where(high == float("-inf"), 0.0, high)
    tl.store(total_ptr + at, tl.sum(total * tl.exp(peak - safe), 0))


@triton.jit
def finish_sample_kernel(
    logits_ptr, row_ptr, temperature_ptr, best_ptr, token_ptr, peak_ptr, total_ptr,
    out_token_ptr, out_logprob_ptr, vocab_size, PARTS: tl.constexpr,
):  # fmt: skip
    """Join the parts: the token and its log-prob. One program per sequence."""
    line = tl.program_id(0)
    at = line * PARTS + tl.arange(0, PARTS)
    best = tl.load(best_ptr + at)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, tl.load(token_ptr + at), 2147483647), 0)
    peak = tl.load(peak_ptr + at)
    high = tl.max(peak, 0)
    total = tl.sum(tl.load(total_ptr + at) * tl.exp(peak - high), 0)
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
