"""Turns rewards into advantages: shaping, normalization, KL penalties, GAE.

Pure functions on padded tensors, used by the actor. They change nothing in place. Group membership is explicit
(`group_ids`) and does not depend on the position of a row.

B sequences, T padded length, S samples (attempts; one or several sequences each).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Limit of the exponent in k3: e^89 is infinite in fp32, and a sum over a batch must be finite too.
_MAX_EXPONENT = 60.0


def shape_rewards(rewards: Tensor, bias: float = 0.0, scaling: float = 1.0, clip: float | None = None) -> Tensor:
    """Return `clip((r + bias)·scaling, ±clip)`, `[B]`."""
    shaped = (rewards.float() + bias) * scaling
    return shaped if clip is None else shaped.clamp(-clip, clip)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Return DAPO's penalty for long answers (arXiv 2503.14476 §3.4), `[B]`.

    `clip(−(len − (L − O)) / O, −1, 0)` with limit `L` and buffer `O`.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must be in (0, max_length={max_length}], got {buffer}")
    return (-(lengths.float() - (max_length - buffer)) / buffer).clamp(-1.0, 0.0)


def longest_answers(mask: Tensor) -> Tensor:
    """Return the length of the longest run of trained tokens of each row, `[B]`: its longest answer."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    before = torch.where(mask, -1, positions).cummax(dim=1).values
    return torch.where(mask, positions - before, 0).amax(dim=1)


def normalize(
    values: Tensor,
    group_ids: Tensor,
    mean_level: str = "group",
    std_level: str = "group",
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Return `(r − mean) / (std + eps)`, each over the group, the batch, or not at all; `[B]`.

    GRPO (arXiv 2402.03300): group, group. Dr.GRPO (2503.20783): group, none. LitePPO (2508.08221): group, batch. RLOO
    (2402.14740): group with `leave_one_out`, the mean of the other rows: `(Σ_g r − r) / (n_g − 1)`. The standard
    deviation is the unbiased one of the raw rewards. A group of one has std 0, and with leave-one-out mean 0. Where
    all rewards are equal, the result is exactly 0.
    """
    if values.shape != group_ids.shape:
        raise ValueError(f"values {values.shape} and group_ids {group_ids.shape} differ in shape")
    values = values.double()
    groups = group_ids.unique(return_inverse=True)[1]
    whole = torch.zeros_like(groups)
    mean = torch.zeros_like(values)
    if mean_level != "none":
        mean = _mean(values, groups if mean_level == "group" else whole, leave_one_out)
    centred = values - mean
    if std_level != "none":
        owner = groups if std_level == "group" else whole
        std = _std(values, owner)
        flat = _spread(values, owner) == 0
        centred = torch.where(flat, 0.0, centred / (std + eps))
    return centred.float()


def sample_of_row(group_ids: Tensor, sample_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sample of each row, numbered from 0, `[B]`, and the group of each sample, `[S]`.

    Rows with the same group and the same `sample_ids` belong to one sample.
    """
    pairs, owner = torch.stack([group_ids, sample_ids], dim=1).unique(dim=0, return_inverse=True)
    return owner, pairs[:, 0]


class RowReturns(NamedTuple):
    """Sums over the trained tokens of each row, and its reward, `[B]` in float64, for `sample_baselines`."""

    count: Tensor
    total: Tensor
    squares: Tensor
    low: Tensor
    high: Tensor
    reward: Tensor

    @classmethod
    def of(cls, returns: Tensor, mask: Tensor, rewards: Tensor) -> "RowReturns":
        """Sum `returns [B, T]` over the masked tokens; `rewards [B]` are those of the rows."""
        kept = torch.where(mask, returns.double(), 0.0)
        low, high = (torch.where(mask, returns.double(), edge) for edge in (torch.inf, -torch.inf))
        sums = mask.sum(1).double(), kept.sum(1), kept.square().sum(1)
        return cls(*sums, low.amin(1), high.amax(1), rewards.double())

    def filled(self, owner: Tensor) -> "RowReturns":
        """Return these sums; a row of a sample without trained tokens counts as one with its reward."""
        counts = torch.zeros_like(self.count).index_add(0, owner, self.count)
        own, single = self.reward, torch.ones_like(self.count)
        instead = (single, own, own.square(), own, own, own)
        return RowReturns(*(torch.where(counts[owner] > 0, a, b) for a, b in zip(self, instead, strict=True)))


def sample_baselines(
    rows: RowReturns,
    owner: Tensor,
    sample_groups: Tensor,
    mean_level: str = "group",
    std_level: str = "group",
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Return mean and divisor for each row, `[B]`: the advantage is `(G − mean) / divisor`.

    As `normalize`, with two differences. Every sample counts once, however many rows and tokens it has: its value is
    the mean of the returns `G` over its trained tokens, or its reward if it has none. And returns may differ within a
    sample, by the turn that sampled a token: `std² = Σ_s mean_t (G_t − mean)² / (n − 1)` over the `n` samples. If the
    returns of a sample are all equal, that is the standard deviation of `normalize`. Where all returns are equal, the
    divisor is infinite.
    """
    num, rows = len(sample_groups), rows.filled(owner)
    sums = [part.new_zeros(num).index_add(0, owner, part) for part in rows[:3]]
    values, squares = sums[1] / sums[0], sums[2] / sums[0]
    groups = sample_groups.unique(return_inverse=True)[1]
    whole = torch.zeros_like(groups)
    mean, divisor = torch.zeros_like(values), torch.ones_like(values)
    if mean_level != "none":
        mean = _mean(values, groups if mean_level == "group" else whole, leave_one_out)
    if std_level != "none":
        level = groups if std_level == "group" else whole
        centre = _mean(values, level, leave_one_out=False)
        spread = (squares - 2 * centre * values + centre.square()).clamp(min=0)
        total, samples = _sums(spread, level)
        divisor = (total / (samples - 1).clamp(min=1)).sqrt()[level] + eps
        low, high = _extremes(rows, level[owner])
        divisor = torch.where((high <= low)[level], torch.inf, divisor)
    return mean[owner], divisor[owner]


def _extremes(rows: RowReturns, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest return of each group."""
    num = int(owner.max()) + 1 if len(owner) else 0
    low = rows.low.new_full((num,), torch.inf).scatter_reduce(0, owner, rows.low, "amin")
    return low, rows.high.new_full((num,), -torch.inf).scatter_reduce(0, owner, rows.high, "amax")


def _sums(values: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    num = int(owner.max()) + 1 if len(owner) else 0
    total = values.new_zeros(num).index_add(0, owner, values)
    count = values.new_zeros(num).index_add(0, owner, torch.ones_like(values))
    return total, count


def _mean(values: Tensor, owner: Tensor, leave_one_out: bool) -> Tensor:
    total, count = _sums(values, owner)
    if leave_one_out:
        return (total[owner] - values) / (count[owner] - 1).clamp(min=1)
    return (total / count)[owner]


def _std(values: Tensor, owner: Tensor) -> Tensor:
    centred = values - _mean(values, owner, leave_one_out=False)
    total, count = _sums(centred.square(), owner)
    return (total / (count - 1).clamp(min=1)).sqrt()[owner]


def _spread(values: Tensor, owner: Tensor) -> Tensor:
    """Return the largest minus the smallest value of each entry's group."""
    num = int(owner.max()) + 1 if len(owner) else 0
    high = values.new_full((num,), -torch.inf).scatter_reduce(0, owner, values, "amax")
    low = values.new_full((num,), torch.inf).scatter_reduce(0, owner, values, "amin")
    return (high - low)[owner]


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str = "k1") -> Tensor:
    """Estimate KL(π‖ref) per token from samples of π (Schulman 2020), with `Δ = logp − ref_logp`.

    k1 = Δ (unbiased), k2 = Δ²/2 (low variance), k3 = e^{−Δ} − 1 + Δ (unbiased, never negative). In k3 Δ is at least
    −60; a token beyond that gets no gradient.
    """
    delta = logp - ref_logp
    if kind == "k1":
        return delta
    if kind == "k2":
        return delta.square() / 2
    if kind == "k3":
        delta = delta.clamp(min=-_MAX_EXPONENT)
        return torch.expm1(-delta) + delta
    raise ValueError(f"unknown KL estimator {kind!r}; use k1, k2 or k3")


def token_rewards(rewards: Tensor, loss_mask: Tensor, kl: Tensor | None = None, kl_ctl: float = 0.0) -> Tensor:
    """Put the reward on the last trained token, minus `kl_ctl·kl` on every trained token; `[B, T]`.

    With `rewards [B, T]`, the returns of the turns that sampled the tokens, a token gets its return less that of the
    next trained token. So the sum from a token on is its return.
    """
    mask = loss_mask.bool()
    positions = torch.arange(mask.shape[1], device=mask.device)
    if rewards.dim() == 2:
        own = torch.where(mask, rewards.float(), 0.0)
        # Position of the next trained token; one behind the end without one.
        later = torch.where(mask, positions, mask.shape[1]).flip(1).cummin(1).values.flip(1)
        after = torch.nn.functional.pad(later[:, 1:], (0, 1), value=mask.shape[1])
        placed = torch.where(mask, own - torch.nn.functional.pad(own, (0, 1)).gather(1, after), 0.0)
    else:
        last = torch.where(mask, positions, -1).max(dim=1).values
        on_last = (positions == last[:, None]) & mask
        placed = torch.where(on_last, rewards.float()[:, None], 0.0)
    return placed if kl is None else placed - kl_ctl * torch.where(mask, kl, 0.0)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    truncated: Tensor,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns `[B, T]` by generalized advantage estimation (arXiv 1506.02438).

    `δ_t = r_t + γ·V_{t'} − V_t`, `A_t = δ_t + γλ·A_{t'}`, where `t'` is the next trained token: prompt and tool tokens
    are skipped. After the last one, `V` is 0 if the episode ended. If it was `truncated`, `V` is `final_values [B]`,
    or the last token's value if that is None. Returns are `A + V`. Both are 0 on tokens that are not trained.
    """
    mask = loss_mask.bool()
    num_rows, length = mask.shape
    if final_values is None:
        last = torch.where(mask, torch.arange(length, device=mask.device), 0).amax(dim=1)
        final_values = values.gather(1, last[:, None]).squeeze(1)
    next_value = torch.where(truncated.bool(), final_values, 0.0)
    next_advantage = values.new_zeros(num_rows)
    advantages = torch.zeros_like(values)
    for t in range(length - 1, -1, -1):
        here = mask[:, t]
        delta = token_rewards[:, t] + discount * next_value - values[:, t]
        advantage = delta + discount * gae_lambda * next_advantage
        advantages[:, t] = torch.where(here, advantage, 0.0)
        next_advantage = torch.where(here, advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
    return advantages, torch.where(mask, advantages + values, 0.0)


def rewards_to_go(token_rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Return `Σ_{t' ≥ t} r_{t'}` over trained tokens, `[B, T]`: GAE without critic, γ = λ = 1."""
    mask = loss_mask.bool()
    kept = torch.where(mask, token_rewards, 0.0)
    return torch.where(mask, kept.flip(1).cumsum(1).flip(1), 0.0)


def whiten(values: Tensor, mask: Tensor, count: float, total: float, square_total: float) -> Tensor:
    """Return `(A − mean) / (std + 1e-8)` on masked entries, from the sums over the batch of all ranks.

    As in PPO and REINFORCE++ (arXiv 2501.03262), advantages of all tokens of the batch get mean 0 and std 1.
    """
    mean = total / max(count, 1.0)
    variance = max(square_total / max(count, 1.0) - mean * mean, 0.0)
    return torch.where(mask, (values - mean) / (variance**0.5 + 1e-8), 0.0)


def adapted_kl_ctl(kl_ctl: float, kl: float, target: float, num_sequences: float, horizon: float = 10_000.0) -> float:
    """Return the adaptive KL weight (arXiv 1909.08593 §2.2) after a batch with `kl` per sequence.

    `β ← β·(1 + clip(kl/target − 1, ±0.2)·n / horizon)`. A KL that is not a number changes nothing: its batch makes no
    step, and the weight must be good for the next one.
    """
    if math.isnan(kl):
        return kl_ctl
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return kl_ctl * (1.0 + error * num_sequences / horizon)


def distillation_advantages(logp: Tensor, teacher_logp: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Return `coef·(teacher_logp − logp)` per token, `[B, T]`, for on-policy distillation.

    Its expected gradient is that of −coef·KL(π‖teacher) at that token (reverse KL, arXiv 2306.13649). It is added to
    the other advantages.
    """
    return torch.where(mask.bool(), coef * (teacher_logp - logp), 0.0)
