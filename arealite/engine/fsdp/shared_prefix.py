"""Plans the sharing of prefixes: tokens that rows of a micro-batch have in common are computed once.

Rows that begin with the same tokens form a tree: answers to one prompt, turns of a session, branches of an agent. Rows
are sorted so that each shares the most with the row before it, and a row computes only the tokens after this shared
prefix. Its queries attend to the path from the root (keys that earlier rows computed) and to themselves. This is exact,
because causal attention makes the states of a prefix independent of what follows. Trained tokens may be shared too:
results are copied to every row that has the token, so their gradients add up. `micro_batches` makes a plan per
micro-batch, `packed_attention` and `model` use it.

N packed tokens, U computed tokens, K keys of all segments, M computed tokens whose log-prob is requested.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

# A prefix is shared if it has this many tokens, or is this part of its row: attention is faster without a prefix.
_MIN_SHARED, _MIN_SHARED_PART = 16, 0.25


class Segment(NamedTuple):
    """Computed tokens `start, …, start + length - 1` of one row, after a prefix that others computed."""

    start: int
    length: int
    prefix_length: int


@dataclass(frozen=True)
class SegmentPlan:
    """Segments in order, and the keys that each attends to: those of its prefix, then its own."""

    segments: list[Segment]
    # [K] computed token of each key.
    keys: torch.Tensor

    @classmethod
    def of_rows(cls, lengths: list[int]) -> SegmentPlan:
        """Return the plan of rows that share nothing."""
        starts = [0, *accumulate(lengths)]
        segments = [Segment(start, length, 0) for start, length in zip(starts, lengths, strict=False) if length]
        return cls(segments, torch.arange(starts[-1]))

    def filled(self, missing: int) -> SegmentPlan:
        """Return a plan with `missing` more computed tokens at the end, as a row of their own."""
        size = sum(segment.length for segment in self.segments)
        more = torch.arange(size, size + missing, device=self.keys.device)
        return SegmentPlan([*self.segments, Segment(size, missing, 0)], torch.cat([self.keys, more]))


@dataclass(frozen=True)
class PrefixPlan:
    """Which tokens of a micro-batch are computed, and which computed token each packed token refers to."""

    # [U] packed token of each computed token.
    unique: torch.Tensor
    # [N] computed token of each packed token.
    expand: torch.Tensor
    # [M] computed tokens whose log-prob is requested in any row, and the computed tokens before them.
    targets: torch.Tensor
    before: torch.Tensor
    attention: SegmentPlan

    def to(self, device: str | torch.device) -> PrefixPlan:
        tensors = {name: getattr(self, name).to(device) for name in ("unique", "expand", "targets", "before")}
        attention = replace(self.attention, keys=self.attention.keys.to(device))
        return PrefixPlan(**tensors, attention=attention)


def plan_piece(lengths: list[int], size: int, rank: int) -> tuple[SegmentPlan, int]:
    """Return the plan of a ring rank's piece, and from how many earlier ranks it needs keys (`hops`).

    The first sequence of a piece may begin in earlier pieces: those tokens are its prefix. Keys are this rank's, then
    those of the `hops` ranks before it. `hops` is the same on all ranks.
    """
    ends = torch.tensor(lengths).cumsum(0)
    length = int(ends[-1]) // size
    cuts = torch.arange(size) * length
    begun = torch.cat([torch.zeros(1, dtype=torch.long), ends])
    # For each cut, the tokens before it that belong to the sequence it divides.
    before = (cuts - begun[torch.searchsorted(ends, cuts, right=True)]).tolist()
    hops = max(-(-count // length) for count in before)
    inside = ends[(ends > rank * length) & (ends < (rank + 1) * length)] - rank * length
    segments = [Segment(a, b - a, 0) for a, b in pairwise([0, *inside.tolist(), length])]
    segments[0] = segments[0]._replace(prefix_length=before[rank])
    end = (1 + hops) * length
    return SegmentPlan(segments, torch.cat([torch.arange(end - before[rank], end), torch.arange(length)])), hops


def plan_prefixes(input_ids: torch.Tensor, lengths: list[int], targets: torch.Tensor) -> PrefixPlan | None:
    """Return the plan for packed rows of `lengths`, or None if they share nothing.

    `targets` are the packed tokens whose log-prob is requested; no first token of a row is among them.
    """
    ids, starts = input_ids.numpy(), [0, *accumulate(lengths)]
    rows = [ids[a:b] for a, b in pairwise(starts)]
    order = sort_rows(rows)
    shared = shared_lengths([rows[row] for row in order])
    if not any(shared):
        return None
    unique, expand, keys, segments = [], [np.zeros(0, np.int64)] * len(rows), [], []
    path, size = np.zeros(0, np.int64), 0
    for row, prefix in zip(order, shared, strict=True):
        own = lengths[row] - prefix
        # The tokens of this row from the first to the last, each where it was computed.
        path = np.concatenate([path[:prefix], np.arange(size, size + own)])
        expand[row] = path
        if own:
            unique.append(np.arange(starts[row] + prefix, starts[row + 1]))
            keys.append(path)
            segments.append(Segment(size, own, prefix))
        size += own
    expanded = torch.from_numpy(np.concatenate(expand))
    wanted, before = (expanded[positions].numpy() for positions in (targets, targets - 1))
    # The first request for each computed token: numpy keeps the last of equal indices.
    first = np.full(size, -1)
    first[wanted[::-1]] = np.arange(len(wanted))[::-1]
    wanted = np.flatnonzero(first >= 0)
    plan = np.concatenate(unique), wanted, before[first[wanted]], np.concatenate(keys)
    computed, requested, earlier, attended = (torch.from_numpy(part) for part in plan)
    return PrefixPlan(computed, expanded, requested, earlier, SegmentPlan(segments, attended))


def sort_rows(rows: list[np.ndarray]) -> list[int]:
    """Return the order in which each row shares the most with the row before it.

    It is the descending order of their tokens: a row that another one continues comes later and computes nothing.
    """
    raw = np.concatenate(rows).astype(">u4").tobytes() if rows else b""
    keys = [raw[4 * a : 4 * b] for a, b in pairwise([0, *accumulate(map(len, rows))])]
    return sorted(range(len(rows)), key=keys.__getitem__, reverse=True)


def shared_lengths(rows: list[np.ndarray]) -> list[int]:
    """Return how many first tokens each row shares with the row before it; few count as none."""
    lengths = np.array([len(row) for row in rows], np.int64)
    width = int(lengths.max(initial=0))
    table = np.full((len(rows), width + 1), -1, np.int64)
    table[np.arange(width + 1) < lengths[:, None]] = np.concatenate(rows) if rows else []
    # The column after the shorter row's last token counts as a difference, also if both rows end there.
    differs = table[1:] != table[:-1]
    differs[np.arange(len(differs)), np.minimum(lengths[1:], lengths[:-1])] = True
    shared = differs.argmax(axis=1)
    shared[shared < np.minimum(_MIN_SHARED, _MIN_SHARED_PART * lengths[:-1])] = 0
    return [0, *shared.tolist()][: len(rows)]


def cut_sorted(lengths: list[int], saved: list[int], blocks: list[int], max_tokens: int, count: int = 0) -> list[int]:
    """Cut sorted rows into parts; return the first row of each.

    A row in the same part as the row before it saves `saved` of its tokens. There are at most `count` parts of nearly
    equal computed tokens, or more if `max_tokens` demands it; without `count` as few as possible, the first ones full.
    Rows of a block (`blocks` has the number of each row's block) stay together; a block with more than `max_tokens`
    is a part of its own.
    """
    starts = [row for row in range(len(lengths)) if row == 0 or blocks[row] != blocks[row - 1]]
    ranges = pairwise([*starts, len(lengths)])
    sizes = [(a, sum(lengths[a:b]) - sum(saved[a:b]), saved[a]) for a, b in ranges]
    cuts = _cut(sizes, max_tokens)
    if not count or len(cuts) == count == 1:
        return cuts
    low, high = 1, max_tokens
    count = max(count, len(cuts))
    while low < high:
        middle = (low + high) // 2
        found = _cut(sizes, middle)
        low, high, cuts = (low, middle, found) if len(found) <= count else (middle + 1, high, cuts)
    return cuts


def _cut(sizes: list[tuple[int, int, int]], max_tokens: int) -> list[int]:
    """Fill one part after the other; return the first row of each.

    `sizes` has the first row of each block, the tokens that it adds, and those that its first row saves.
    """
    cuts, filled = [], 0
    for start, added, saved in sizes:
        # A block that computes nothing fits always, also into a part that is too large.
        if not cuts or (added and filled + added > max_tokens):
            cuts.append(start)
            # The prefix of its first row is computed again.
            filled = saved
        filled += added
    return cuts
