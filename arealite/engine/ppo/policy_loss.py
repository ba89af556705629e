"""The loss of `FSDPPPOActor` on a packed micro-batch: policy, KL and entropy terms.

The formulas are pure functions in `algo/`; this module reads the configuration. N packed tokens.
"""

import torch

from arealite.algo.advantages import kl_estimate
from arealite.algo.off_policy import behaviour_stats, behaviour_weights, fresh_kl, interpolated_prox
from arealite.algo.policy_losses import LOSSES, Clip, LossAndStats, Tokens, weighted_sum
from arealite.api.algorithms import Objective
from arealite.api.cli_args import PPOActorConfig
from arealite.api.io_struct import Batch, Stat
from arealite.engine.ppo.train_logp import TrainLogp
from arealite.utils.data import sequence_of_token

# What one token counts at most in the mean KL of an update.
_MOST_TOKEN_KL = 10.0


def policy_loss(
    outputs: Batch,
    mb: Batch,
    config: PPOActorConfig,
    objective: Objective,
    version: int,
    logps: TrainLogp | None = None,
    progress: float = 0.0,
) -> LossAndStats:
    """Return the loss of a packed micro-batch (policy, KL and entropy term) and its statistics.

    `progress` is the share of the update's steps before this one.
    """
    logp, weights = outputs["logp"], mb["loss_weights"]
    mask = weights > 0
    owner = sequence_of_token(mb["cu_seqlens"])
    if logps is not None:
        logps.add(mb, owner, logp)
    prox = _proximal(logp, mb, config, version, progress)
    behaviour, kept = behaviour_weights(
        prox, mb["logprobs"], mask, owner,
        config.behav_imp_weight_cap, config.behav_imp_weight_floor, config.behav_imp_weight_mode,
    )  # fmt: skip
    tokens = Tokens(logp, prox, mb["advantages"], weights * behaviour, owner)
    high = config.eps_clip if objective.eps_clip_higher is None else objective.eps_clip_higher
    loss, stats = LOSSES[objective.loss](tokens, Clip(config.eps_clip, high), config.c_clip)
    stats |= behaviour_stats(prox, mb["logprobs"], behaviour, kept, mask)
    if "versions" in mb and config.use_decoupled_loss and config.prox_logp != "interpolate":
        stats["behav_kl/fresh"] = fresh_kl(prox, mb["logprobs"], version - mb["versions"], mask)
    start = prox
    if config.use_decoupled_loss and config.prox_logp == "interpolate":
        # The same share for all minibatches: `max_update_kl` subtracts the KL of the first one.
        start = interpolated_prox(logp, mb["logprobs"], mb["versions"], version)
    # KL between the policy at the start of the update and now. One token of tiny probability must not end the update.
    moved = kl_estimate(start, logp.detach(), "k3").clamp(max=_MOST_TOKEN_KL)
    stats["prox_kl"] = Stat(torch.where(mask, moved, 0.0).sum(), mask.sum())
    entropy = torch.where(mask, outputs["entropy"], 0.0)
    stats["entropy"] = Stat(entropy.detach().sum(), mask.sum())
    if config.entropy_coef:
        loss = loss - config.entropy_coef * weighted_sum(outputs["entropy"], weights)
    if config.kl_loss_coef:
        kl = kl_estimate(logp, mb["ref_logp"], config.kl_estimator or "k3")
        loss = loss + config.kl_loss_coef * weighted_sum(kl, weights)
        stats["kl_loss"] = Stat(torch.where(mask, kl, 0.0).detach().sum(), mask.sum())
    return loss, stats


def _proximal(logp: torch.Tensor, mb: Batch, config: PPOActorConfig, version: int, progress: float) -> torch.Tensor:
    """Return the log-probs that ratios are relative to."""
    if not config.use_decoupled_loss:
        return mb["logprobs"]
    if config.prox_logp == "interpolate":
        return interpolated_prox(logp, mb["logprobs"], mb["versions"], version, progress)
    # The first minibatch of prox_logp=first_pass has none: its own pass is that of the proximal policy.
    return mb.get("prox_logp", logp.detach())


def loss_norm(mb: Batch) -> torch.Tensor:
    """Return the divisor of the summed loss: a sum over all sequences of the batch, also those left out."""
    return mb["loss_norm"].sum()
