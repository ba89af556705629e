"""Causal attention over packed sequences, plugged into transformers' attention and mask interfaces.

On CUDA it is torch's own variable-length attention; on CPU (which has none) sequences are gathered into a few buckets of
similar length, padded on the right, and run through SDPA: pads come after every real token, so the result is exact. What that
needs is computed once per micro-batch and handed down as forward keyword arguments.

N packed tokens, U tokens that are computed, b rows of a bucket, s their own tokens, p the shared ones before them.
"""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, AttentionMaskInterface

from arealite.api.errors import ConfigError
from arealite.engine.fsdp.parallel import heads_to_tokens, tokens_to_heads, with_earlier_pieces
from arealite.engine.fsdp.shared_prefix import PrefixPlan, Segment, plan_piece, varlen_kwargs

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a build of torch without it can still train on CPU
    varlen_attn = None

ATTENTION = "arealite_packed"
# From torch 2.12 on, fewer key than query heads must be announced; before, the argument does not exist.
_GQA = {"enable_gqa": True} if varlen_attn and "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # fmt: skip


def attention_kwargs(
    cu_seqlens: torch.Tensor,
    lengths: list[int],
    prefixes: PrefixPlan | None = None,
    context_group: dist.ProcessGroup | None = None,
    ring: bool = False,
) -> dict:
    """Keyword arguments of the model's forward pass that describe the packed batch to `packed_attention`.

    With a context group the tokens of all its ranks are described (they fill equal pieces); in a ring, each rank's own.
    """
    context = {} if context_group is None else {"context_group": context_group}
    if context and ring:
        size, rank = dist.get_world_size(context_group), dist.get_rank(context_group)
        prefixes, context["ring_hops"] = plan_piece(lengths, size, rank)
    if cu_seqlens.is_cuda and prefixes is not None:
        return context | varlen_kwargs(prefixes.to(cu_seqlens.device))
    if cu_seqlens.is_cuda:
        longest = max(lengths)
        lens = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        return context | lens | {"max_length_q": longest, "max_length_k": longest}
    starts = cu_seqlens.tolist()
    plain = [Segment(s, n, 0, 0) for s, n in zip(starts, lengths, strict=False) if n]
    return context | {"buckets": Buckets(plain if prefixes is None else prefixes.segments)}


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    buckets: Buckets | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    kv_index: torch.Tensor | None = None,
    context_group: dist.ProcessGroup | None = None,
    ring_hops: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: heads `[1, heads, N, D]` in, `[1, N, heads, D]` out.

    With a context group, each rank brings its piece of the tokens and gets it back, and attends with its share of heads
    to all tokens in between; in a ring, with all heads to its own and the earlier ones of its first sequence.
    """
    if s_aux is not None or (buckets is None and cu_seq_lens_q is None):
        what = "has sinks" if s_aux is not None else "is not told which sequences are packed"
        raise ConfigError(f"{type(module).__name__} {what}: it cannot be trained on packed sequences")
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if ring_hops is not None:
        both = with_earlier_pieces(torch.stack([key, value], dim=1), ring_hops, context_group)
        key, value = both.unbind(dim=1)
    elif context_group is not None:
        query, key, value = (tokens_to_heads(x, context_group) for x in (query, key, value))
    if kv_index is not None:
        key, value = key.index_select(0, kv_index), value.index_select(0, kv_index)
    if buckets is not None:
        out = buckets.attend(query, key, value, scaling, sliding_window)
    else:
        # Flash attention counts the tokens before this one, transformers counts this one too.
        window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        padded = (_pad_heads(x) for x in (query, key, value))
        out = varlen_attn(
            *padded, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k,
            scale=scale, window_size=window, **_GQA,
        )  # fmt: skip
        if out.shape[-1] > value.shape[-1]:
            out = out[..., : value.shape[-1]]
    if context_group is not None and ring_hops is None:
        out = heads_to_tokens(out, context_group)
    return out.unsqueeze(0), None


def _pad_heads(x: torch.Tensor) -> torch.Tensor:
    """Heads of a size that the kernel takes, a multiple of 8: zeros change no product."""
    missing = -x.shape[-1] % 8
    return torch.nn.functional.pad(x, (0, missing)) if missing else x.contiguous()


# ------------------------------------------------------------------- buckets: without variable-length attention


class Buckets:
    """Segments grouped by size: where each computed token sits among the padded rows of the groups, and attention over these."""

    def __init__(self, segments: list[Segment]):
        self.buckets = [_Bucket(group) for group in _group_by_size(segments)]
        self.queries = torch.cat([bucket.queries.flatten() for bucket in self.buckets])
        self.keys = torch.cat([bucket.keys.flatten() for bucket in self.buckets])
        real = torch.cat([bucket.real.flatten() for bucket in self.buckets])
        self.pads = ~real
        self.slots = torch.empty(int(real.sum()), dtype=torch.long)  # of each computed token
        self.slots[self.queries[real]] = real.nonzero().flatten()
        self.in_place = torch.equal(self.queries, torch.arange(len(self.slots)))
        self.has_prefixes = len(self.keys) > len(self.queries)

    def attend(self, query, key, value, scaling, window) -> torch.Tensor:
        """Heads `[U, heads, D]` in and out. Keys and values may have more rows: those of prefixes computed elsewhere."""
        if self.has_prefixes or len(key) > len(query):
            key, value = (x.index_select(0, self.keys) for x in (key, value))
        elif not self.in_place:
            key, value = (_Move.apply(x, self.queries, self.slots, None) for x in (key, value))
        if not self.in_place:
            query = _Move.apply(query, self.queries, self.slots, None)
        queries = query.split([bucket.queries.numel() for bucket in self.buckets])
        keys, values = (x.split([b.keys.numel() for b in self.buckets]) for x in (key, value))
        parts = zip(self.buckets, queries, keys, values, strict=True)
        outs = [bucket.attend(q, k, v, scaling, window) for bucket, q, k, v in parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self.in_place else _Move.apply(out, self.slots, self.queries, self.pads)


class _Bucket:
    """Rows of similar size: which tokens are their queries `[b, s]` and keys `[b, p + s]` (any, for padding)."""

    def __init__(self, segments: list[Segment]):
        start, length, prefix_start, self.prefix = torch.tensor(segments).T[:, :, None]
        self.own, self.shared = torch.arange(length.max()), torch.arange(self.prefix.max())
        self.real = self.own < length
        self.queries = torch.where(self.real, start + self.own, 0)
        shared = torch.where(self.shared < self.prefix, prefix_start + self.shared, 0)
        self.keys = torch.cat([shared, self.queries], dim=1)
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(self, query, key, value, scaling, window) -> torch.Tensor:
        shapes = (self.queries.shape, self.keys.shape, self.keys.shape)
        rows = zip((query, key, value), shapes, strict=True)
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x, shape in rows)
        mask, gqa = self._mask(window), q.shape[1] != k.shape[1]
        causal = mask is None
        out = sdpa(q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """Which keys a query sees, `[b or 1, 1, s, p + s]`; None where plain causal attention is right: padding comes last there."""
        if not len(self.shared) and (window is None or window >= len(self.own)):
            return None
        if window not in self._masks:
            prefix = self.prefix[:1] if bool((self.prefix == self.prefix[0]).all()) else self.prefix
            ages = (prefix + self.own)[:, :, None] - self.shared
            ages = torch.where((self.shared < prefix)[:, None], ages, -1)
            own = (self.own[:, None] - self.own).expand(len(prefix), -1, -1)
            age = torch.cat([ages, own], dim=2)  # position of the query minus that of the key
            seen = age >= 0 if window is None else (age >= 0) & (age < window)
            self._masks[window] = seen[:, None]
        return self._masks[window]


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


class _Move(torch.autograd.Function):
    """Rows by index, where each real row is used once: the gradient is a gather too, not a scatter.

    Rows for padding are any other token's: what comes back for them is left out. On the way back from the buckets, `unused` are the
    rows that no result is taken from.
    """

    @staticmethod
    def forward(ctx, value, index, inverse, unused):
        ctx.save_for_backward(inverse, unused)
        return value.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        inverse, unused = ctx.saved_tensors
        moved = grad.index_select(0, inverse)
        if unused is not None:
            moved.masked_fill_(unused[:, None, None], 0.0)
        return moved, None, None, None


def _no_mask(*args, **kwargs) -> None:
    """Packed attention knows the sequences from `attention_kwargs`; transformers need not make a mask."""


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)
