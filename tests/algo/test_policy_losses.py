"""Each objective against a loop over tokens that follows its formula, values and gradients."""

import math

import pytest
import torch

from arealite.algo.policy_losses import aggregation_weights, decoupled_ppo_loss


def example(num=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    behav = -2 + torch.randn(num, generator=g)
    prox = behav + 0.8 * torch.randn(num, generator=g)
    logp = prox + 0.4 * torch.randn(num, generator=g)
    advantages = torch.randn(num, generator=g)
    weights = (torch.rand(num, generator=g) < 0.8).float()
    return logp.requires_grad_(), prox, behav, advantages, weights


def naive_decoupled(logp, prox, behav, advantages, weights, eps, eps_high, c_clip, cap):
    total, clipped, capped = 0.0, 0, 0
    grads = [0.0] * len(logp)
    for i, (lp, px, bh, a, m) in enumerate(
        zip(logp, prox, behav, advantages, weights, strict=True)
    ):
        if m == 0:
            continue
        u = math.exp(lp - px)
        bounded = min(max(u, 1 - eps), 1 + eps_high)
        loss, grad = -a * u, -a * u
        if -a * bounded > loss:
            loss, grad, clipped = -a * bounded, 0.0, clipped + 1
        if c_clip is not None and a < 0 and -c_clip * a < loss:
            loss, grad = -c_clip * a, 0.0
        w = math.exp(px - bh)
        if cap is not None and w > cap:
            w, capped = 0.0, capped + 1
        total += m * w * loss
        grads[i] = m * w * grad
    return total, grads, clipped, capped


@pytest.mark.parametrize(
    "eps_high,c_clip,cap", [(None, None, None), (0.28, None, 2.0), (0.28, 1.5, 2.0)]
)
def test_decoupled_ppo_equals_its_formula(eps_high, c_clip, cap):
    logp, prox, behav, advantages, weights = example()
    loss, stats = decoupled_ppo_loss(
        logp, prox, behav, advantages, weights, 0.2, eps_high, c_clip, cap
    )
    loss.backward()
    tensors = (x.tolist() for x in (logp, prox, behav, advantages, weights))
    total, grads, clipped, capped = naive_decoupled(*tensors, 0.2, eps_high or 0.2, c_clip, cap)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert logp.grad.tolist() == pytest.approx(grads, rel=1e-4, abs=1e-6)
    count = int((weights > 0).sum())
    assert int(stats["clip_share"].total) == clipped
    assert int(stats["behav_capped_share"].total) == capped
    assert int(stats["clip_share"].weight) == count
    if cap is None:
        ratio = torch.exp(prox - behav)[weights > 0]
        assert stats["behav_weight/max"].total.item() == pytest.approx(ratio.max().item())


def test_decoupled_is_plain_ppo_when_prox_is_behaviour():
    logp, _, behav, advantages, weights = example()
    loss, stats = decoupled_ppo_loss(logp, behav, behav, advantages, weights, 0.2)
    u = torch.exp(logp - behav)
    expected = torch.maximum(-advantages * u, -advantages * u.clamp(0.8, 1.2))
    torch.testing.assert_close(loss, (expected * weights).sum())
    assert stats["behav_kl/k1"].total.item() == stats["behav_kl/k3"].total.item() == 0


def test_masked_tokens_may_hold_anything():
    logp, prox, behav, advantages, weights = example()
    prox = torch.where(weights > 0, prox, -math.inf)
    loss, _ = decoupled_ppo_loss(logp, prox, behav, advantages, weights)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logp.grad).all()


def test_aggregation():
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
    losses = torch.arange(12.0).view(3, 4)

    def mean(mode, **kwargs):
        weights, norms = aggregation_weights(mask, mode, **kwargs)
        return ((weights * losses).sum() / norms.sum()).item()

    assert mean("token") == pytest.approx((0 + 1 + 2 + 3 + 5) / 5)
    assert mean("sequence") == pytest.approx((1.5 + 5) / 2)
    assert mean("constant", max_length=10) == pytest.approx(11 / 20)
    with pytest.raises(ValueError, match="needs the length"):
        aggregation_weights(mask, "constant")
