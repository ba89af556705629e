"""Triton kernels of speculative decoding: look up drafts, keep the tokens that agree with them.

The tokens of a sequence stand in one line of `history`. A pass has W lines of tokens for each sequence: its last token
and W - 1 of a draft. Those that a shorter draft leaves are padding, in the slot `dummy`. A sequence that has no token
in this pass counts one of padding: attention knows no items without tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_PLACES = tl.constexpr(1 << 28)  # no sequence is longer


@triton.jit
def draft_kernel(
    row_ptr, line_ptr, position_ptr, room_ptr, history_ptr, history_stride,
    id_ptr, token_row_ptr, token_pos_ptr, first_ptr, count_ptr, dummy,
    W: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the last token and the draft of a sequence. One program per sequence.

    As `drafts.lookup.look_up`: prefers the longest of the n-grams with 3, 2 and 1 tokens that occurred before, and its
    latest occurrence.
    """
    item = tl.program_id(0)
    row = tl.load(row_ptr + item)
    pos = tl.load(position_ptr + row)
    most = tl.minimum(tl.load(room_ptr + row) - 1 - pos, W - 1)  # below 0 for padding and for sequences at their end
    history = history_ptr + tl.load(line_ptr + item).to(tl.int64) * history_stride
    last = tl.load(history + pos)
    before = tl.load(history + pos - 1, mask=pos >= 1, other=-1)
    first = tl.load(history + pos - 2, mask=pos >= 2, other=-1)
    best = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.where(most > 0, pos, 0), BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < pos
        one = inside & (tl.load(history + at, mask=inside, other=-1) == last)
        two = one & (tl.load(history + at - 1, mask=inside & (at >= 1), other=-2) == before)
        three = two & (tl.load(history + at - 2, mask=inside & (at >= 2), other=-2) == first)
        size = one.to(tl.int32) + two.to(tl.int32) + three.to(tl.int32)
        best = tl.maximum(best, tl.where(one, size * MAX_PLACES + at, 0))
    top = tl.max(best, 0)
    end = top % MAX_PLACES
    count = tl.where(top > 0, most, 0) + 1
    count = tl.where((row != dummy) & (most >= 0), count, 0)
    i = tl.arange(0, WIDTH)
    used = i < count
    # A draft that reaches the end of the text goes on with its own beginning.
    source = tl.where(i == 0, pos, end + 1 + (i - 1) % tl.maximum(pos - end, 1))
    to = item * W + i
    tl.store(id_ptr + to, tl.load(history + source, mask=used, other=0), mask=i < W)
    tl.store(token_row_ptr + to, tl.where(used, row, dummy), mask=i < W)
    tl.store(token_pos_ptr + to, tl.where(used, pos + i, 0), mask=i < W)
    tl.store(first_ptr + item, item * W)
    tl.store(count_ptr + item, tl.maximum(count, 1))


@triton.jit
def accept_kernel(
    line_ptr, last_token_ptr, position_ptr, history_ptr, history_stride,
    id_ptr, token_row_ptr, count_ptr, token_ptr, kept_ptr, start_ptr, drafted_ptr, dummy,
    W: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Keep sampled tokens up to the first that differs from its draft, and advance.

    One program per sequence. Writes the numbers of kept and of drafted tokens, and the position of the first.
    """
    item = tl.program_id(0)
    count = tl.load(count_ptr + item)
    row = tl.load(token_row_ptr + item * W)
    kept = 0
    start = 0
    if row != dummy:
        start = tl.load(position_ptr + row) + 1
        i = tl.arange(0, WIDTH)
        token = tl.load(token_ptr + item * W + i, mask=i < count, other=-1)
        draft = tl.load(id_ptr + item * W + i + 1, mask=i + 1 < count, other=-2)
        kept = tl.min(tl.where(token != draft, i, WIDTH), 0) + 1
        line = history_ptr + tl.load(line_ptr + item).to(tl.int64) * history_stride
        tl.store(line + start + i, token, mask=i < kept)
        tl.store(last_token_ptr + row, tl.sum(tl.where(i == kept - 1, token, 0), 0))
        tl.store(position_ptr + row, start + kept - 1)
    tl.store(kept_ptr + item, kept)
    tl.store(start_ptr + item, start)
    tl.store(drafted_ptr + item, count - 1)
