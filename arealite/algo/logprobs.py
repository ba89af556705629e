"""Log-probabilities and entropies of packed tokens from hidden states: the one place where the shift happens.

Index `t` speaks of token `t`: its log-prob comes from the hidden state at `t - 1`. Logits are made in chunks of tokens, in
the forward and again in the backward pass, so that the `[N, V]` matrix never exists whole; only chunks small enough not to
matter are kept between the two. Called by the training engine; guarantees the same numbers for every chunk size.

N packed tokens, M tokens whose log-prob is asked for, H hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import torch

# Below this many logits (16 MiB in fp32) recomputing costs more than keeping them.
_KEEP_LOGITS = 1 << 22


def target_positions(cu_seqlens: torch.Tensor, loss_mask: torch.Tensor | None) -> torch.Tensor:
    """Which tokens `[M]` have a log-prob: all but the first of each sequence, and only those with a `loss_mask`."""
    num_tokens = int(cu_seqlens[-1])
    wanted = torch.ones(num_tokens, dtype=torch.bool, device=cu_seqlens.device)
    if loss_mask is not None:
        wanted &= loss_mask.bool()
    # A sequence that ends where the packed batch ends has no start after it; empty sequences share a start.
    starts = cu_seqlens[:-1].long()
    wanted[starts[starts < num_tokens]] = False
    return wanted.nonzero(as_tuple=True)[0]


def previous_token(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """`values [N]` made at each token, moved to the token that follows it in its sequence; 0 on first tokens."""
    positions = target_positions(cu_seqlens, None)
    return torch.zeros_like(values).index_copy(0, positions, values[positions - 1])


def packed_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int = 1024,
    with_entropy: bool = False,
    first_row: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`logp [N]` of `input_ids [N]` at `positions [M]` (zero elsewhere), and `entropy [N]` of those predictions.

    `logp_t = log softmax(z_{t-1})[id_t]`, `z = softcap·tanh(h·Wᵀ / softcap) / temperature`;
    `entropy_t = −Σ_v p_v log p_v` of the same distribution (zeros when `with_entropy` is off). Both are fp32 and
    differentiable in `hidden`, `weight` and `bias`. Where `hidden` is only a piece of the packed tokens, `first_row` says
    where it starts, and log-probs that come from other pieces are zero.
    """
    if hidden.dim() != 2 or input_ids.dim() != 1:
        raise ValueError(
            f"expected hidden [n, H] and input_ids [N], got {hidden.shape}, {input_ids.shape}"
        )
    rows = positions - 1 - first_row
    if len(hidden) != len(input_ids):
        mine = (rows >= 0) & (rows < len(hidden))
        rows, positions = rows[mine], positions[mine]
    logp, entropy = _ChunkedLogprobs.apply(
        hidden, weight, bias, rows, input_ids[positions], temperature, softcap, chunk_size, with_entropy
    )  # fmt: skip
    return tuple(x.new_zeros(len(input_ids)).index_copy(0, positions, x) for x in (logp, entropy))


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-prob and entropy of `labels [M]` predicted from rows `rows [M]` (all different) of `hidden [N, H]`."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, labels, temperature, softcap, chunk, with_entropy):
        num = len(rows)
        logp = torch.empty(num, dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(logp)
        lse = torch.empty_like(logp)
        keep = num * weight.shape[0] <= _KEEP_LOGITS
        chunk = num if keep else chunk
        kept = None
        for start in range(0, num, max(chunk, 1)):
            part = slice(start, start + chunk)
            logits = _logits(hidden[rows[part]], weight, bias, temperature, softcap)
            lse[part] = logits.logsumexp(dim=-1)
            logp[part] = logits.gather(1, labels[part, None]).squeeze(1) - lse[part]
            if with_entropy:
                probs = (logits - lse[part, None]).exp_()
                entropy[part] = lse[part] - (probs.mul_(logits)).sum(dim=-1)
            kept = logits if keep else None
        ctx.save_for_backward(hidden, weight, bias, rows, labels, lse, entropy, kept)
        ctx.settings = (temperature, softcap, chunk)
        return logp, entropy

    @staticmethod
    def backward(ctx, *grads):
        grad_logp, grad_entropy = grads
        hidden, weight, bias, rows, labels, lse, entropy, kept = ctx.saved_tensors
        temperature, softcap, chunk = ctx.settings
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        uses_entropy = bool(grad_entropy.any())
        for start in range(0, len(rows), max(chunk, 1)):
            part = slice(start, start + chunk)
            states = hidden[rows[part]]
            logits = (
                kept if kept is not None else _logits(states, weight, bias, temperature, softcap)
            )
            # d logp / d z = onehot − p;  d entropy / d z = −p·(log p + entropy)
            grad = (logits - lse[part, None]).exp()
            if uses_entropy:
                log_probs = logits - (lse[part] - entropy[part])[:, None]
                grad *= log_probs.mul_(grad_entropy[part, None]).add_(grad_logp[part, None]).neg_()
            else:
                grad *= grad_logp[part, None].neg()
            grad.scatter_add_(1, labels[part, None], grad_logp[part, None])
            if softcap is not None:
                grad *= 1 - (logits * (temperature / softcap)).square_()
            if temperature != 1.0:
                grad /= temperature
            grad_low = grad.to(weight.dtype)
            grad_hidden[rows[part]] = (grad_low @ weight).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                # Chunks are added up in fp32: in bf16 a sum of many small parts loses most of them.
                product = grad_low.T @ states.to(weight.dtype)
                single = len(rows) <= chunk
                grad_weight = product if single else _add_fp32(grad_weight, product)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
        if grad_weight is None and ctx.needs_input_grad[1]:
            # No token asked for: sharded training still needs a gradient from every rank.
            grad_weight = torch.zeros_like(weight)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _logits(states, weight, bias, temperature, softcap) -> torch.Tensor:
    """fp32 logits `[C, V]`; the product itself runs in the weights' type."""
    logits = torch.nn.functional.linear(states.to(weight.dtype), weight, bias).float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits if temperature == 1.0 else logits / temperature


def _add_fp32(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    return part.float() if total is None else total.add_(part)
