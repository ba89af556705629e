"""Causal attention over packed sequences, registered with transformers' interfaces.

`PackedLayout` describes the sequences of one micro-batch. It is made once per micro-batch and passed down through the
model's forward pass as the keyword argument `packed_layout`. On CUDA it runs `varlen`. CPU builds have no such kernel,
and it has neither attention sinks nor float32: there, sequences of similar length are gathered into a few padded
buckets and run through SDPA. Padding follows the real tokens, so causal attention over a bucket is exact.

N packed tokens, U computed tokens (fewer than N with shared prefixes), D head size, b rows of a bucket, s tokens of a
row, p tokens of the shared prefix before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, AttentionMaskInterface

from arealite.api.errors import ConfigError
from arealite.engine.fsdp.parallel import heads_to_tokens, tokens_to_heads, with_earlier_pieces
from arealite.engine.fsdp.ring import plan_ring
from arealite.engine.fsdp.shared_prefix import Segment, SegmentPlan
from arealite.engine.fsdp.varlen import Varlen

ATTENTION = "arealite_packed"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: heads `[1, heads, N, D]` in, `[1, N, heads, D]` out.

    Attention dropout is not applied.
    """
    if packed_layout is None:
        raise ConfigError(
            f"{type(module).__name__} does not pass packed_layout to its attention: it cannot be trained on packed "
            "sequences"
        )
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return packed_layout.attend(query, key, value, scaling, sliding_window, s_aux).unsqueeze(0), None


@dataclass
class PackedLayout:
    """The sequences of a packed micro-batch, and attention over them.

    With a context group each rank passes its piece of the tokens and gets attention for that piece. In between, ranks
    either trade tokens for heads (all tokens, a share of the heads), or fetch the keys and values of `ring_hops`
    earlier ranks (own tokens, all heads).
    """

    # Attention over the tokens of one rank: heads `[U, heads, D]` in and out.
    kernel: Varlen | Buckets
    context_group: dist.ProcessGroup | None = None
    ring_hops: int | None = None
    # Recorded experts of this rank's tokens, [layers with experts, tokens, experts of a token]; see `routing`.
    routed_experts: Tensor | None = None
    # Which of this rank's tokens are of the batch, not added to make shares equal; None: all.
    real_tokens: Tensor | None = None

    @classmethod
    def make(
        cls,
        cu_seqlens: Tensor,
        lengths: list[int],
        plan: SegmentPlan | None = None,
        context_group: dist.ProcessGroup | None = None,
        ring: bool = False,
        one_graph: bool = False,
        padded: bool = False,
    ) -> PackedLayout:
        """Describe sequences of `lengths`; with a context group, those of all its ranks.

        `plan` has the segments of sequences that share prefixes. `one_graph` gives all micro-batches on CUDA the same
        fields, so that layers are compiled once. `padded`: variable-length attention lacks what the model needs.
        """
        hops = None
        if context_group is not None and ring:
            assert plan is None, "a ring computes every sequence in full"
            size, rank = dist.get_world_size(context_group), dist.get_rank(context_group)
            plan, hops = plan_ring(lengths, size, rank)
        if not cu_seqlens.is_cuda or padded:
            kernel = Buckets(plan or SegmentPlan.of_rows(lengths), cu_seqlens.device)
        elif plan is not None:
            kernel = Varlen.of_segments(plan, cu_seqlens.device, one_graph)
        else:
            kernel = Varlen.of_rows(cu_seqlens, lengths, one_graph)
        return cls(kernel, context_group, hops)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return causal attention for heads `[U, heads, D]` of this rank's tokens, with `sinks [heads]`."""
        group = self.context_group
        if group is not None and self.ring_hops is None:
            query, key, value = (tokens_to_heads(x, group) for x in (query, key, value))
            sinks = None if sinks is None else sinks.chunk(dist.get_world_size(group))[dist.get_rank(group)]
            return heads_to_tokens(self.kernel.attend(query, key, value, scaling, window, sinks), group)
        if group is not None:
            # Heads of keys and values may differ in size (DeepSeek-V3).
            pair = torch.cat([key, value], dim=-1)
            # torch.compiler.disable loses the signature.
            both = with_earlier_pieces(pair, self.ring_hops, group)  # pyright: ignore[reportCallIssue]
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        return self.kernel.attend(query, key, value, scaling, window, sinks)


class Buckets:
    """Attention on CPU, with sinks or in float32: SDPA over padded buckets of segments of similar size."""

    def __init__(self, plan: SegmentPlan, device: torch.device | str = "cpu"):
        ends = accumulate(segment.prefix_length + segment.length for segment in plan.segments)
        keys_of = dict(zip(plan.segments, plan.keys.tensor_split(list(ends)[:-1]), strict=True))
        self.buckets = [_Bucket(group, [keys_of[s] for s in group], device) for group in _group_by_size(plan.segments)]
        self.queries = torch.cat([bucket.queries.flatten() for bucket in self.buckets])
        self.keys = torch.cat([bucket.keys.flatten() for bucket in self.buckets])
        real = torch.cat([bucket.real.flatten() for bucket in self.buckets])
        self.pads = ~real
        # Row of the buckets in which each computed token lies.
        self.slots = torch.empty(int(real.sum()), dtype=torch.long)
        self.slots[self.queries[real]] = real.nonzero().flatten()
        self.in_place = torch.equal(self.queries, torch.arange(len(self.slots)))
        self.has_prefixes = len(self.keys) > len(self.queries)
        tensors = (self.queries, self.keys, self.pads, self.slots)
        self.queries, self.keys, self.pads, self.slots = (x.to(device, non_blocking=True) for x in tensors)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Keys and values may have more rows than queries: those of prefixes that earlier ranks computed."""
        if self.has_prefixes or len(key) > len(query):
            key, value = (x.index_select(0, self.keys) for x in (key, value))
        elif not self.in_place:
            key, value = (_Move.apply(x, self.queries, self.slots, None) for x in (key, value))
        if not self.in_place:
            query = _Move.apply(query, self.queries, self.slots, None)
        queries = query.split([bucket.queries.numel() for bucket in self.buckets])
        keys, values = (x.split([b.keys.numel() for b in self.buckets]) for x in (key, value))
        parts = zip(self.buckets, queries, keys, values, strict=True)
        outs = [bucket.attend(q, k, v, scaling, window, sinks) for bucket, q, k, v in parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self.in_place else _Move.apply(out, self.slots, self.queries, self.pads)


class _Bucket:
    """Rows of similar size: tokens of their queries `[b, s]` and keys `[b, p + s]`."""

    def __init__(self, segments: list[Segment], keys: list[Tensor], device: torch.device | str):
        self.device = device
        start, length, self.prefix = torch.tensor(segments).T[:, :, None]
        self.own, self.shared = torch.arange(int(length.max())), torch.arange(int(self.prefix.max()))
        self.real = self.own < length
        self.queries = torch.where(self.real, start + self.own, 0)
        shared = torch.zeros(len(segments), len(self.shared), dtype=torch.long)
        for row, path, segment in zip(shared, keys, segments, strict=True):
            row[: segment.prefix_length] = path[: segment.prefix_length]
        self.keys = torch.cat([shared, self.queries], dim=1)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, query, key, value, scaling, window, sinks) -> Tensor:
        q = query.unflatten(0, self.queries.shape).transpose(1, 2)
        k, v = (x.unflatten(0, self.keys.shape).transpose(1, 2) for x in (key, value))
        if sinks is not None:
            return self._attend_with_sinks(q, k, v, q.shape[-1] ** -0.5 if scaling is None else scaling, window, sinks)
        mask, gqa = self._mask(window), q.shape[1] != k.shape[1]
        out = sdpa(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2).flatten(0, 1)

    def _attend_with_sinks(self, q, k, v, scale: float, window: int | None, sinks: Tensor) -> Tensor:
        """A sink is one more key with the score `sinks[head]` and the value 0.

        It has entries of its own in the head dimension, so that its score is a product like all others.
        """
        mask, size = self._mask(window, is_needed=True), v.shape[-1]
        assert mask is not None
        # As many entries more as keep the alignment that kernels need.
        extra = 8 if q.is_cuda else 1
        scores = (sinks.to(q.dtype) / scale)[None, :, None, None].expand(*q.shape[:3], 1)
        q = torch.cat([q, scores, q.new_zeros(*q.shape[:3], extra - 1)], dim=-1)
        key = k.new_zeros(*k.shape[:2], 1, k.shape[3] + extra)
        key[..., k.shape[3]] = 1.0
        k = torch.cat([key, pad(k, (0, extra))], dim=2)
        v = pad(v, (0, q.shape[-1] - size, 1, 0))
        groups = q.shape[1] // k.shape[1]
        # The kernels that take masks want as many key heads as query heads.
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        out = sdpa(q, k, v, attn_mask=pad(mask, (1, 0), value=True), scale=scale)
        return out[..., :size].transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None, is_needed: bool = False) -> Tensor | None:
        """Return which keys a query sees, `[b or 1, 1, s, p + s]`, or None for plain causal attention.

        Plain causal attention is correct without prefixes and windows: padding comes last and only padding sees it.
        """
        if not is_needed and not len(self.shared) and (window is None or window >= len(self.own)):
            return None
        if window not in self._masks:
            prefix = self.prefix[:1] if bool((self.prefix == self.prefix[0]).all()) else self.prefix
            ages = (prefix + self.own)[:, :, None] - self.shared
            ages = torch.where((self.shared < prefix)[:, None], ages, -1)
            own = (self.own[:, None] - self.own).expand(len(prefix), -1, -1)
            # Position of the query minus position of the key.
            age = torch.cat([ages, own], dim=2)
            seen = age >= 0 if window is None else (age >= 0) & (age < window)
            self._masks[window] = seen[:, None].to(self.device)
        return self._masks[window]


def _group_by_size(segments: list[Segment]) -> list[list[Segment]]:
    """Group similar segments; a new bucket begins where padding would waste a quarter of the current one."""
    order = sorted(segments, key=lambda s: (s.prefix_length > 0, -s.length, -s.prefix_length))
    groups: list[list[Segment]] = []
    widest = 0  # prefix of the last group
    for segment in order:
        if groups:
            head, wider = groups[-1][0], max(widest, segment.prefix_length)
            same_kind = (segment.prefix_length > 0) == (head.prefix_length > 0)
            size = segment.length + segment.prefix_length
            if same_kind and size >= 0.75 * (head.length + wider) - 4:
                groups[-1].append(segment)
                widest = wider
                continue
        groups.append([segment])
        widest = segment.prefix_length
    return groups


class _Move(torch.autograd.Function):
    """Select rows by `index` with a gather as gradient.

    Each real row is used once, so no scatter is needed. Rows of padding repeat another token, and their gradient is
    dropped. `unused` marks the input rows that `index` leaves out; their gradient is 0.
    """

    @staticmethod
    def forward(ctx, value, index, inverse, unused):
        ctx.save_for_backward(inverse, unused)
        return value.index_select(0, index)

    @staticmethod
    def backward(ctx, *grads):
        inverse, unused = ctx.saved_tensors
        moved = grads[0].index_select(0, inverse)
        if unused is not None:
            moved.masked_fill_(unused[:, None, None], 0.0)
        return moved, None, None, None


AttentionInterface.register(ATTENTION, packed_attention)
# No mask is made: packed attention gets the sequences from `packed_layout`.
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
