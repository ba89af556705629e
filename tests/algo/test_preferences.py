"""Value, reward-model and preference losses against loops that follow their formulas."""

import math

import pytest
import torch

from arealite.algo.preferences import dpo_loss, ipo_loss, kto_loss, orpo_loss, reward_model_loss, simpo_loss, value_loss

G = torch.Generator().manual_seed(0)
CHOSEN, REJECTED = -torch.rand(9, generator=G) * 3, -torch.rand(9, generator=G) * 3
PAIRS = list(zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True))


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def odds(x):
    return math.exp(x) / (1 - math.exp(x))


@pytest.mark.parametrize(
    ("ours", "naive"),
    [
        (reward_model_loss(CHOSEN, REJECTED), lambda c, r: -log_sigmoid(c - r)),
        (dpo_loss(CHOSEN, REJECTED, 0.3), lambda c, r: -log_sigmoid(0.3 * (c - r))),
        (ipo_loss(CHOSEN, REJECTED, 0.3), lambda c, r: (c - r - 1 / 0.6) ** 2),
        (simpo_loss(CHOSEN, REJECTED, 2.0, 0.5), lambda c, r: -log_sigmoid(2.0 * (c - r) - 0.5)),
        (orpo_loss(CHOSEN, REJECTED, -CHOSEN, 0.2), lambda c, r: -c - 0.2 * log_sigmoid(math.log(odds(c) / odds(r)))),
    ],
    ids=["reward_model", "dpo", "ipo", "simpo", "orpo"],
)
def test_pair_losses_equal_their_formula(ours, naive):
    assert ours.item() == pytest.approx(sum(naive(c, r) for c, r in PAIRS), rel=1e-5)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.25)])
def test_kto_equals_its_formula(weights):
    sides = torch.arange(9) % 3 == 0
    ours = kto_loss(CHOSEN, sides, 0.4, 0.5, *weights).item()
    expected = 0.0
    for delta, good in zip(CHOSEN.tolist(), sides.tolist(), strict=True):
        gain = 0.5 * (delta - 0.4) if good else 0.5 * (0.4 - delta)
        expected += weights[0 if good else 1] * (1 - 1 / (1 + math.exp(-gain)))
    assert ours == pytest.approx(expected, rel=1e-5)


def test_orpo_is_finite_for_a_certain_policy():
    chosen = torch.zeros(2, requires_grad=True)
    loss = orpo_loss(chosen, torch.tensor([-1e-9, -20.0]), -chosen, 0.1)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(chosen.grad).all()


@pytest.mark.parametrize("eps_clip", [None, 0.2])
def test_value_loss_equals_its_formula(eps_clip):
    values, old, returns = (torch.randn(30, generator=G) for _ in range(3))
    values.requires_grad_()
    mask = torch.rand(30, generator=G) < 0.7
    loss, clipped = value_loss(values, old, returns, mask, eps_clip)
    loss.backward()
    total, count = 0.0, 0
    for v, o, r, m in zip(values.tolist(), old.tolist(), returns.tolist(), mask.tolist(), strict=True):
        if m:
            losses = [(v - r) ** 2]
            if eps_clip:
                losses.append((o + min(max(v - o, -eps_clip), eps_clip) - r) ** 2)
                count += losses[1] > losses[0]
            total += 0.5 * max(losses)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert int(clipped.sum()) == count
    assert values.grad[~mask].abs().sum() == 0
