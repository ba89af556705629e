"""The configured policy objective on one packed micro-batch: which pure functions of `algo/` are added up, and how.

Called by the actor for every micro-batch. Everything the configuration chooses is chosen here; formulas are in `algo/`.
"""

from __future__ import annotations

import torch

from arealite.algo.advantages import kl_estimate
from arealite.algo.off_policy import behaviour_stats, behaviour_weights, interpolated_prox
from arealite.algo.policy_losses import (
    Clip,
    LossAndStats,
    Tokens,
    cispo_loss,
    clip_loss,
    entropy_bonus,
    gspo_loss,
    kl_loss,
    reinforce_loss,
    sapo_loss,
)
from arealite.api.algorithms import Objective
from arealite.api.cli_args import PPOActorConfig
from arealite.api.io_struct import Batch, Stat


def policy_loss(outputs: Batch, mb: Batch, config: PPOActorConfig, objective: Objective, version: int) -> LossAndStats:
    """Objective, KL and entropy terms; `mb` holds `loss_weights`, `advantages`, `logprobs` and what the config needs."""
    logp, weights = outputs["logp"], mb["loss_weights"]
    mask = weights > 0
    owner = sequence_of_token(mb["cu_seqlens"])
    prox = proximal(logp, mb, config, version)
    behaviour, kept = behaviour_weights(
        prox, mb["logprobs"], mask, owner,
        config.behav_imp_weight_cap, config.behav_imp_weight_floor, config.behav_imp_weight_mode,
    )  # fmt: skip
    tokens = Tokens(logp, prox, mb["advantages"], weights * behaviour, owner)
    loss, stats = _surrogate(tokens, config, objective)
    stats |= behaviour_stats(prox, mb["logprobs"], behaviour, kept, mask)
    # how far the update has come from where it began
    moved = kl_estimate(prox, logp.detach(), "k3")
    stats["prox_kl"] = Stat(torch.where(mask, moved, 0.0).sum(), mask.sum())
    entropy = torch.where(mask, outputs["entropy"], 0.0)
    stats["entropy"] = Stat(entropy.detach().sum(), mask.sum())
    if config.entropy_coef:
        loss = loss + config.entropy_coef * entropy_bonus(outputs["entropy"], weights)
    if config.kl_loss_coef:
        kl = kl_estimate(logp, mb["ref_logp"], config.kl_estimator or "k3")
        loss = loss + config.kl_loss_coef * kl_loss(kl, weights)
        stats["kl_loss"] = Stat(torch.where(mask, kl, 0.0).detach().sum(), mask.sum())
    return loss, stats


def _surrogate(tokens: Tokens, config: PPOActorConfig, objective: Objective) -> LossAndStats:
    high = config.eps_clip if objective.eps_clip_higher is None else objective.eps_clip_higher
    clip = Clip(config.eps_clip, high)
    if objective.loss == "clip":
        return clip_loss(tokens, clip, config.c_clip)
    if objective.loss == "gspo":
        return gspo_loss(tokens, clip)
    if objective.loss == "cispo":
        return cispo_loss(tokens, clip)
    if objective.loss == "sapo":
        return sapo_loss(tokens)
    assert objective.loss == "reinforce", objective.loss
    return reinforce_loss(tokens)


def proximal(logp: torch.Tensor, mb: Batch, config: PPOActorConfig, version: int) -> torch.Tensor:
    """Log-probs of the policy that ratios are taken against."""
    if not config.use_decoupled_loss:
        return mb["logprobs"]
    if config.prox_logp == "interpolate":
        return interpolated_prox(logp, mb["logprobs"], mb["versions"], version)
    # Absent in the first minibatch of prox_logp=first_pass: there this pass is the proximal policy's.
    return mb.get("prox_logp", logp.detach())


def sequence_of_token(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Which sequence each packed token belongs to, `[N]`."""
    lengths = cu_seqlens.diff().long()
    return torch.arange(len(lengths), device=cu_seqlens.device).repeat_interleave(lengths)


def loss_norm(mb: Batch) -> torch.Tensor:
    """What the summed loss is divided by: Σ over all sequences of the batch, the left-out ones included."""
    return mb["loss_norm"].sum()
