"""Plans the sharing of prompts: the tokens of a group's common prompt are computed once.

The first row of a group is computed in full. Of the other rows only the tokens after the prompt are computed; their
queries attend to the first row's prompt and to themselves. This is exact, because causal attention makes the states of
the prompt independent of what follows. `micro_batches` makes a plan per micro-batch and `packed_attention` uses it.

N packed tokens, U computed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

# If fewer tokens than this share are saved, gathering keys and values costs more than sharing saves.
_MIN_SAVED_SHARE = 0.1


class Segment(NamedTuple):
    """Computed tokens of one row (`start`, `length` among U), and the shared tokens before them."""

    start: int
    length: int
    prefix_start: int
    prefix_length: int


@dataclass(frozen=True)
class PrefixPlan:
    """Which tokens are computed, and which computed token each packed token refers to."""

    # [U] packed token of each computed token.
    unique: torch.Tensor
    # [N] computed token of each packed token.
    expand: torch.Tensor
    segments: list[Segment]

    @property
    def lengths(self) -> list[int]:
        """Number of computed tokens of each row."""
        return [segment.length for segment in self.segments]

    def to(self, device: str | torch.device) -> PrefixPlan:
        return replace(self, unique=self.unique.to(device), expand=self.expand.to(device))

    def filled(self, missing: int) -> PrefixPlan:
        """Return a plan with `missing` more computed tokens at the end, as a sequence of their own."""
        size = len(self.unique)
        more = torch.arange(size, size + missing, device=self.unique.device)
        segments = [*self.segments, Segment(size, missing, 0, 0)]
        return PrefixPlan(torch.cat([self.unique, more]), torch.cat([self.expand, more]), segments)


def plan_piece(lengths: list[int], size: int, rank: int) -> tuple[PrefixPlan, int]:
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
    segments = [Segment(a, b - a, 0, 0) for a, b in pairwise([0, *inside.tolist(), length])]
    begin = (1 + hops) * length - before[rank]
    segments[0] = segments[0]._replace(prefix_start=begin, prefix_length=before[rank])
    table = torch.tensor(segments)
    expand = _ranges(table[:, [2, 0]].flatten(), table[:, [3, 1]].flatten())
    return PrefixPlan(torch.arange(length), expand, segments), hops


def plan_prefixes(
    input_ids: torch.Tensor, lengths: list[int], group_ids: list[int], num_prompt: list[int]
) -> PrefixPlan | None:
    """Return the plan for sharing prompts within groups, or None if it would save too little.

    `num_prompt[i]` tokens of row `i` come before its first trained token: only these may be shared.
    """
    ids = input_ids.numpy()
    starts = [0, *accumulate(lengths)]
    first, prefix = torch.tensor(_shared_lengths(ids, starts, group_ids, num_prompt)).T
    if int(prefix.sum()) < _MIN_SAVED_SHARE * starts[-1]:
        return None
    own = torch.tensor(lengths) - prefix
    own_start = own.cumsum(0) - own
    table = torch.stack([own_start, own, own_start[first], prefix], dim=1)
    return PrefixPlan(
        unique=_ranges(torch.tensor(starts[:-1]) + prefix, own),
        expand=_ranges(table[:, [2, 0]].flatten(), table[:, [3, 1]].flatten()),
        segments=[Segment(*row) for row in table.tolist()],
    )


def _ranges(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Concatenate the ranges `start, …, start + length - 1`."""
    offsets = lengths.cumsum(0) - lengths
    return (starts - offsets).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


def _shared_lengths(ids, starts, group_ids, num_prompt) -> list[tuple[int, int]]:
    """Return for each row the row whose prompt it shares and the number of shared tokens, or (row, 0)."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids):
        members.setdefault(group, []).append(row)
    shared = [(row, 0) for row in range(len(group_ids))]
    for rows in members.values():
        first, size = rows[0], min(num_prompt[row] for row in rows)
        # A row always computes at least one token of its own.
        size = min(size, *(starts[row + 1] - starts[row] - 1 for row in rows))
        prompt = ids[starts[first] : starts[first] + max(size, 0)].tobytes()
        for row in rows[1:]:
            if size > 0 and ids[starts[row] : starts[row] + size].tobytes() == prompt:
                shared[row] = (first, size)
    return shared
