"""Causal attention over packed sequences on CUDA: one operator with two kernels.

torch's variable-length kernel (FlashAttention 2) takes all sequences in one call. On Hopper, cuDNN's kernel is 1.5 to
1.9 times as fast for sequences of thousands of tokens (`benchmark/results/training_h200.txt`), but it takes one
sequence in a call, and prepares each new length for 0.1 s. So long sequences are padded to multiples of `QUANTUM`
tokens and computed one by one. The choice is made inside of the operator: compiled layers have one graph for both.

U computed tokens, K keys of all segments, D head size, s tokens of a padded segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from arealite.engine.fsdp.shared_prefix import SegmentPlan

aten: Any = torch.ops.aten
# cuDNN prepares a plan for each length it sees.
QUANTUM = 512
# At most so many segments are computed one by one.
MAX_ALONE = 16
# Time of cuDNN's kernel for a pair of query and key, over that of the variable-length kernel, measured on an H200 with
# 12 heads of 128. What each call costs, in pairs, is an estimate: 0.15 ms of the host.
_TIME_OF_PAIR, _PAIRS_OF_CALL = 0.6, 1.5e6


class Span(NamedTuple):
    """Where queries and keys of a segment are; its queries are the last tokens of its keys."""

    start_q: int
    num_q: int
    start_k: int
    num_k: int

    @property
    def size(self) -> int:
        """Tokens after padding."""
        return -(-self.num_k // QUANTUM) * QUANTUM


@dataclass
class Varlen:
    """The segments of a micro-batch on CUDA; `kv_index` repeats the keys of shared prefixes."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_length_q: int
    max_length_k: int
    kv_index: Tensor | None
    # [MAX_ALONE, 4] on the host: the spans to compute one by one, then zeros. All zeros: all in one call.
    alone: Tensor

    @classmethod
    def of_rows(cls, ends: Tensor, lengths: list[int], one_graph: bool) -> Varlen:
        """Rows that share nothing; `one_graph` gives them the same fields as `of_segments`."""
        ends_k, every_key = ends, None
        if one_graph:
            # torch.compile makes another graph for a tensor that is passed twice.
            ends_k, every_key = ends.clone(), torch.arange(sum(lengths), device=ends.device)
        return cls(ends, ends_k, max(lengths), max(lengths), every_key, to_compute_alone(lengths, lengths, one_graph))

    @classmethod
    def of_segments(cls, plan: SegmentPlan, device: torch.device, one_graph: bool) -> Varlen:
        """Queries of each segment attend to the keys of its prefix and its own."""
        queries, keys = zip(*((s.length, s.prefix_length + s.length) for s in plan.segments), strict=True)
        ends = (torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys))
        ends_q, ends_k = (x.to(device, non_blocking=True) for x in ends)
        alone = to_compute_alone(queries, keys, one_graph)
        return cls(ends_q, ends_k, max(queries), max(keys), plan.keys.to(device), alone)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert sinks is None, "sinks need a padded layout"
        if self.kv_index is not None:
            key, value = _repeat_keys(key, self.kv_index), _repeat_keys(value, self.kv_index)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        # Flash attention counts the tokens before the query; transformers counts the query too.
        window_size = -1 if window is None else window - 1
        out, _ = packed_attention(
            _pad_heads(query), _pad_heads(key), _pad_heads(value), self.cu_seqlens_q, self.cu_seqlens_k,
            self.max_length_q, self.max_length_k, scale, window_size, self.alone,
        )  # fmt: skip
        return out[..., : value.shape[-1]] if out.shape[-1] > value.shape[-1] else out


def to_compute_alone(queries: Sequence[int], keys: Sequence[int], one_graph: bool) -> Tensor:
    """Return `Varlen.alone`: all segments where it is faster to compute each by itself, else zeros."""
    starts_q, starts_k = ([0, *accumulate(lengths)] for lengths in (queries, keys))
    spans = [Span(*row) for row in zip(starts_q, queries, starts_k, keys, strict=False)]
    padded = sum(span.size**2 / 2 for span in spans)
    exact = sum(span.num_q * (span.num_k - span.num_q / 2) for span in spans)
    found = torch.zeros(MAX_ALONE, 4, dtype=torch.long)
    if len(spans) <= MAX_ALONE and _TIME_OF_PAIR * padded + _PAIRS_OF_CALL * len(spans) < exact:
        found[: len(spans)] = torch.tensor(spans)
    if one_graph:
        # Another tensor may have this size by chance; the graph must not require it from then on.
        torch._dynamo.mark_static(found)
    return found


# ------------------------------------------------------------------------------------------------- operator


@torch.library.custom_op("arealite::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, scale: float,
    window: int, alone: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return attention for `query [U, heads, D]` and the logarithms of its sums, `[heads, U]`.

    `window`: how many tokens before a query it sees; -1: all.
    """
    if not _can_compute_alone(query, key, value, window, alone):
        options = {"scale": scale, "window_size_left": window, "window_size_right": 0}
        out, sums, *_ = aten._flash_attention_forward(
            query, key, value, ends_q, ends_k, max_q, max_k, 0.0, window < 0, False, **options
        )
        return out, sums
    out, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    for span in _spans(alone):
        own = slice(span.start_q, span.start_q + span.num_q)
        row, row_sums = attend_row(*_padded_rows(query, key, value, span), scale)
        first = span.num_k - span.num_q
        out[own] = row[0].transpose(0, 1)[first : span.num_k]
        sums[:, own] = row_sums[0, :, first : span.num_k, 0]
    return out, sums


@packed_attention.register_fake
def _(query, key, value, ends_q, ends_k, max_q, max_k, scale, window, alone):
    return torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


@torch.library.custom_op("arealite::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, ends_q: Tensor, ends_k: Tensor,
    max_q: int, max_k: int, scale: float, window: int, alone: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value."""
    if not _can_compute_alone(query, key, value, window, alone):
        options = {"scale": scale, "window_size_left": window, "window_size_right": 0}
        # Without dropout the state of the random numbers is not used.
        state, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
        with _in_fixed_order():
            return aten._flash_attention_backward(
                grad, query, key, value, out, sums, ends_q, ends_k, max_q, max_k, 0.0, window < 0, state, unused,
                **options,
            )  # fmt: skip
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for span in _spans(alone):
        own, keys = slice(span.start_q, span.start_q + span.num_q), slice(span.start_k, span.start_k + span.num_k)
        first, after = span.num_k - span.num_q, span.size - span.num_k
        rows = _padded_rows(query, key, value, span)
        # Tokens that were added get the output and gradient 0, so they change no gradient.
        row_out, row_grad = (_as_row(x[own], first, after) for x in (out, grad))
        row_sums = pad(sums[:, own], (first, after))[None, :, :, None]
        found = attend_row_backward(row_grad, *rows, row_out, row_sums, scale)
        grads[0][own] = found[0][0].transpose(0, 1)[first : span.num_k]
        for target, row in zip(grads[1:], found[1:], strict=True):
            target[keys] = row[0].transpose(0, 1)[: span.num_k]
    return grads


@contextmanager
def _in_fixed_order() -> Iterator[None]:
    """Let the kernel add in a fixed order if results must repeat.

    It does so where torch refuses other kernels, not where torch warns of them.
    """
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if not (only_warns and torch.are_deterministic_algorithms_enabled()):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


@packed_attention_backward.register_fake
def _(grad, query, key, value, out, sums, ends_q, ends_k, max_q, max_k, scale, window, alone):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ends_q, ends_k, *ctx.options, alone = inputs
    ctx.save_for_backward(query, key, value, *output, ends_q, ends_k, alone)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, alone = ctx.saved_tensors
    grads = packed_attention_backward(grad.contiguous(), *tensors, *ctx.options, alone)
    return *grads, *[None] * 7


packed_attention.register_autograd(_backward, setup_context=_keep_for_backward)


# ----------------------------------------------------------------------------------------- one by one, by cuDNN


def _can_compute_alone(query: Tensor, key: Tensor, value: Tensor, window: int, alone: Tensor) -> bool:
    if window >= 0 or not bool(alone.any()) or torch.are_deterministic_algorithms_enabled():
        return False
    return has_fast_rows(query, key, value)


def has_fast_rows(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether cuDNN's kernel runs for such heads, on a device on which it is known to be faster."""
    if torch.cuda.get_device_capability(query.device)[0] != 9:
        return False
    length = min(len(query), len(key))
    q, k, v = (x[:length].transpose(0, 1)[None] for x in (query, key, value))
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, query.shape[1] != key.shape[1])
    return torch.backends.cuda.can_use_cudnn_attention(params)


def attend_row(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return causal attention for rows `[1, heads, s, D]`, and the logarithms of its sums."""
    found = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, True, False, scale=scale)
    return found[0], found[1]


def attend_row_backward(grad, query, key, value, out, sums, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `attend_row`."""
    # Without dropout its random numbers are not used.
    unused = torch.zeros((), dtype=torch.long, device=query.device)
    size = query.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, out, sums, unused, unused, None, None, None, size, size, 0.0, True, scale=scale
    )


def _spans(alone: Tensor) -> Iterator[Span]:
    return (span for row in alone.tolist() if (span := Span(*row)).num_k)


def _padded_rows(query: Tensor, key: Tensor, value: Tensor, span: Span) -> tuple[Tensor, Tensor, Tensor]:
    """Return a segment as rows `[1, heads, s, D]`.

    Zeros stand for the queries of its prefix and for padding.
    """
    after = span.size - span.num_k
    own = query[span.start_q : span.start_q + span.num_q]
    keys = slice(span.start_k, span.start_k + span.num_k)
    first = span.num_k - span.num_q
    return _as_row(own, first, after), _as_row(key[keys], 0, after), _as_row(value[keys], 0, after)


def _as_row(x: Tensor, before: int, after: int) -> Tensor:
    if before or after:
        x = pad(x, (0, 0, 0, 0, before, after))
    return x.transpose(0, 1)[None]


def _repeat_keys(x: Tensor, index: Tensor) -> Tensor:
    """Return rows `index` of `x`. Gradients of a row that many segments use are added in fp32."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x.index_select(0, index)
    return x.float().index_select(0, index).to(x.dtype)


def _pad_heads(x: Tensor) -> Tensor:
    """Pad the head size to a multiple of 8, as the kernels require; zeros change no product."""
    missing = -x.shape[-1] % 8
    return pad(x, (0, missing)) if missing else x.contiguous()
