"""Corrections for off-policy data: proximal log-probs, importance weights, M2PO's mask.

Pure functions on packed (`[N]`) or padded (`[B, T]`) tensors. `logprobs` are those that the inference server reported
when it sampled; `prox_logp` are those of the policy at the start of the update. Nothing here is differentiated.
"""

import torch
from torch import Tensor

from arealite.algo.advantages import kl_estimate
from arealite.algo.policy_losses import sequence_mean
from arealite.api.io_struct import Stat


def interpolated_prox(
    logp: Tensor, logprobs: Tensor, versions: Tensor, current_version: int, progress: float = 1.0
) -> Tensor:
    """Interpolate proximal log-probs between behaviour and current policy, without a forward pass.

    A token sampled `a` versions ago has `prox = behav + (logp − behav)·a / (a + progress)`, where `progress` is the
    share of this update's steps that are done. It is exact if every version moves the log-prob of a token by as much.
    Before the first step (0) the current policy is the proximal one.
    """
    if progress == 0.0:
        return logp.detach()
    age = (current_version - versions).clamp(min=0).to(logp.dtype)
    return logprobs + (logp.detach() - logprobs) * (age / (age + progress))


def behaviour_weights(
    prox_logp: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    owner: Tensor,
    cap: float | None,
    floor: float = 0.0,
    mode: str = "token_mask",
) -> tuple[Tensor, Tensor]:
    """Return `w = exp(prox − behav) [N]` within bounds, and which tokens are kept.

    `token_mask`: drop tokens outside `[floor, cap]` (decoupled PPO, arXiv 2505.24298). `token_clamp`: clamp them
    (TIS). `sequence_*`: one weight per sequence, the geometric mean of its tokens' weights, masked (MIS) or clamped.
    `prefix_clamp`: the product over a token and all before it (per-decision importance sampling, Precup 2000). It has
    less bias on old data, and suits answers of up to a few hundred tokens.
    """
    log_weight = torch.where(mask, prox_logp - logprobs, 0.0).detach()
    level, action = mode.split("_")
    if level == "sequence":
        log_weight = sequence_mean(log_weight, mask, owner)
    elif level == "prefix":
        log_weight = _prefix_sum(log_weight, owner)
    weight = log_weight.exp()
    upper = torch.inf if cap is None else cap
    kept = mask
    if action == "mask":
        kept = mask & (weight >= floor) & (weight <= upper)
    else:
        weight = weight.clamp(floor, upper)
    return torch.where(kept, weight, 0.0), kept


def _prefix_sum(values: Tensor, owner: Tensor) -> Tensor:
    """Return the cumulative sum within each sequence, `[N]`."""
    running = values.double().cumsum(0)
    totals = running.new_zeros(int(owner[-1]) + 1 if len(owner) else 0)
    totals.index_add_(0, owner, values.double())
    return (running - (totals.cumsum(0) - totals)[owner]).to(values.dtype)


def behaviour_stats(prox_logp: Tensor, logprobs: Tensor, weight: Tensor, kept: Tensor, mask: Tensor) -> dict[str, Stat]:
    """Return statistics of the distance between sampling and proximal policy.

    KL(behaviour‖prox) by k1 and k3, weights, and the share of tokens dropped. The actor computes the effective sample
    size `ess = mean² / mean_square` of the weights (a share of the tokens).
    """
    count = mask.sum()
    delta = torch.where(mask, logprobs - prox_logp, 0.0).detach()
    return {
        "behav_kl/k1": Stat(delta.sum(), count),
        "behav_kl/k3": Stat(kl_estimate(delta, torch.zeros_like(delta), "k3").sum(), count),
        "behav_weight/mean": Stat(weight.sum(), kept.sum()),
        "behav_weight/mean_square": Stat(weight.square().sum(), kept.sum()),
        "behav_weight/max": Stat(weight.amax()),
        "behav_capped_share": Stat((mask & ~kept).sum(), count),
    }


def fresh_kl(prox_logp: Tensor, logprobs: Tensor, age: Tensor, mask: Tensor) -> Stat:
    """Return KL(behaviour‖prox) by k3 over tokens of `age` 0, which the proximal policy itself sampled.

    It measures how differently server and trainer compute. A token whose answer began under older weights counts too;
    the server may have kept their cache.
    """
    kept = mask & (age == 0)
    delta = torch.where(kept, logprobs - prox_logp, 0.0).detach()
    return Stat(kl_estimate(delta, torch.zeros_like(delta), "k3").sum(), kept.sum())


def m2po_mask(prox_logp: Tensor, logprobs: Tensor, threshold: float = 0.04) -> Tensor:
    """Return the mask of M2PO (arXiv 2510.01161) over all trained tokens of the batch, `[N]`.

    Drops the largest `(prox − behav)²` until the mean of the rest is below `threshold`.
    """
    ordered, index = (prox_logp - logprobs).double().square().sort(stable=True)
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    # The running mean of an ascending sequence never falls, so the kept tokens are a prefix.
    return torch.zeros_like(index, dtype=torch.bool).index_copy(0, index, means < threshold)
