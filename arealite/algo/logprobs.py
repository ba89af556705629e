"""Log-probabilities and entropies of packed tokens from hidden states.

The shift by one token happens here and nowhere else: index `t` refers to token `t`, whose log-prob comes from the
hidden state at `t - 1` (`target_positions`). Logits are computed in chunks of tokens, once in the forward and again in
the backward pass, so the `[M, V]` matrix never exists as a whole. Small batches keep their logits instead. The result
does not depend on the chunk size.

N packed tokens, M tokens whose log-prob is requested, H hidden size, V vocabulary, C rows of a chunk.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Up to this many logits (16 MiB in fp32), keeping them is cheaper than computing them twice.
_KEEP_LOGITS = 1 << 22


def target_positions(cu_seqlens: Tensor, loss_mask: Tensor | None) -> Tensor:
    """Return the tokens `[M]` with a log-prob: those in `loss_mask`, except first tokens of sequences."""
    num_tokens = int(cu_seqlens[-1])
    wanted = torch.ones(num_tokens, dtype=torch.bool, device=cu_seqlens.device)
    if loss_mask is not None:
        wanted &= loss_mask.bool()
    # Empty sequences at the end start at `num_tokens`.
    starts = cu_seqlens[:-1].long()
    wanted[starts[starts < num_tokens]] = False
    return wanted.nonzero(as_tuple=True)[0]


def previous_token(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Move `values [N]` to the next token of their sequence; first tokens get 0."""
    positions = target_positions(cu_seqlens, None)
    return torch.zeros_like(values).index_copy(0, positions, values[positions - 1])


class _Settings(NamedTuple):
    temperature: float = 1.0
    softcap: float | None = None
    chunk_size: int = 1024
    with_entropy: bool = False
    fused: bool = False
    group: dist.ProcessGroup | None = None


def token_logprobs(
    states: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    here: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Return `logp [M]` of `labels [M]` predicted from `states [M, H]`, and the `entropy [M]`.

    `logp = log softmax(z)[label]`, `z = softcap·tanh(h·Wᵀ / softcap) / temperature`; `entropy = −Σ_v p_v log p_v`
    (zeros unless `with_entropy`). Both are fp32 and differentiable in `states`, `weight` and `bias`. Settings:
    `temperature`, `softcap`, `chunk_size`, `with_entropy`, and `fused`, which compiles the operations on a chunk of
    logits. If the vocabulary is split over the ranks of `group`, `weight` and `labels` are rows of this rank's shard,
    and `here [M]` marks the labels in it; all ranks get the same result and the same gradient of `states`.
    """
    if states.dim() != 2 or labels.shape != states.shape[:1]:
        raise ValueError(f"expected states [M, H] and labels [M], got {states.shape}, {labels.shape}")
    return _ChunkedLogprobs.apply(states, weight, bias, labels, here, _Settings(**settings))


class _ChunkedLogprobs(torch.autograd.Function):
    """Implements `token_logprobs` in chunks of rows."""

    @staticmethod
    def forward(ctx, states, weight, bias, labels, here, settings):
        num = len(states)
        sums = torch.zeros(4, num, dtype=torch.float32, device=states.device)
        keep = num * weight.shape[0] <= _KEEP_LOGITS
        chunk = max(num if keep else settings.chunk_size, 1)
        reduce = _compiled(_softmax_sums) if settings.fused else _softmax_sums
        kept = None
        for start in range(0, num, chunk):
            part = slice(start, start + chunk)
            raw = _head(states[part].to(weight.dtype), weight, bias)
            found = reduce(raw, labels[part], settings.temperature, settings.softcap, settings.with_entropy)
            for row, value in zip(sums, found, strict=True):
                row[part] = value
            kept = raw if keep else None
            # Free the logits before the next chunk is computed.
            del raw
        if settings.group is not None:
            sums = _join_shards(sums, here, settings.group)
        top, total, dot, label = sums
        log_total = total.log()
        # −Σ p log p = log Σ exp(z − top) + Σ p·(top − z): both terms are positive, so nothing cancels for large logits.
        entropy = log_total - dot / total if settings.with_entropy else torch.zeros_like(log_total)
        ctx.save_for_backward(states, weight, bias, labels, here, top, log_total, entropy, kept)
        ctx.settings, ctx.chunk = settings, chunk
        # An entropy that is only reported gets no gradient; None skips its part of the backward pass.
        ctx.set_materialize_grads(False)
        return label - log_total, entropy

    @staticmethod
    def backward(ctx, *grads):
        states, weight, bias, labels, here, top, log_total, entropy, kept = ctx.saved_tensors
        grad_logp = torch.zeros_like(top) if grads[0] is None else grads[0]
        settings, chunk = ctx.settings, ctx.chunk
        differentiate = _compiled(_logits_grad) if settings.fused else _logits_grad
        grad_states, grad_weight = torch.zeros_like(states), None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        several = len(states) > chunk
        if ctx.needs_input_grad[1]:
            # Chunks are summed in fp32: a bf16 sum of many small parts loses most of them. Without any token the
            # gradient is still zeros and not None, because sharded training needs one from every rank.
            grad_weight = torch.zeros_like(weight, dtype=torch.float32 if several else None)
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            inputs = states[part].to(weight.dtype)
            raw = kept if kept is not None else _head(inputs, weight, bias)
            grad = differentiate(
                raw, labels[part], top[part], log_total[part], entropy[part], grad_logp[part],
                None if grads[1] is None else grads[1][part], settings.temperature, settings.softcap,
                weight.dtype, None if here is None else here[part],
            )  # fmt: skip
            grad_states[part] = (grad @ weight).to(states.dtype)
            if grad_weight is not None and several:
                _add_product(grad_weight, grad.T, inputs)
            elif grad_weight is not None:
                grad_weight = grad.T @ inputs
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0, dtype=torch.float32)
            del raw, grad
        if settings.group is not None:
            dist.all_reduce(grad_states, group=settings.group)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        return grad_states, grad_weight, grad_bias, None, None, None


def _join_shards(sums: Tensor, here: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Combine the `_softmax_sums [4, M]` of each rank's part of the vocabulary.

    Relative to the largest logit of all, `Σ exp(z − top) = Σ_r e^{top_r − top}·total_r`, and so for the other sums.
    """
    parts = sums.new_zeros(dist.get_world_size(group), 5, sums.shape[1])
    parts[dist.get_rank(group)] = torch.cat([sums, here[None].to(sums.dtype)])
    # A gather: all other entries are 0.
    dist.all_reduce(parts, group=group)
    tops, totals, dots, labels, found = parts.unbind(dim=1)
    top = tops.amax(dim=0)
    shift = tops - top
    total = (shift.exp() * totals).sum(dim=0)
    dot = (shift.exp() * (dots + shift * totals)).sum(dim=0)
    return torch.stack([top, total, dot, (found * (labels + shift)).sum(dim=0)])


def _head(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return raw logits `[C, V]`; on CUDA in fp32, as the server does.

    bf16 would round a logit of 20 to multiples of 1/8.
    """
    plain = type(weight) in (Tensor, torch.nn.Parameter)
    if not (plain and weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)):
        return torch.nn.functional.linear(states, weight, bias)
    raw = torch.mm(states, weight.t(), out_dtype=torch.float32)
    return raw if bias is None else raw.add_(bias)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to the fp32 `total`; on CUDA within the product, which saves a copy in bf16."""
    if total.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _scaled_logits(raw: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """Return the fp32 logits of the distribution that is sampled from."""
    logits = raw.float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits if temperature == 1.0 else logits / temperature


def _softmax_sums(
    raw: Tensor, labels: Tensor, temperature: float, softcap: float | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four sums `[C]` of logits `z [C, V]`, relative to each row's largest `top`.

    `top`, `Σ exp(z − top)`, `Σ exp(z − top)·(z − top)` (zeros unless `with_entropy`) and `z_label − top`.
    """
    logits = _scaled_logits(raw, temperature, softcap)
    top = logits.amax(dim=-1)
    shifted = logits - top[:, None]
    label = shifted.gather(1, labels[:, None]).squeeze(1)
    if not with_entropy:
        return top, shifted.exp_().sum(dim=-1), torch.zeros_like(top), label
    exps = shifted.exp()
    return top, exps.sum(dim=-1), exps.mul_(shifted).sum(dim=-1), label


def _logits_grad(
    raw, labels, top, log_total, entropy, grad_logp, grad_entropy, temperature, softcap, dtype, here=None
) -> Tensor:
    """Return the gradient of the raw logits `[C, V]` as `dtype`.

    `d logp / dz = onehot − p`, `d entropy / dz = −p·(log p + entropy)`. `here [C]` marks the rows whose label is among
    these columns, if they are a part of the vocabulary.
    """
    logits = _scaled_logits(raw, temperature, softcap)
    log_p = (logits - top[:, None]).sub_(log_total[:, None])
    factor = -grad_logp[:, None]
    if grad_entropy is not None:
        factor = factor - grad_entropy[:, None] * (log_p + entropy[:, None])
    one_hot = grad_logp if here is None else grad_logp * here
    grad = log_p.exp_().mul_(factor)
    if torch.compiler.is_compiling():
        # A comparison is fused with the rest of the chunk; a scatter would write it and read it again.
        columns = torch.arange(grad.shape[1], device=grad.device)
        grad = grad + torch.where(columns == labels[:, None], one_hot[:, None], 0.0)
    else:
        grad.scatter_add_(1, labels[:, None], one_hot[:, None])
    if softcap is not None:
        grad = grad * (1.0 - (logits * (temperature / softcap)).square())
    return (grad if temperature == 1.0 else grad / temperature).to(dtype)


@cache
def _compiled(function):
    return torch.compile(function, dynamic=True)
