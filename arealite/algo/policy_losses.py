"""Policy losses: one pure function each.

A loss returns a sum over the packed tokens of a micro-batch and its statistics. The engine divides the sum by a weight
over the global batch. `weights` combines the mask, the way of averaging (`aggregation_weights`) and the behaviour
weight (`off_policy`). `api.algorithms` names the loss of each algorithm, and `LOSSES` maps the names to the functions.

N packed tokens, B sequences. logp: policy being trained; prox_logp: its weights at the start of the update.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from arealite.api.io_struct import Stat

# e^89 is infinite in fp32, and infinity times the zero gradient of a clipped ratio would be NaN.
_MAX_LOG_RATIO = 20.0


class Tokens(NamedTuple):
    """Inputs of a policy loss, `[N]` each. `weights` is 0 on tokens that are not trained."""

    logp: Tensor
    prox_logp: Tensor
    advantages: Tensor
    weights: Tensor
    # Sequence of each token.
    owner: Tensor

    @property
    def mask(self) -> Tensor:
        return self.weights > 0

    def log_ratio(self) -> Tensor:
        """Return `logp − prox`, and 0 where not trained (the log-probs there may hold anything)."""
        return torch.where(self.mask, self.logp - self.prox_logp, 0.0)

    def ratio(self) -> Tensor:
        """Return `u = exp(logp − prox)` of each token."""
        return bounded_exp(self.log_ratio())


class Clip(NamedTuple):
    """Allowed range of a ratio: `[1 − low, 1 + high]`."""

    low: float = 0.2
    high: float = 0.2

    def __call__(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1.0 - self.low, 1.0 + self.high)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return `exp(log_ratio)` with the exponent limited to ±20; beyond that the gradient is 0."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


LossAndStats = tuple[Tensor, dict[str, Stat]]


def aggregation_weights(loss_mask: Tensor, mode: str, max_length: int | None = None) -> tuple[Tensor, Tensor]:
    """Return token weights `[B, T]` and each sequence's share of the divisor `[B]`.

    `token`: Σ m·ℓ / Σ m (DAPO). `sequence`: mean over each sequence, then over sequences (GRPO as published).
    `sequence_sum`: sum over each sequence, then mean over sequences (RLOO: the log-prob of an answer is Σ_t logp).
    `constant`: Σ m·ℓ / (sequences · max_length) (Dr.GRPO: independent of the length of answers).
    """
    mask = loss_mask.float()
    lengths = mask.sum(dim=1)
    if mode == "token":
        return mask, lengths
    if mode == "sequence":
        return mask / lengths.clamp(min=1)[:, None], (lengths > 0).float()
    if mode == "sequence_sum":
        return mask, (lengths > 0).float()
    if mode == "constant":
        if not max_length:
            raise ValueError("loss aggregation `constant` needs max_length")
        return mask, torch.full_like(lengths, float(max_length)) * (lengths > 0)
    raise ValueError(f"unknown loss aggregation {mode!r}; use token, sequence, sequence_sum or constant")


def clip_loss(tokens: Tokens, clip: Clip, c_clip: float | None = None) -> LossAndStats:
    """PPO's clipped surrogate (arXiv 1707.06347), also of GRPO, DAPO (2503.14476, high > low) and others.

    `u = exp(logp − prox)`, `ℓ = max(−A·u, −A·clip(u))`; dual clip for A < 0 (1912.09729): `ℓ = min(ℓ, −c·A)`. Weighted
    by `exp(prox − behav)` it is decoupled PPO (2505.24298, 2110.00641); with prox = behaviour, ordinary PPO.
    """
    ratio = tokens.ratio()
    plain, bounded = -tokens.advantages * ratio, -tokens.advantages * clip(ratio)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    dual = torch.zeros_like(clipped)
    if c_clip is not None:
        limit = -c_clip * tokens.advantages
        dual = (tokens.advantages < 0) & (limit < loss)
        loss = torch.where(dual, limit, loss)
    stats = _ratio_stats(ratio, clipped, tokens.mask)
    stats["dual_clip_share"] = Stat((dual & tokens.mask).sum(), tokens.mask.sum())
    return (tokens.weights * loss).sum(), stats


def reinforce_loss(tokens: Tokens) -> LossAndStats:
    """REINFORCE (Williams 1992), also of RLOO (arXiv 2402.14740): `ℓ = −A·logp`."""
    logp = torch.where(tokens.mask, tokens.logp, 0.0)
    ratio = tokens.ratio()
    loss = -(tokens.weights * tokens.advantages * logp).sum()
    return loss, _ratio_stats(ratio, torch.zeros_like(tokens.mask), tokens.mask)


def gspo_loss(tokens: Tokens, clip: Clip) -> LossAndStats:
    """GSPO (arXiv 2507.18071): one ratio per sequence, the geometric mean of its tokens' ratios.

    `s = exp(mean_t (logp_t − prox_t))`, `ℓ = max(−A·s, −A·clip(s))` on every token of the sequence.
    """
    ratio = bounded_exp(sequence_mean(tokens.log_ratio(), tokens.mask, tokens.owner))
    plain, bounded = -tokens.advantages * ratio, -tokens.advantages * clip(ratio)
    loss = torch.where(tokens.mask, torch.maximum(plain, bounded), 0.0)
    return (tokens.weights * loss).sum(), _ratio_stats(ratio, bounded > plain, tokens.mask)


def cispo_loss(tokens: Tokens, clip: Clip) -> LossAndStats:
    """CISPO (arXiv 2506.13585): REINFORCE weighted by the clipped ratio.

    `ℓ = −sg(clip(u))·A·logp`. Clipped tokens keep a gradient.
    """
    ratio = tokens.ratio().detach()
    bounded = clip(ratio)
    logp = torch.where(tokens.mask, tokens.logp, 0.0)
    loss = -(tokens.weights * bounded * tokens.advantages * logp).sum()
    return loss, _ratio_stats(ratio, bounded != ratio, tokens.mask)


def sapo_loss(tokens: Tokens) -> LossAndStats:
    """SAPO (arXiv 2511.20347): a smooth gate instead of a clip; `τ` depends on the sign of the advantage.

    `ℓ = −A·(4/τ)·σ(τ(u − 1))`. At u = 1 its gradient is that of PPO.
    """
    ratio = tokens.ratio()
    tau = torch.where(tokens.advantages > 0, 1.0, 1.05)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    loss = -(tokens.weights * tokens.advantages * gate).sum()
    return loss, _ratio_stats(ratio, torch.zeros_like(tokens.mask), tokens.mask)


# Losses by the name in `api.algorithms` and in `actor.loss`, called with tokens, clip range and dual clip.
LOSSES: dict[str, Callable[[Tokens, Clip, float | None], LossAndStats]] = {
    "clip": clip_loss,
    "reinforce": lambda tokens, _clip, _c_clip: reinforce_loss(tokens),
    "gspo": lambda tokens, clip, _c_clip: gspo_loss(tokens, clip),
    "cispo": lambda tokens, clip, _c_clip: cispo_loss(tokens, clip),
    "sapo": lambda tokens, _clip, _c_clip: sapo_loss(tokens),
}


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return `Σ weights·values` of the KL or entropy of tokens; those of weight 0 may hold anything."""
    return (weights * torch.where(weights > 0, values, 0.0)).sum()


def sequence_mean(values: Tensor, mask: Tensor, owner: Tensor) -> Tensor:
    """Return the mean over the trained tokens of each sequence at its tokens `[N]`; differentiable."""
    num = int(owner[-1]) + 1 if len(owner) else 0
    kept = mask.to(values.dtype)
    total = values.new_zeros(num).index_add(0, owner, values * kept)
    count = values.new_zeros(num).index_add(0, owner, kept)
    return (total / count.clamp(min=1))[owner]


def _ratio_stats(ratio: Tensor, clipped: Tensor, mask: Tensor) -> dict[str, Stat]:
    kept = torch.where(mask, ratio.detach(), 0.0)
    return {
        "ratio/mean": Stat(kept.sum(), mask.sum()),
        "ratio/max": Stat(kept.amax()),
        "clip_share": Stat((clipped & mask).sum(), mask.sum()),
    }
