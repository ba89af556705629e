"""Policy objectives, one pure function each: sums over the packed tokens of a micro-batch, and their statistics.

The engine divides by a weight summed over the whole global batch, so every loss is a sum here. `weights` carries the mask
and the way of averaging: 1 on trained tokens for a token mean, 1 / (trained tokens of the sequence) for a sequence
mean, 0 elsewhere (see `aggregation_weights`).

N packed tokens. logp: policy being trained; prox_logp: its weights at the start of the update; logprobs: what sampled.
"""

from __future__ import annotations

import torch

from arealite.api.io_struct import Stat

LossAndStats = tuple[torch.Tensor, dict[str, Stat]]


def aggregation_weights(
    loss_mask: torch.Tensor, mode: str, max_length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token weights `[B, T]` and each sequence's share of the normaliser `[B]`, for a padded `loss_mask [B, T]`.

    `token`: Σ m·ℓ / Σ m (DAPO). `sequence`: mean over each sequence, then over sequences (GRPO as published).
    `constant`: Σ m·ℓ / (sequences · max_length) (Dr.GRPO: no preference for short or long answers).
    """
    mask = loss_mask.float()
    lengths = mask.sum(dim=1)
    if mode == "token":
        return mask, lengths
    if mode == "sequence":
        return mask / lengths.clamp(min=1)[:, None], (lengths > 0).float()
    if mode == "constant":
        if not max_length:
            raise ValueError("loss aggregation `constant` needs the length it divides by")
        return mask, torch.full_like(lengths, float(max_length)) * (lengths > 0)
    raise ValueError(f"unknown loss aggregation {mode!r}; use token, sequence or constant")


def decoupled_ppo_loss(
    logp: torch.Tensor,
    prox_logp: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    behav_cap: float | None = None,
) -> LossAndStats:
    """Decoupled PPO (AReaL, arXiv 2505.24298; Hilton et al. 2110.00641).

    `u = exp(logp − prox)`, `ℓ = max(−A·u, −A·clip(u, 1−ε, 1+ε_high))`, dual clip for A < 0 `ℓ = min(ℓ, −c·A)`;
    `w = exp(prox − behav)`, dropped where `w > cap`; result `Σ weights·w·ℓ`. With `prox_logp = logprobs` this is PPO.
    """
    mask = weights > 0
    ratio = torch.exp(torch.where(mask, logp - prox_logp, 0.0))
    upper = eps_clip if eps_clip_higher is None else eps_clip_higher
    clipped_ratio = ratio.clamp(1.0 - eps_clip, 1.0 + upper)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    clipped = -advantages * clipped_ratio > -advantages * ratio
    dual = torch.zeros_like(mask)
    if c_clip is not None:
        limit = -c_clip * advantages
        dual = (advantages < 0) & (limit < loss)
        loss = torch.where(dual, limit, loss)
    behaviour, kept = behaviour_weights(prox_logp, logprobs, mask, behav_cap)
    total = (weights * behaviour * loss).sum()
    stats = ratio_stats(ratio, clipped, dual, mask)
    stats.update(behaviour_stats(prox_logp, logprobs, behaviour, kept, mask))
    return total, stats


def behaviour_weights(
    prox_logp: torch.Tensor, logprobs: torch.Tensor, mask: torch.Tensor, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`w = exp(prox − behav)`, 0 where it exceeds `cap`, and which tokens were kept; never differentiated."""
    weight = torch.exp(torch.where(mask, prox_logp - logprobs, 0.0)).detach()
    kept = mask if cap is None else mask & (weight <= cap)
    return torch.where(kept, weight, 0.0), kept


def ratio_stats(
    ratio: torch.Tensor, clipped: torch.Tensor, dual: torch.Tensor, mask: torch.Tensor
) -> dict[str, Stat]:
    count = mask.sum()
    ratio = ratio.detach()
    return {
        "ratio/mean": Stat(torch.where(mask, ratio, 0.0).sum(), count),
        "ratio/max": Stat(torch.where(mask, ratio, 0.0).amax()),
        "clip_share": Stat((clipped & mask).sum(), count),
        "dual_clip_share": Stat((dual & mask).sum(), count),
    }


def behaviour_stats(
    prox_logp: torch.Tensor,
    logprobs: torch.Tensor,
    weight: torch.Tensor,
    kept: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, Stat]:
    """How far the sampling policy is from the proximal one: KL(behaviour‖prox) by k1 and k3, weights, tokens dropped."""
    count = mask.sum()
    delta = torch.where(mask, logprobs - prox_logp, 0.0).detach()
    return {
        "behav_kl/k1": Stat(delta.sum(), count),
        "behav_kl/k3": Stat((torch.expm1(-delta) + delta).sum(), count),
        "behav_weight/mean": Stat(weight.sum(), kept.sum()),
        "behav_weight/max": Stat(weight.amax()),
        "behav_capped_share": Stat((mask & ~kept).sum(), count),
    }
