"""Log-probabilities and entropies of packed tokens from hidden states: the one place where the shift happens.

Index `t` speaks of token `t` (`target_positions`): its log-prob comes from the hidden state at `t - 1`. Logits are made in chunks of
tokens, in the forward and again in the backward pass, so that the `[M, V]` matrix never exists whole; only chunks small enough not
to matter are kept between the two. Called by the training engine; guarantees the same numbers for every chunk size.

N packed tokens, M tokens whose log-prob is asked for, H hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Below this many logits (16 MiB in fp32) recomputing costs more than keeping them.
_KEEP_LOGITS = 1 << 22


def target_positions(cu_seqlens: Tensor, loss_mask: Tensor | None) -> Tensor:
    """Which tokens `[M]` have a log-prob: all but the first of each sequence, and only those with a `loss_mask`."""
    num_tokens = int(cu_seqlens[-1])
    wanted = torch.ones(num_tokens, dtype=torch.bool, device=cu_seqlens.device)
    if loss_mask is not None:
        wanted &= loss_mask.bool()
    # A sequence that ends where the packed batch ends has no start after it; empty sequences share a start.
    starts = cu_seqlens[:-1].long()
    wanted[starts[starts < num_tokens]] = False
    return wanted.nonzero(as_tuple=True)[0]


def previous_token(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`values [N]` made at each token, moved to the token that follows it in its sequence; 0 on first tokens."""
    positions = target_positions(cu_seqlens, None)
    return torch.zeros_like(values).index_copy(0, positions, values[positions - 1])


class _Settings(NamedTuple):
    temperature: float = 1.0
    softcap: float | None = None
    chunk_size: int = 1024
    with_entropy: bool = False
    fused: bool = False


def token_logprobs(
    states: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    """`logp [M]` of `labels [M]` predicted from `states [M, H]`, and `entropy [M]` of those predictions.

    `logp = log softmax(z)[label]`, `z = softcap·tanh(h·Wᵀ / softcap) / temperature`; `entropy = −Σ_v p_v log p_v` of the same
    distribution (zeros unless `with_entropy`). Both are fp32 and differentiable in `states`, `weight` and `bias`. Settings are
    `temperature`, `softcap`, `chunk_size`, `with_entropy`, and `fused`, which compiles what happens to a chunk's logits.
    """
    if states.dim() != 2 or labels.shape != states.shape[:1]:
        raise ValueError(f"want states [M, H] and labels [M], got {states.shape}, {labels.shape}")
    return _ChunkedLogprobs.apply(states, weight, bias, labels, _Settings(**settings))


class _ChunkedLogprobs(torch.autograd.Function):
    """What `token_logprobs` says, in chunks of rows."""

    @staticmethod
    def forward(ctx, states, weight, bias, labels, settings):
        num = len(states)
        logp = torch.empty(num, dtype=torch.float32, device=states.device)
        lse, entropy = torch.empty_like(logp), torch.zeros_like(logp)
        keep = num * weight.shape[0] <= _KEEP_LOGITS
        chunk = max(num if keep else settings.chunk_size, 1)
        measure = _compiled(_measure) if settings.fused else _measure
        kept = None
        for start in range(0, num, chunk):
            part = slice(start, start + chunk)
            raw = _head(states[part].to(weight.dtype), weight, bias)
            logp[part], lse[part], entropy[part] = measure(
                raw, labels[part], settings.temperature, settings.softcap, settings.with_entropy
            )
            kept = raw if keep else None
            del raw  # before the next chunk's are made
        ctx.save_for_backward(states, weight, bias, labels, lse, entropy, kept)
        ctx.settings, ctx.chunk = settings, chunk
        ctx.set_materialize_grads(False)  # an entropy that is only reported needs no gradient
        return logp, entropy

    @staticmethod
    def backward(ctx, *grads):
        states, weight, bias, labels, lse, entropy, kept = ctx.saved_tensors
        grad_logp = torch.zeros_like(lse) if grads[0] is None else grads[0]
        settings, chunk = ctx.settings, ctx.chunk
        differentiate = _compiled(logits_grad) if settings.fused else logits_grad
        grad_states, grad_weight = torch.zeros_like(states), None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        several = len(states) > chunk
        if ctx.needs_input_grad[1]:
            # Chunks are added up in fp32: in bf16 a sum of many small parts loses most of them. A gradient of zeros is
            # needed even where no token asked for it: sharded training wants one from every rank.
            grad_weight = torch.zeros_like(weight, dtype=torch.float32 if several else None)
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            inputs = states[part].to(weight.dtype)
            raw = kept if kept is not None else _head(inputs, weight, bias)
            grad = differentiate(
                raw, labels[part], lse[part], entropy[part], grad_logp[part],
                None if grads[1] is None else grads[1][part], settings.temperature, settings.softcap,
                weight.dtype,
            )  # fmt: skip
            grad_states[part] = (grad @ weight).to(states.dtype)
            if grad_weight is not None and several:
                grad_weight += grad.T @ inputs
            elif grad_weight is not None:
                grad_weight = grad.T @ inputs
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0, dtype=torch.float32)
            del raw, grad  # before the next chunk's are made
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        return grad_states, grad_weight, grad_bias, None, None


def _head(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Raw logits `[C, V]`, on CUDA as the float32 sums they are: bf16 would round a logit of 20 to eighths, and the server does not."""
    plain = type(weight) in (Tensor, torch.nn.Parameter)
    if not (plain and weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)):
        return torch.nn.functional.linear(states, weight, bias)
    raw = torch.mm(states, weight.t(), out_dtype=torch.float32)
    return raw if bias is None else raw.add_(bias)


def scaled_logits(raw: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """The logits that are sampled from, fp32."""
    logits = raw.float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits if temperature == 1.0 else logits / temperature


def _measure(raw, labels, temperature, softcap, with_entropy):
    """Log-prob of `labels [C]`, log-sum-exp and entropy (0 unless asked for) of logits `[C, V]`."""
    logits = scaled_logits(raw, temperature, softcap)
    lse = logits.logsumexp(dim=-1)
    logp = logits.gather(1, labels[:, None]).squeeze(1) - lse
    if not with_entropy:
        return logp, lse, torch.zeros_like(lse)
    expected = ((logits - lse[:, None]).exp() * logits).sum(dim=-1)
    return logp, lse, lse - expected


def logits_grad(raw, labels, lse, entropy, grad_logp, grad_entropy, temperature, softcap, dtype, here=None):
    """Gradient of the raw logits `[C, V]`, as `dtype`: d logp / dz = onehot − p, d entropy / dz = −p·(log p + entropy).

    `here [C]`: whose labels are among these columns, where they are a part of the vocabulary.
    """
    logits = scaled_logits(raw, temperature, softcap)
    factor = grad_logp[:, None]
    if grad_entropy is not None:
        factor = factor + grad_entropy[:, None] * (logits - (lse - entropy)[:, None])
    grad = -(logits - lse[:, None]).exp() * factor
    one_hot = grad_logp if here is None else grad_logp * here
    grad = grad.scatter_add(1, labels[:, None], one_hot[:, None])
    if softcap is not None:
        grad = grad * (1.0 - (logits * (temperature / softcap)).square())
    return (grad if temperature == 1.0 else grad / temperature).to(dtype)


@cache
def _compiled(function):
    return torch.compile(function, dynamic=True)
