"""Each objective equals a loop over tokens that follows its formula, in value and gradient."""

import math

import pytest
import torch

from arealite.algo.off_policy import behaviour_weights, interpolated_prox, m2po_mask
from arealite.algo.policy_losses import (
    LOSSES,
    Clip,
    Tokens,
    aggregation_weights,
    cispo_loss,
    clip_loss,
    gspo_loss,
    reinforce_loss,
    sapo_loss,
    sequence_mean,
    weighted_sum,
)

OWNER = torch.tensor([0] * 7 + [1] * 3 + [3] * 10 + [4] * 20)  # sequence 2 has no tokens
CLIP = Clip(0.2, 0.28)


def example(seed=0):
    g = torch.Generator().manual_seed(seed)
    num = len(OWNER)
    prox = (-2 + torch.randn(num, generator=g)).double()
    logp = (prox + 0.4 * torch.randn(num, generator=g)).requires_grad_()
    advantages = torch.randn(num, generator=g).double()
    weights = (torch.rand(num, generator=g) * (torch.rand(num, generator=g) < 0.8)).double()
    return Tokens(logp, prox, advantages, weights, OWNER)


def clamp(u):
    return min(max(u, 1 - CLIP.low), 1 + CLIP.high)


def naive_clip(u, a, logp, c_clip=None):
    loss = max(-a * u, -a * clamp(u))
    return min(loss, -c_clip * a) if c_clip and a < 0 else loss


def naive_sapo(u, a, logp):
    tau = 1.0 if a > 0 else 1.05
    return -a * (4 / tau) / (1 + math.exp(-tau * (u - 1)))


# name: (ours, loss of one token from its ratio, advantage and log-prob; stop-gradient parts are handled by `frozen`)
OBJECTIVES = {
    "clip": (lambda t: clip_loss(t, CLIP), naive_clip),
    "dual_clip": (lambda t: clip_loss(t, CLIP, 1.5), lambda u, a, lp: naive_clip(u, a, lp, 1.5)),
    "reinforce": (reinforce_loss, lambda u, a, lp: -a * lp),
    "sapo": (sapo_loss, naive_sapo),
}


def rows(*values):
    """Iterate over numbers at the same index of each tensor or list."""
    return zip(*(v if isinstance(v, list) else v.tolist() for v in values), strict=True)


def naive_total(tokens, logp, token_loss):
    total = 0.0
    for lp, px, a, w in rows(logp, tokens.prox_logp, tokens.advantages, tokens.weights):
        if w > 0:
            total += w * token_loss(math.exp(lp - px), a, lp)
    return total


def numeric_gradient(function, values, step=1e-6):
    grads = []
    for i in range(len(values)):
        up, down = list(values), list(values)
        up[i] += step
        down[i] -= step
        grads.append((function(up) - function(down)) / (2 * step))
    return grads


@pytest.mark.parametrize("name", OBJECTIVES)
def test_token_objectives_equal_their_formula(name):
    ours, token_loss = OBJECTIVES[name]
    tokens = example()
    loss, stats = ours(tokens)
    loss.backward()
    values = tokens.logp.tolist()
    assert loss.item() == pytest.approx(naive_total(tokens, values, token_loss), rel=1e-6)
    expected = numeric_gradient(lambda v: naive_total(tokens, v, token_loss), values)
    assert tokens.logp.grad.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert int(stats["clip_share"].weight) == int(tokens.mask.sum())


def test_clip_share_counts_clipped_tokens():
    tokens = example()
    _, stats = clip_loss(tokens, CLIP)
    clipped = 0
    for u, a, w in rows((tokens.logp - tokens.prox_logp).exp(), tokens.advantages, tokens.weights):
        clipped += w > 0 and -a * clamp(u) > -a * u
    assert int(stats["clip_share"].total) == clipped > 0


def test_cispo_weights_reinforce_by_the_clipped_ratio():
    tokens = example()
    loss, stats = cispo_loss(tokens, CLIP)
    loss.backward()
    expected, grads = 0.0, []
    for lp, px, a, w in rows(tokens.logp, tokens.prox_logp, tokens.advantages, tokens.weights):
        bounded = clamp(math.exp(lp - px))
        expected += -w * bounded * a * lp
        grads.append(-w * bounded * a)  # the ratio is not differentiated
    assert loss.item() == pytest.approx(expected)
    assert tokens.logp.grad.tolist() == pytest.approx(grads)
    assert stats["clip_share"].total > 0


def naive_gspo(tokens, logp):
    total = 0.0
    for sequence in set(OWNER.tolist()):
        rows = [i for i, o in enumerate(OWNER.tolist()) if o == sequence and tokens.weights[i] > 0]
        if rows:
            s = math.exp(sum(logp[i] - tokens.prox_logp[i].item() for i in rows) / len(rows))
            for i in rows:
                a = tokens.advantages[i].item()
                total += tokens.weights[i].item() * max(-a * s, -a * clamp(s))
    return total


def test_gspo_has_one_ratio_per_sequence():
    tokens = example()
    loss, _ = gspo_loss(tokens, CLIP)
    loss.backward()
    values = tokens.logp.tolist()
    assert loss.item() == pytest.approx(naive_gspo(tokens, values))
    expected = numeric_gradient(lambda v: naive_gspo(tokens, v), values)
    assert tokens.logp.grad.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_gspo_averages_before_it_bounds_the_ratio():
    """Log-ratios of 50 and −50.1 have mean −0.05; clamping them to ±20 first would give 0."""
    logp = torch.tensor([50.0, -50.1], requires_grad=True)
    tokens = Tokens(logp, torch.zeros(2), torch.ones(2), torch.ones(2), torch.tensor([0, 0]))
    loss, _ = gspo_loss(tokens, CLIP)
    loss.backward()
    ratio = math.exp(-0.05)
    assert loss.item() == pytest.approx(-2 * ratio, rel=1e-5)
    assert logp.grad.tolist() == pytest.approx([-ratio, -ratio], rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_that_are_not_trained_may_hold_anything(name):
    def loss_fn(tokens):
        return LOSSES[name](tokens, CLIP, None)

    tokens = example()
    garbage = torch.where(tokens.mask, tokens.prox_logp, -math.inf)
    loss, _ = loss_fn(tokens._replace(prox_logp=garbage))
    loss.backward()
    assert loss.item() == pytest.approx(loss_fn(tokens)[0].item())
    assert torch.isfinite(tokens.logp.grad).all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", ["clip", "gspo", "sapo"])
def test_an_infinite_ratio_loses_only_its_own_gradient(name, advantage):
    """exp(200) is infinite in fp32; the gradient of the other sequence is the same as without it."""

    def loss_fn(tokens):
        return LOSSES[name](tokens, CLIP, 3.0)

    prox, owner = torch.full((4,), -201.0), torch.tensor([0, 0, 1, 1])
    logp = torch.tensor([-1.0, -1.0, -201.05, -200.9], requires_grad=True)
    tokens = Tokens(logp, prox, torch.full((4,), advantage), torch.ones(4), owner)
    loss, stats = loss_fn(tokens)
    (grad,) = torch.autograd.grad(loss, logp)
    alone = Tokens(*(x[2:] for x in tokens[:4]), torch.tensor([0, 0]))
    (expected,) = torch.autograd.grad(loss_fn(alone)[0], logp)
    assert grad[:2].tolist() == [0.0, 0.0] and expected[2:].abs().min() > 0
    assert torch.equal(grad[2:], expected[2:])
    assert math.isfinite(loss.item()) and all(math.isfinite(stat.total) for stat in stats.values())


def test_all_objectives_agree_on_policy():
    """At ratio 1 every objective has the gradient of REINFORCE."""
    tokens = example()
    tokens = tokens._replace(prox_logp=tokens.logp.detach().clone())
    grads = []
    for name in ("reinforce", "clip", "cispo", "sapo"):
        (grad,) = torch.autograd.grad(LOSSES[name](tokens, CLIP, None)[0], tokens.logp)
        grads.append(grad)
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])


def naive_behaviour(prox, behav, mask, cap, floor, mode):
    result = []
    for i, kept in enumerate(mask):
        rows = [i]
        if mode.startswith("sequence"):
            rows = [j for j, o in enumerate(OWNER.tolist()) if o == OWNER[i] and mask[j]]
        if mode.startswith("prefix"):
            rows = [j for j in range(i + 1) if OWNER[j] == OWNER[i] and mask[j]]
        if not kept:
            result.append(0.0)
            continue
        count = 1 if mode.startswith("prefix") else len(rows)
        w = math.exp(sum(prox[j] - behav[j] for j in rows) / count)
        if mode.endswith("clamp"):
            w = min(max(w, floor), cap)
        elif not floor <= w <= cap:
            w = 0.0
        result.append(w)
    return result


@pytest.mark.parametrize("mode", ["token_mask", "token_clamp", "sequence_mask", "sequence_clamp", "prefix_clamp"])
def test_behaviour_weights(mode):
    tokens = example()
    behav = (
        tokens.prox_logp + 0.2 * OWNER - 0.4 + 0.2 * torch.randn(len(OWNER), generator=torch.Generator().manual_seed(5))
    )
    mask, cap, floor = tokens.mask, 1.3, 0.75
    weight, kept = behaviour_weights(tokens.prox_logp, behav, mask, OWNER, cap, floor, mode)
    expected = naive_behaviour(tokens.prox_logp.tolist(), behav.tolist(), mask.tolist(), cap, floor, mode)
    assert weight.tolist() == pytest.approx(expected)
    assert (kept == (weight > 0)).all()
    assert mode.endswith("clamp") or 0 < kept.sum() < mask.sum()


def test_interpolated_prox_lies_between_behaviour_and_policy():
    logp, behav = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-3.0, -3.0, -3.0])
    prox = interpolated_prox(logp, behav, torch.tensor([5, 4, 2]), current_version=5)
    assert prox.tolist() == pytest.approx([-3.0, -2.0, -1.5])


@pytest.mark.parametrize("progress", [0.0, 0.25, 0.5])
def test_interpolated_prox_is_exact_if_every_version_moves_a_token_as_much(progress):
    versions, per_version = torch.tensor([5, 5, 4, 2]), torch.tensor([0.3, -0.1, 0.2, -0.4])
    exact = torch.tensor([-1.0, -2.0, -3.0, -0.5])
    behav, logp = exact - (5 - versions) * per_version, exact + progress * per_version
    assert interpolated_prox(logp, behav, versions, 5, progress).tolist() == pytest.approx(exact.tolist())


def test_m2po_drops_the_largest_until_the_mean_is_small():
    g = torch.Generator().manual_seed(3)
    prox, behav = torch.randn(40, generator=g), torch.randn(40, generator=g)
    kept = m2po_mask(prox, behav, threshold=0.5)
    squares = sorted(((prox - behav) ** 2).tolist())
    while sum(squares) / len(squares) >= 0.5:
        squares.pop()
    assert sorted(((prox - behav)[kept] ** 2).tolist()) == pytest.approx(squares)
    assert 0 < kept.sum() < 40


def test_aggregation():
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
    losses = torch.arange(12.0).view(3, 4)

    def mean(mode, **kwargs):
        weights, norms = aggregation_weights(mask, mode, **kwargs)
        return ((weights * losses).sum() / norms.sum()).item()

    assert mean("token") == pytest.approx((0 + 1 + 2 + 3 + 5) / 5)
    assert mean("sequence") == pytest.approx((1.5 + 5) / 2)
    assert mean("sequence_sum") == pytest.approx((0 + 1 + 2 + 3 + 5) / 2)
    assert mean("constant", max_length=10) == pytest.approx(11 / 20)
    with pytest.raises(ValueError, match="needs max_length"):
        aggregation_weights(mask, "constant")


def test_kl_and_entropy_terms():
    weights = torch.tensor([1.0, 0.0, 0.5])
    values = torch.tensor([2.0, math.inf, 4.0])
    assert weighted_sum(values, weights) == 4.0
    means = sequence_mean(torch.tensor([1.0, 3.0, 5.0]), weights > 0, torch.tensor([0, 0, 1]))
    assert means.tolist() == [1.0, 1.0, 5.0]
