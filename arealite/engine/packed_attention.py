"""Causal attention over packed sequences, plugged into transformers' attention and mask interfaces.

On CUDA it is torch's own variable-length attention; on CPU (which has none) sequences are gathered into a few buckets of
similar length, padded on the right, and run through causal SDPA: pads come after every real token, so no mask is needed
and the result is exact. What that needs is computed once per micro-batch and handed down as forward keyword arguments.

N packed tokens, b sequences in a bucket, t their padded length.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from arealite.api.errors import ConfigError
from arealite.engine.parallel import heads_to_tokens, tokens_to_heads, with_earlier_pieces
from arealite.engine.shared_prefix import PrefixPlan, SharedLayout, plan_piece, varlen_kwargs

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a build of torch without it can still train on CPU
    varlen_attn = None

ATTENTION = "arealite_packed"
# From torch 2.12 on, fewer key than query heads must be announced; before, the argument does not exist.
_GQA = {"enable_gqa": True} if varlen_attn and "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # fmt: skip
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class PackedLayout:
    """Where each packed token sits in the buckets. `buckets`: (b, t) each; empty indices: nothing has to move."""

    buckets: list[tuple[int, int]]
    to_buckets: torch.Tensor | None  # [Σ b·t] packed token of each slot (any token for a pad)
    from_buckets: torch.Tensor | None  # [N] slot of each packed token


def check_model(config: PreTrainedConfig) -> None:
    """Refuse models whose layers mix tokens in a way that packing would get wrong."""
    text = config.get_text_config()
    unknown = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ConfigError(
            f"model type {text.model_type!r} has layers of type {sorted(unknown)}, which cannot be trained on packed "
            f"sequences; supported are {sorted(_LAYER_TYPES)}"
        )
    if getattr(text, "attn_logit_softcapping", None):
        raise ConfigError(
            f"model type {text.model_type!r} caps attention logits, which packed attention does not do"
        )


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
    if prefixes is not None:
        prefixes = prefixes.to(cu_seqlens.device)
        on_cuda = cu_seqlens.is_cuda
        plan = varlen_kwargs(prefixes) if on_cuda else {"packed_layout": SharedLayout(prefixes)}
        return context | plan
    if cu_seqlens.is_cuda:
        return context | {
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }
    return context | {"packed_layout": bucket_layout(lengths)}


def bucket_layout(lengths: list[int]) -> PackedLayout:
    """Group sequences of similar length: a bucket ends where padding a sequence to it would waste a quarter."""
    if len(set(lengths)) == 1:
        return PackedLayout([(len(lengths), lengths[0])], None, None)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    buckets: list[list[int]] = []
    for row in order:
        if not lengths[row]:
            continue
        if not buckets or lengths[row] < 0.75 * lengths[buckets[-1][0]] - 4:
            buckets.append([])
        buckets[-1].append(row)
    to_buckets = [
        torch.tensor([starts[row] for row in rows])[:, None] + torch.arange(lengths[rows[0]])
        for rows in buckets
    ]
    shapes = [(len(rows), lengths[rows[0]]) for rows in buckets]
    slots = torch.empty(starts[-1], dtype=torch.long)
    offset = 0
    for index, rows in zip(to_buckets, buckets, strict=True):
        b, t = index.shape
        real = torch.arange(t) < torch.tensor([lengths[row] for row in rows])[:, None]
        slots[index[real]] = (offset + torch.arange(b * t)).view(b, t)[real]
        offset += b * t
    flat = torch.cat([index.flatten() for index in to_buckets]).clamp_(max=starts[-1] - 1)
    return PackedLayout(shapes, flat, slots)


class _Move(torch.autograd.Function):
    """Rows by index, where each real row is used once: the gradient is a gather too, not a scatter.

    Pads copy some other token's row; their gradient is zero (no real token attends to them), so it is left out.
    """

    @staticmethod
    def forward(ctx, value, index, inverse):
        ctx.save_for_backward(inverse)
        return value.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Return(torch.autograd.Function):
    """The way back from the buckets; slots of pads get no gradient."""

    @staticmethod
    def forward(ctx, value, slots):
        ctx.save_for_backward(slots)
        ctx.num_slots = len(value)
        return value.index_select(0, slots)

    @staticmethod
    def backward(ctx, grad):
        (slots,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_slots, *grad.shape[1:]).index_copy_(0, slots, grad), None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | SharedLayout | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    kv_index: torch.Tensor | None = None,
    context_group: dist.ProcessGroup | None = None,
    ring_hops: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: heads `[1, heads, N, D]` in, `[1, N, heads, D]` out.

    With a context group, each rank brings its piece of the tokens and gets it back, and attends with its share of heads
    to all tokens in between; in a ring, with all heads to its own and the earlier ones of its first sequence.
    """
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if ring_hops is not None:
        both = with_earlier_pieces(torch.stack([key, value], dim=1), ring_hops, context_group)
        key, value = both.unbind(dim=1)
    elif context_group is not None:
        query, key, value = (tokens_to_heads(x, context_group) for x in (query, key, value))
    if kv_index is not None:
        key, value = key.index_select(0, kv_index), value.index_select(0, kv_index)
    if isinstance(packed_layout, SharedLayout):
        out = packed_layout.attend(query, key, value, scaling, sliding_window)
    elif packed_layout is not None:
        out = _bucketed(query, key, value, packed_layout, scaling, sliding_window)
    else:
        # Flash attention counts the tokens before this one, transformers counts this one too.
        window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
        out = varlen_attn(
            query.contiguous(), key.contiguous(), value.contiguous(), cu_seq_lens_q, cu_seq_lens_k,
            max_length_q, max_length_k, scale=scaling, window_size=window, **_GQA,
        )  # fmt: skip
    if context_group is not None and ring_hops is None:
        out = heads_to_tokens(out, context_group)
    return out.unsqueeze(0), None


def _bucketed(query, key, value, layout: PackedLayout, scaling, window) -> torch.Tensor:
    """`[N, heads, D]` in and out."""
    if layout.to_buckets is not None:
        query, key, value = (
            _Move.apply(x, layout.to_buckets, layout.from_buckets) for x in (query, key, value)
        )
    outs, offset = [], 0
    for b, t in layout.buckets:
        q, k, v = (
            x[offset : offset + b * t].unflatten(0, (b, t)).transpose(1, 2)
            for x in (query, key, value)
        )
        outs.append(_causal(q, k, v, scaling, window).transpose(1, 2).flatten(0, 1))
        offset += b * t
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if layout.from_buckets is None else _Return.apply(out, layout.from_buckets)


def _causal(q, k, v, scaling, window) -> torch.Tensor:
    mask, t = None, q.shape[2]
    if window is not None and window < t:
        age = torch.arange(t)[:, None] - torch.arange(t)
        mask = (age >= 0) & (age < window)
    gqa = q.shape[1] != k.shape[1]
    return sdpa(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa)


def _no_mask(*args, **kwargs) -> None:
    """Packed attention knows the sequences from `attention_kwargs`; transformers need not make a mask."""


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)
