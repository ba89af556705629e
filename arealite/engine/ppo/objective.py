"""The policy loss of an actor on one packed micro-batch: policy term, KL term and entropy term.

The actor calls it for every micro-batch. Formulas are in `algo/`, the choice of the algorithm in `api/algorithms`.
"""

from __future__ import annotations

import torch

from arealite.algo.advantages import kl_estimate
from arealite.algo.off_policy import behaviour_stats, behaviour_weights, interpolated_prox
from arealite.algo.policy_losses import LOSSES, Clip, LossAndStats, Tokens, entropy_bonus, kl_loss
from arealite.api.algorithms import Objective
from arealite.api.cli_args import PPOActorConfig
from arealite.api.io_struct import Batch, Stat
from arealite.utils.data import sequence_of_token


def policy_loss(outputs: Batch, mb: Batch, config: PPOActorConfig, objective: Objective, version: int) -> LossAndStats:
    """Return the loss and its statistics; `mb` holds `loss_weights`, `advantages` and log-probs."""
    logp, weights = outputs["logp"], mb["loss_weights"]
    mask = weights > 0
    owner = sequence_of_token(mb["cu_seqlens"])
    prox = proximal(logp, mb, config, version)
    behaviour, kept = behaviour_weights(
        prox, mb["logprobs"], mask, owner,
        config.behav_imp_weight_cap, config.behav_imp_weight_floor, config.behav_imp_weight_mode,
    )  # fmt: skip
    tokens = Tokens(logp, prox, mb["advantages"], weights * behaviour, owner)
    high = config.eps_clip if objective.eps_clip_higher is None else objective.eps_clip_higher
    loss, stats = LOSSES[objective.loss](tokens, Clip(config.eps_clip, high), config.c_clip)
    stats |= behaviour_stats(prox, mb["logprobs"], behaviour, kept, mask)
    # KL between the policy at the start of the update and now.
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


def proximal(logp: torch.Tensor, mb: Batch, config: PPOActorConfig, version: int) -> torch.Tensor:
    """Return the log-probs that ratios are relative to."""
    if not config.use_decoupled_loss:
        return mb["logprobs"]
    if config.prox_logp == "interpolate":
        return interpolated_prox(logp, mb["logprobs"], mb["versions"], version)
    # The first minibatch of prox_logp=first_pass has none: its own pass is that of the proximal policy.
    return mb.get("prox_logp", logp.detach())


def loss_norm(mb: Batch) -> torch.Tensor:
    """Return the divisor of the summed loss: a sum over all sequences of the batch, also those left out."""
    return mb["loss_norm"].sum()
