"""Divides packed tokens over context-parallel ranks.

Ranks that trade heads get one range of tokens each: attention is divided by heads, so all have the same work. In a ring
each rank attends with its own tokens, and a later token of a sequence has more keys. If equal ranges would give ranks
too different work, each rank gets two shorter ones, one with much work and one with little: for one long sequence an
early and a late one (zig-zag). Used by `PackedModel` and `PackedLayout`.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from arealite.engine.fsdp.shared_prefix import Segment, SegmentPlan, plan_piece

# Equal ranges are kept if no rank has more than this times the mean work: they need keys of fewer ranks.
_MAX_IMBALANCE = 1.2


@dataclass(frozen=True)
class Piece:
    """The packed tokens that one rank computes, as ranges in their order."""

    ranges: tuple[range, ...]

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return the rows of this piece of `values`, which has a row for each packed token."""
        parts = [values[part.start : part.stop] for part in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rows(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of `tokens` in this piece, and which of the tokens are in it."""
        rows, first = torch.full_like(tokens, -1), 0
        for part in self.ranges:
            inside = (tokens >= part.start) & (tokens < part.stop)
            rows = torch.where(inside, tokens - part.start + first, rows)
            first += len(part)
        kept = (rows >= 0).nonzero(as_tuple=True)[0]
        return rows[kept], kept


def piece_multiple(size: int, ring: bool) -> int:
    """Return what the number of packed tokens must be a multiple of: two ranges of each rank in a ring."""
    return 2 * size if ring else size


def piece_of(lengths: list[int], group: dist.ProcessGroup, ring: bool) -> Piece:
    """Return this rank's piece of packed sequences of `lengths`."""
    return _piece(lengths, dist.get_world_size(group), dist.get_rank(group), ring)


def _piece(lengths: list[int], size: int, rank: int, ring: bool) -> Piece:
    if ring and is_uneven(lengths, size):
        length = sum(lengths) // (2 * size)
        return Piece(tuple(range(i * length, (i + 1) * length) for i in _pairs(lengths, size)[rank]))
    length = sum(lengths) // size
    return Piece((range(rank * length, (rank + 1) * length),))


def is_uneven(lengths: list[int], size: int) -> bool:
    """Return whether equal ranges would give the ranks of a ring too different work."""
    work = _work(lengths, size)
    return bool(work.max() > _MAX_IMBALANCE * work.mean())


def _pairs(lengths: list[int], size: int) -> list[list[int]]:
    """Return which two of `2 · size` equal ranges each rank gets.

    The ones with most and least work go together, then those with second most and second least, and so on.
    """
    order = _work(lengths, 2 * size).argsort(stable=True).tolist()
    return [sorted((order[rank], order[-1 - rank])) for rank in range(size)]


def _work(lengths: list[int], count: int) -> torch.Tensor:
    """Return how many keys the tokens of each of `count` equal ranges attend to."""
    ends, zero = torch.tensor(lengths).cumsum(0), torch.zeros(1, dtype=torch.long)
    cuts = torch.arange(count + 1) * (int(ends[-1]) // count)
    # Sequences that end before a cut, and the tokens of the next one before it.
    done = torch.searchsorted(ends, cuts, right=True)
    part = cuts - torch.cat([zero, ends])[done]
    sizes = torch.tensor(lengths)
    whole = torch.cat([zero, (sizes * (sizes + 1) // 2).cumsum(0)])
    return (whole[done] + part * (part + 1) // 2).diff().double()


def plan_ring(lengths: list[int], size: int, rank: int) -> tuple[SegmentPlan, int]:
    """Return the plan of a ring rank's piece, and from how many other ranks it needs keys (`hops`).

    Keys are this rank's, then those of the ranks after it: of all with two ranges. See `plan_piece` for one range.
    """
    piece = _piece(lengths, size, rank, ring=True)
    if len(piece.ranges) == 1:
        return plan_piece(lengths, size, rank)
    length = len(piece.ranges[0])
    # Where each range lies among the keys of this rank and of the ranks after it.
    place = torch.empty(2 * size, dtype=torch.long)
    for owner, pair in enumerate(_pairs(lengths, size)):
        place[pair] = (owner - rank) % size * 2 * length + torch.tensor([0, length])
    segments, keys, row = [], [], 0
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for part in piece.ranges:
        for begin, end in pairwise(starts):
            first, last = max(begin, part.start), min(end, part.stop)
            if first < last:
                segments.append(Segment(row, last - first, first - begin))
                tokens = torch.arange(begin, last)
                keys.append(place[tokens // length] + tokens % length)
                row += last - first
    return SegmentPlan(segments, torch.cat(keys)), size - 1
