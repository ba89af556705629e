"""Computing a group's common prompt once: samples of one prompt differ only after it, so its tokens need one forward and backward pass.

The first row of a group runs whole; the others run only their own tokens, whose queries attend to the first row's prompt and to
themselves. Exact: causal attention makes the prompt's states independent of what follows. `FSDPEngine` plans it per micro-batch;
`packed_attention` carries it out.

N packed tokens, U tokens that are computed, b rows of a bucket, s their own tokens, p the shared ones before them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

# Below this share of tokens saved, gathering keys and values costs more than it brings.
_WORTHWHILE = 0.1


class Segment(NamedTuple):
    """Tokens of one row that are computed (`start`, `length` among U), and the shared ones it sees before them."""

    start: int
    length: int
    prefix_start: int
    prefix_length: int


@dataclass(frozen=True)
class PrefixPlan:
    unique: torch.Tensor  # [U] packed token that each computed one stands for
    expand: torch.Tensor  # [N] computed token that stands for each packed one
    segments: list[Segment]

    @property
    def lengths(self) -> list[int]:
        """Computed tokens of each row."""
        return [segment.length for segment in self.segments]

    def to(self, device: str | torch.device) -> PrefixPlan:
        return replace(self, unique=self.unique.to(device), expand=self.expand.to(device))

    def filled(self, missing: int) -> PrefixPlan:
        """With so many more computed tokens at the end, a sequence of their own."""
        size = len(self.unique)
        more = torch.arange(size, size + missing, device=self.unique.device)
        segments = [*self.segments, Segment(size, missing, 0, 0)] if missing else self.segments
        return PrefixPlan(torch.cat([self.unique, more]), torch.cat([self.expand, more]), segments)


def plan_piece(lengths: list[int], size: int, rank: int) -> tuple[PrefixPlan, int]:
    """A ring rank's piece of the packed tokens: its sequences, the first of which may have begun in earlier pieces.

    Keys are this rank's, then those of the `hops` ranks before it (the second result, the same on all ranks).
    """
    ends = torch.tensor(lengths).cumsum(0)
    length = int(ends[-1]) // size
    cuts = torch.arange(size) * length
    begun = torch.cat([torch.zeros(1, dtype=torch.long), ends])
    # tokens before each cut that belong to the sequence which it cuts
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
    """Which tokens need computing; None where sharing would save too little.

    `num_prompt[i]` tokens of row `i` come before its first trained one: only those may be shared.
    """
    ids = input_ids.numpy()
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    shared = _shared_lengths(ids, starts, group_ids, num_prompt)
    saved = sum(length for first, length in shared if first is not None)
    if saved < _WORTHWHILE * starts[-1]:
        return None
    prefix = torch.tensor([length for _, length in shared])
    own = torch.tensor(lengths) - prefix
    own_start = own.cumsum(0) - own
    firsts = torch.tensor(
        [row if first is None else first for row, (first, _) in enumerate(shared)]
    )
    prefix_start = own_start[firsts]
    table = torch.stack([own_start, own, prefix_start, prefix], dim=1)
    return PrefixPlan(
        unique=_ranges(torch.tensor(starts[:-1]) + prefix, own),
        expand=_ranges(table[:, [2, 0]].flatten(), table[:, [3, 1]].flatten()),
        segments=[Segment(*row) for row in table.tolist()],
    )


def _ranges(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The numbers `start, …, start + length - 1` of each pair, one after the other."""
    offsets = lengths.cumsum(0) - lengths
    return (starts - offsets).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


def _shared_lengths(ids, starts, group_ids, num_prompt) -> list[tuple[int | None, int]]:
    """For each row, the first row of its group and how many tokens it shares with it (None, 0 for that row itself)."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids):
        members.setdefault(group, []).append(row)
    shared: list[tuple[int | None, int]] = [(None, 0)] * len(group_ids)
    for rows in members.values():
        first, size = rows[0], min(num_prompt[row] for row in rows)
        # A row always computes at least one token of its own.
        size = min(size, *(starts[row + 1] - starts[row] - 1 for row in rows))
        prompt = ids[starts[first] : starts[first] + max(size, 0)].tobytes()
        for row in rows[1:]:
            if size > 0 and ids[starts[row] : starts[row] + size].tobytes() == prompt:
                shared[row] = (first, size)
    return shared


def varlen_kwargs(plan: PrefixPlan) -> dict:
    """What torch's variable-length attention needs: queries by segment, keys gathered as prefix and own tokens."""
    device = plan.unique.device
    table = torch.tensor(plan.segments)
    own, prefix = table[:, 1], table[:, 3]
    zero = torch.zeros(1, dtype=torch.long)
    return {
        "cu_seq_lens_q": torch.cat([zero, own.cumsum(0)]).int().to(device),
        "cu_seq_lens_k": torch.cat([zero, (own + prefix).cumsum(0)]).int().to(device),
        "max_length_q": int(own.max()),
        "max_length_k": int((own + prefix).max()),
        "kv_index": plan.expand,
    }


class _Bucket(NamedTuple):
    """Segments of similar size: which tokens of U are their queries `[b, s]` and keys `[b, p + s]` (any, for padding)."""

    queries: torch.Tensor
    real: torch.Tensor  # [b, s] not padding
    keys: torch.Tensor
    age: (
        torch.Tensor
    )  # [b or 1, s, p + s] position of the query minus that of the key; -1 where it must not look
    causal: bool  # no prefix: plain causal attention needs no mask


class SharedLayout:
    """The plan as buckets for SDPA, for devices without variable-length attention."""

    def __init__(self, plan: PrefixPlan):
        self.buckets = [_make_bucket(group) for group in _group_by_size(plan.segments)]
        slots = torch.empty(len(plan.unique), dtype=torch.long)
        offset = 0
        for bucket in self.buckets:
            tokens, real = bucket.queries, bucket.real
            numbers = torch.arange(offset, offset + real.numel()).view(real.shape)
            slots[tokens[real]] = numbers[real]
            offset += real.numel()
        self.slots = slots  # where each computed token's result lies

    def attend(self, query, key, value, scaling, window) -> torch.Tensor:
        """Heads `[U, heads, D]` in and out."""
        outs = []
        for bucket in self.buckets:
            q, k, v = (
                _gather(query, bucket.queries),
                *(_gather(x, bucket.keys) for x in (key, value)),
            )
            mask = None
            if not bucket.causal or window is not None:
                mask = (
                    bucket.age >= 0 if window is None else (bucket.age >= 0) & (bucket.age < window)
                )
                mask = mask[:, None]
            gqa = q.shape[1] != k.shape[1]
            out = sdpa(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
            )
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).index_select(0, self.slots)


def _group_by_size(segments: list[Segment]) -> list[list[Segment]]:
    """Similar segments together: a bucket ends where padding would waste a quarter of it."""
    order = sorted(segments, key=lambda s: (s.prefix_length > 0, -s.length, -s.prefix_length))
    groups: list[list[Segment]] = []
    for segment in order:
        if groups:
            head, widest = groups[-1][0], max(s.prefix_length for s in groups[-1])
            same_kind = (segment.prefix_length > 0) == (head.prefix_length > 0)
            size = segment.length + segment.prefix_length
            padded = head.length + max(widest, segment.prefix_length)
            if same_kind and size >= 0.75 * padded - 4:
                groups[-1].append(segment)
                continue
        groups.append([segment])
    return groups


def _make_bucket(segments: list[Segment]) -> _Bucket:
    table = torch.tensor(segments)  # [b, 4]
    start, length, prefix_start, prefix = (table[:, i : i + 1] for i in range(4))
    own, shared = torch.arange(int(length.max())), torch.arange(int(prefix.max()))
    real = own < length
    queries = torch.where(real, start + own, 0)
    keys = torch.cat([torch.where(shared < prefix, prefix_start + shared, 0), queries], dim=1)
    if len({(s.length, s.prefix_length) for s in segments}) == 1:
        length, prefix = length[:1], prefix[:1]  # one mask for all rows
    position = prefix + own
    age_shared = torch.where((shared < prefix)[:, None], position[:, :, None] - shared, -1)
    age_own = own[:, None] - own
    # Padding looks at itself, so that no row of the softmax is empty.
    blind = (own >= length)[:, None] & (age_own != 0)
    age = torch.cat([age_shared, torch.where(blind, -1, age_own)], dim=2)
    return _Bucket(queries, real, keys, age, causal=not len(shared))


def _gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of `x [U, heads, D]` as `[b, heads, t, D]`; its gradient adds up rows that are used more than once."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
