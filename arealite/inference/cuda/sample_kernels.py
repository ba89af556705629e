"""Triton kernels that sample from logits on the device and advance the state of the sequences.

They draw the same tokens as `cpu.sampler.sample`, in one pass over the logits per part of the vocabulary. Instead of
the maximum of logit + Gumbel noise they take the maximum of exp(logit) / exponential noise: the same order with one
logarithm less, and the log-sum-exp needs the exponentials anyway. Then the parts are joined and the device's tables
are written.
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
def _exponential(v, FAST: tl.constexpr):
    """-log(1 - v) for v in (0, 1), with a relative error below 1e-4.

    Where 1 - v has lost the digits of v, a series. FAST needs a GPU: its approximate logarithm, which is exact enough
    only away from 1.
    """
    rest = tl.maximum(1.0 - v, 5.9604644775390625e-08)
    if FAST:
        log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [rest], tl.float32, is_pure=True, pack=1)
        series = v * (1.0 + v * (0.5 + v * (0.3333333333 + v * 0.25)))
        noise = tl.where(v < 0.0625, series, -0.6931471805599453 * log2)
    else:
        noise = tl.where(v < 0.0009765625, v + 0.5 * v * v, -tl.log(rest))
    return noise


@triton.jit
def _quotient(a, b, FAST: tl.constexpr):
    if FAST:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], tl.float32, is_pure=True, pack=1)
        result = a * inverse
    else:
        result = a / b
    return result


@triton.jit
def threshold_kernel(
    logits_ptr, row_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, threshold_ptr, vocab_size,
    BLOCK: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """The smallest tempered logit that top-k, then top-p, then min-p keep. One program per sequence.

    Bisection over values instead of a sort: each halving is one pass over logits in the L2 cache.
    """
    line = tl.program_id(0)
    row = tl.load(row_ptr + line)
    given = tl.load(temperature_ptr + row)
    inverse = 1.0 / tl.where(given == 0.0, 1.0, given)
    top_k, top_p, min_p = (tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row))
    base = logits_ptr + line.to(tl.int64) * vocab_size
    at = tl.arange(0, BLOCK)
    threshold = float("-inf")
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        lowest = tl.full([BLOCK], float("inf"), tl.float32)
        for offset in range(0, vocab_size, BLOCK):
            inside = offset + at < vocab_size
            x = tl.load(base + offset + at, mask=inside, other=0.0).to(tl.float32) * inverse
            highest = tl.maximum(highest, tl.where(inside, x, float("-inf")))
            lowest = tl.minimum(lowest, tl.where(inside & (x > float("-inf")), x, float("inf")))
        peak, floor = tl.max(highest, 0), tl.min(lowest, 0)
        if min_p > 0.0:
            threshold = peak + tl.log(min_p)
        # Lower logits have no weight in float32. One logit far below must not coarsen the bisection of the others.
        near = tl.maximum(floor, peak - 110.0)
        cut_k = floor
        if top_k > 0:
            high = peak
            for step in range(HALVINGS + 1):
                middle = tl.where(step == 0, near, (cut_k + high) * 0.5)
                count = tl.zeros([BLOCK], tl.int32)
                for offset in range(0, vocab_size, BLOCK):
                    inside = offset + at < vocab_size
                    x = tl.load(base + offset + at, mask=inside, other=float("-inf")).to(tl.float32)
                    count += (inside & (x * inverse >= middle)).to(tl.int32)
                enough = tl.sum(count, 0) >= top_k
                cut_k = tl.where(enough, middle, cut_k)
                high = tl.where(enough, high, middle)
            threshold = tl.maximum(threshold, cut_k)
        if top_p < 1.0:
            cut_p, high, wanted = tl.maximum(cut_k, near), peak, 0.0
            for step in range(HALVINGS + 1):
                # The first pass measures the mass that top-k keeps.
                middle = tl.where(step == 0, cut_p, (cut_p + high) * 0.5)
                mass = tl.zeros([BLOCK], tl.float32)
                for offset in range(0, vocab_size, BLOCK):
                    inside = offset + at < vocab_size
                    x = tl.load(base + offset + at, mask=inside, other=float("-inf")).to(tl.float32)
                    x = x * inverse
                    mass += tl.where(inside & (x >= middle), tl.exp(x - peak), 0.0)
                total = tl.sum(mass, 0)
                wanted = tl.where(step == 0, total * top_p, wanted)
                cut_p = tl.where(total >= wanted, middle, cut_p)
                high = tl.where(total >= wanted, high, middle)
            threshold = tl.maximum(threshold, cut_p)
        threshold = tl.minimum(threshold, peak)
    tl.store(threshold_ptr + line, threshold)


@triton.jit
def sample_parts_kernel(
    logits_ptr, row_ptr, pos_ptr, temperature_ptr, seed_ptr, threshold_ptr,
    best_ptr, token_ptr, peak_ptr, total_ptr, vocab_size, part_size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, part of the vocabulary). For FAST see `_exponential`."""
    line, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_ptr + line)
    given = tl.load(temperature_ptr + row)
    greedy = given == 0.0
    inverse = 1.0 / tl.where(greedy, 1.0, given)
    # The token to sample follows the one just computed.
    pos = (tl.load(pos_ptr + line) + 1).to(tl.uint32)
    seed_low = tl.load(seed_ptr + row * 2).to(tl.uint32)
    seed_high = tl.load(seed_ptr + row * 2 + 1).to(tl.uint32)
    inner = _mix(pos + seed_high)
    key = _mix(seed_low ^ inner)
    low_key = inner * 0x9E3779B9 + seed_low
    threshold = tl.load(threshold_ptr + line)
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
        # Small v decide: 64 bits keep v exact near 0, and the series keeps -log(1 - v) exact there.
        low = bits * 0x9E3779B9 + low_key
        v = bits.to(tl.float32) * 2.3283064365386963e-10 + (low.to(tl.float32) + 0.5) * 5.421010862427522e-20
        score = tl.where(greedy, weight, _quotient(weight, _exponential(v, FAST), FAST))
        score = tl.where(x >= threshold, score, -1.0)
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
    # If all logits are NaN there is no token; the NaN log-prob shows it to the host.
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
    """Make the sampled token the next input of its sequence; padding rows stay as they are."""
    line = tl.program_id(0)
    row = tl.load(row_ptr + line)
    if row != dummy:
        tl.store(last_token_ptr + row, tl.load(out_token_ptr + line))
        tl.store(position_ptr + row, tl.load(position_ptr + row) + 1)


@triton.jit
def forbid_kernel(logits_ptr, line_ptr, bits_ptr, vocab_size, num_words, BLOCK: tl.constexpr):
    """Set the logits of tokens whose bit is 0 to -inf. Grid (masked lines, blocks of tokens)."""
    index = tl.program_id(0).to(tl.int64)
    line = tl.load(line_ptr + index).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    word = tl.load(bits_ptr + index * num_words + ids // 32, mask=inside, other=0)
    is_forbidden = inside & (((word >> (ids % 32)) & 1) == 0)
    tl.store(logits_ptr + line * vocab_size + ids, tl.full([BLOCK], float("-inf"), tl.float32), mask=is_forbidden)


# ------------------------------------------------------------------- for requests with extras (extras.py)

PENALIZED = tl.constexpr(1)  # bits of a slot's flags
RAW = tl.constexpr(2)
IN_PROMPT = tl.constexpr(16384)  # bit of a token's code; the bits below count it in the output


@triton.jit
def _penalize(x, code, repetition, frequency, presence):
    count = (code & (IN_PROMPT - 1)).to(tl.float32)
    x = tl.where(code != 0, tl.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * count - tl.where(count > 0, presence, 0.0)


@triton.jit
def _undo_penalty(x, code, repetition, frequency, presence):
    count = (code & (IN_PROMPT - 1)).to(tl.float32)
    x = x + frequency * count + tl.where(count > 0, presence, 0.0)
    return tl.where(code != 0, tl.where(x > 0, x * repetition, x / repetition), x)


@triton.jit
def penalty_kernel(
    logits_ptr, row_ptr, flags_ptr, code_ptr, penalty_ptr, peak_ptr, total_ptr, vocab_size, part_size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of the raw logits, then penalties in place. Grid (sequences, parts of the vocabulary)."""
    line, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_ptr + line).to(tl.int64)
    flags = tl.load(flags_ptr + row)
    if flags != 0:
        repetition = tl.load(penalty_ptr + row * 3)
        frequency = tl.load(penalty_ptr + row * 3 + 1)
        presence = tl.load(penalty_ptr + row * 3 + 2)
        total = tl.zeros([BLOCK], tl.float32)
        peak = float("-inf")
        start = part * part_size
        end = tl.minimum(start + part_size, vocab_size)
        base = logits_ptr + line.to(tl.int64) * vocab_size
        for offset in range(start, end, BLOCK):
            ids = offset + tl.arange(0, BLOCK)
            x = tl.load(base + ids, mask=ids < end, other=float("-inf"))
            higher = tl.maximum(peak, tl.max(x, 0))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(peak - anchor) + tl.exp(x - anchor)
            peak = higher
            if (flags & PENALIZED) != 0:
                code = tl.load(code_ptr + row * vocab_size + ids, mask=ids < end, other=0)
                x = _penalize(x, code.to(tl.int32), repetition, frequency, presence)
                tl.store(base + ids, x, mask=ids < end)
        tl.store(peak_ptr + line * PARTS + part, peak)
        tl.store(total_ptr + line * PARTS + part, tl.sum(total, 0))


@triton.jit
def bias_kernel(
    logits_ptr, row_ptr, num_bias_ptr, bias_id_ptr, bias_ptr, vocab_size, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the logit bias. One program per sequence."""
    line = tl.program_id(0)
    row = tl.load(row_ptr + line).to(tl.int64)
    count = tl.load(num_bias_ptr + row)
    base = logits_ptr + line.to(tl.int64) * vocab_size
    for offset in range(0, count, BLOCK):
        at = offset + tl.arange(0, BLOCK)
        inside = at < count
        ids = tl.load(bias_id_ptr + row * MOST + at, mask=inside, other=0)
        bias = tl.load(bias_ptr + row * MOST + at, mask=inside, other=0.0)
        x = tl.load(base + ids, mask=inside, other=0.0)
        tl.store(base + ids, x + bias, mask=inside)


@triton.jit
def ban_kernel(
    logits_ptr, row_ptr, pos_ptr, temperature_ptr, min_len_ptr, num_banned_ptr, banned_ptr, held_ptr, vocab_size,
    MOST: tl.constexpr,
):  # fmt: skip
    """Ban stop tokens below the minimum length; `held` keeps their log-sum-exp for the log-prob."""
    line = tl.program_id(0)
    row = tl.load(row_ptr + line).to(tl.int64)
    held = float("-inf")
    # The token to sample follows the one just computed.
    if tl.load(pos_ptr + line) + 1 < tl.load(min_len_ptr + row):
        given = tl.load(temperature_ptr + row)
        at = tl.arange(0, MOST)
        inside = at < tl.load(num_banned_ptr + row)
        ids = tl.load(banned_ptr + row * MOST + at, mask=inside, other=0)
        to = logits_ptr + line.to(tl.int64) * vocab_size + ids
        x = tl.load(to, mask=inside, other=float("-inf")) / tl.where(given == 0.0, 1.0, given)
        tl.store(to, tl.full([MOST], float("-inf"), tl.float32), mask=inside)
        peak = tl.max(x, 0)
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        held = anchor + tl.log(tl.sum(tl.exp(x - anchor), 0))
    tl.store(held_ptr + line, held)


@triton.jit
def finish_extras_kernel(
    logits_ptr, row_ptr, temperature_ptr, flags_ptr, code_ptr, penalty_ptr, num_bias_ptr, bias_id_ptr, bias_ptr,
    held_ptr, peak_ptr, total_ptr, out_token_ptr, out_logprob_ptr, out_raw_ptr, vocab_size,
    PARTS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """After sampling: add the banned tokens to the log-prob, compute the raw log-prob, count the token."""
    line = tl.program_id(0)
    row = tl.load(row_ptr + line).to(tl.int64)
    token = tl.load(out_token_ptr + line)
    x = tl.load(logits_ptr + line.to(tl.int64) * vocab_size + token)
    held = tl.load(held_ptr + line)
    if held > float("-inf"):
        given = tl.load(temperature_ptr + row)
        logprob = tl.load(out_logprob_ptr + line)
        excess = held - (x / tl.where(given == 0.0, 1.0, given) - logprob)
        grown = tl.maximum(excess, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(excess)))
        tl.store(out_logprob_ptr + line, logprob - grown)
    flags = tl.load(flags_ptr + row)
    if flags != 0:
        at_code = code_ptr + row * vocab_size + token
        code = 0
        if (flags & PENALIZED) != 0:
            code = tl.load(at_code).to(tl.int32)
            if (code & (IN_PROMPT - 1)) < IN_PROMPT - 1:
                tl.store(at_code, (code + 1).to(tl.int16))
        for offset in range(0, tl.load(num_bias_ptr + row), BLOCK):
            at = offset + tl.arange(0, BLOCK)
            inside = at < tl.load(num_bias_ptr + row)
            ids = tl.load(bias_id_ptr + row * MOST + at, mask=inside, other=-1)
            bias = tl.load(bias_ptr + row * MOST + at, mask=inside, other=0.0)
            x -= tl.sum(tl.where(ids == token, bias, 0.0), 0)
        repetition = tl.load(penalty_ptr + row * 3)
        frequency = tl.load(penalty_ptr + row * 3 + 1)
        presence = tl.load(penalty_ptr + row * 3 + 2)
        raw = _undo_penalty(x, code, repetition, frequency, presence)
        part = line * PARTS + tl.arange(0, PARTS)
        peak = tl.load(peak_ptr + part)
        high = tl.max(peak, 0)
        total = tl.sum(tl.load(total_ptr + part) * tl.exp(peak - high), 0)
        tl.store(out_raw_ptr + line, raw - high - tl.log(total))
