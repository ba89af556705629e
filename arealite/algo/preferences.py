"""Losses of critics, reward models, DPO and related methods: pure functions that return sums.

Sequence-level inputs are `[P]` (pairs) or `[B]` (answers).
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, eps_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return PPO's value loss and which tokens were clipped; inputs are `[N]`.

    `Σ m·½·max((V − R)², (V_clip − R)²)`, `V_clip = V_old + clip(V − V_old, ±ε)` (arXiv 1707.06347 and its code).
    """
    loss = (values - returns).square()
    clipped = torch.zeros_like(mask, dtype=torch.bool)
    if eps_clip is not None:
        bounded = old_values + (values - old_values).clamp(-eps_clip, eps_clip)
        other = (bounded - returns).square()
        clipped = (other > loss) & mask.bool()
        loss = torch.maximum(loss, other)
    return 0.5 * torch.where(mask.bool(), loss, 0.0).sum(), clipped


def reward_model_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Bradley–Terry: `−Σ log σ(s_chosen − s_rejected)`, scores `[P]` at each answer's last token."""
    return -logsigmoid(chosen - rejected).sum()


def dpo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """DPO (arXiv 2305.18290): `−Σ log σ(β(Δ_chosen − Δ_rejected))`, `Δ = Σ_t logp − ref_logp` `[P]`."""
    return -logsigmoid(beta * (chosen - rejected)).sum()


def ipo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """IPO (arXiv 2310.12036): `Σ (Δ_chosen − Δ_rejected − 1/(2β))²`, `Δ` averaged over tokens."""
    return (chosen - rejected - 1.0 / (2.0 * beta)).square().sum()


def kto_loss(
    delta: Tensor,
    is_chosen: Tensor,
    baseline: Tensor | float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO (arXiv 2402.01306): single answers `[B]` instead of pairs.

    `Σ w_D·(1 − σ(β(Δ − z)))` if chosen, `Σ w_U·(1 − σ(β(z − Δ)))` if rejected. `z ≥ 0` is the KL from the reference,
    estimated on the batch before the step and not differentiated. The weights are the paper's λ_D and λ_U.
    """
    sign = torch.where(is_chosen.bool(), 1.0, -1.0)
    weight = torch.where(is_chosen.bool(), desirable_weight, undesirable_weight)
    return (weight * (1.0 - torch.sigmoid(beta * sign * (delta - baseline)))).sum()


def orpo_loss(chosen: Tensor, rejected: Tensor, nll: Tensor, beta: float) -> Tensor:
    """ORPO (arXiv 2403.07691): NLL of the chosen answer and an odds ratio, no reference.

    `Σ nll_chosen − β·log σ(log odds_chosen − log odds_rejected)`, `odds = p / (1 − p)`. `chosen` and `rejected` are
    mean log-probs per token `[P]`, `nll [P]` is the chosen one's mean NLL.
    """
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return (nll - beta * logsigmoid(log_odds)).sum()


def simpo_loss(chosen: Tensor, rejected: Tensor, beta: float, margin: float = 0.0) -> Tensor:
    """SimPO (arXiv 2405.14734): `−Σ log σ(β(mean logp_chosen − mean logp_rejected) − γ)`, no reference."""
    return -logsigmoid(beta * (chosen - rejected) - margin).sum()


def _log1mexp(x: Tensor) -> Tensor:
    """Return `log(1 − e^x)` for x < 0, without cancellation near 0."""
    x = x.clamp(max=-1e-6)
    return torch.where(x > -0.693, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))
