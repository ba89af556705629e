"""Rewards to advantages, against loops that follow the definitions one entry at a time."""

import itertools
import math
import statistics

import pytest
import torch

from arealite.algo.advantages import (
    RowReturns,
    adapted_kl_ctl,
    distillation_advantages,
    gae,
    kl_estimate,
    longest_answers,
    normalize,
    overlong_penalty,
    rewards_to_go,
    sample_baselines,
    sample_of_row,
    shape_rewards,
    token_rewards,
    whiten,
)

LEVELS = ("none", "group", "batch")


def naive_normalize(rewards, groups, mean_level, std_level, leave_one_out, eps):
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = {"group": [j for j, g in enumerate(groups) if g == group], "batch": range(len(rewards))}
        mean, std = 0.0, None
        if mean_level != "none":
            chosen = [rewards[j] for j in members[mean_level] if not (leave_one_out and j == i)]
            mean = sum(chosen) / len(chosen) if chosen else 0.0
        if std_level != "none":
            chosen = [rewards[j] for j in members[std_level]]
            std = statistics.stdev(chosen) if len(chosen) > 1 else 0.0
        result.append(reward - mean if std is None else (reward - mean) / (std + eps))
    return result


LEVEL_PAIRS = [(*pair, False) for pair in itertools.product(LEVELS, LEVELS)]
LEAVE_ONE_OUT = [("group", std, True) for std in LEVELS]


@pytest.mark.parametrize("mean_level,std_level,leave_one_out", LEVEL_PAIRS + LEAVE_ONE_OUT)
def test_normalize_equals_the_definition(mean_level, std_level, leave_one_out):
    torch.manual_seed(0)
    rewards, groups = torch.rand(12), torch.tensor([3, 7, 3, 3, 1, 1, 7, 7, 3, 1, 1, 7])
    ours = normalize(rewards, groups, mean_level, std_level, leave_one_out, 1e-6)
    expected = naive_normalize(rewards.tolist(), groups.tolist(), mean_level, std_level, leave_one_out, 1e-6)
    assert ours.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mean_level", LEVELS)
def test_groups_without_signal_get_exactly_zero(mean_level):
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0, 9.0, -9.0])
    groups = torch.tensor([0, 0, 0, 1, 2, 2])
    result = normalize(rewards, groups, mean_level)
    assert result[:4].tolist() == [0.0] * 4  # equal rewards, and a group of one
    assert result[4] > 0 > result[5]


def test_order_of_rows_does_not_matter():
    torch.manual_seed(0)
    rewards, groups = torch.rand(16), torch.arange(16) % 4
    order = torch.randperm(16)
    torch.testing.assert_close(normalize(rewards, groups)[order], normalize(rewards[order], groups[order]))


def test_shaping_and_overlong_penalty():
    assert shape_rewards(torch.tensor([0.0, 1.0, 9.0]), -0.5, 2.0, 3.0).tolist() == [-1.0, 1.0, 3.0]
    penalty = overlong_penalty(torch.tensor([10, 80, 90, 100, 140]), max_length=100, buffer=20)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(torch.tensor([1]), 10, 20)


def test_longest_answers_are_runs_of_trained_tokens():
    masks = [[0, 1, 1, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0, 1], [0] * 7, [1] * 7]
    assert longest_answers(torch.tensor(masks, dtype=torch.bool)).tolist() == [3, 2, 0, 7]


def test_kl_estimators():
    logp, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert kl_estimate(logp, ref, "k1").tolist() == [0.5, -1.0]
    assert kl_estimate(logp, ref, "k2").tolist() == [0.125, 0.5]
    expected = torch.exp(ref - logp) - 1 - (ref - logp)
    torch.testing.assert_close(kl_estimate(logp, ref, "k3"), expected)
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(logp, ref, "k4")


@pytest.mark.parametrize("delta", [-1e4, -200.0, -89.0, 89.0, 1e4])
def test_k3_is_finite_for_any_log_probs(delta):
    logp = torch.tensor([delta, 0.5], requires_grad=True)
    kl = kl_estimate(logp, torch.zeros(2), "k3")
    kl.sum().backward()
    assert torch.isfinite(kl).all() and (kl >= 0).all() and torch.isfinite(logp.grad).all()
    assert logp.grad[1].item() == pytest.approx(1 - math.exp(-0.5))


def test_k3_equals_float64_far_from_the_reference():
    """e^x has a relative error of about 6e-8·|x| in fp32, because x itself is rounded."""
    delta = torch.linspace(-55, 55, 441)
    results = []
    for dtype in (torch.float32, torch.float64):
        logp = delta.to(dtype).requires_grad_()
        exact = torch.expm1(-logp) + logp
        kl = kl_estimate(logp, torch.zeros_like(logp), "k3") if dtype == torch.float32 else exact
        results.append([kl.detach().double(), torch.autograd.grad(kl.sum(), logp)[0].double()])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-6)


def naive_gae(rewards, values, mask, truncated, gamma, lam, final=None):
    advantages = [[0.0] * len(row) for row in rewards]
    for i, row in enumerate(mask):
        trained = [t for t, m in enumerate(row) if m]
        advantage = 0.0
        after = 0.0
        if trained and truncated[i]:
            after = values[i][trained[-1]] if final is None else final[i]
        for t in reversed(trained):
            delta = rewards[i][t] + gamma * after - values[i][t]
            advantage = delta + gamma * lam * advantage
            advantages[i][t] = advantage
            after = values[i][t]
    return advantages


@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (0.9, 0.8)])
def test_gae_over_trained_tokens_only(gamma, lam):
    torch.manual_seed(1)
    mask = torch.rand(5, 12) < 0.6
    mask[3] = False
    rewards, values = torch.randn(5, 12), torch.randn(5, 12)
    truncated = torch.tensor([0, 1, 0, 1, 1])
    before = values.clone()
    advantages, returns = gae(rewards, values, mask, truncated, gamma, lam)
    expected = torch.tensor(naive_gae(rewards.tolist(), values.tolist(), mask.tolist(), truncated.tolist(), gamma, lam))
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0))
    assert torch.equal(values, before)


def test_gae_bootstraps_truncated_rows_from_their_final_value():
    torch.manual_seed(4)
    mask = torch.rand(5, 12) < 0.6
    rewards, values, final = torch.randn(5, 12), torch.randn(5, 12), torch.randn(5)
    truncated = torch.tensor([0, 1, 0, 1, 1])
    advantages, _ = gae(rewards, values, mask, truncated, 0.9, 0.8, final)
    lists = (x.tolist() for x in (rewards, values, mask, truncated))
    torch.testing.assert_close(advantages, torch.tensor(naive_gae(*lists, 0.9, 0.8, final.tolist())))  # fmt: skip


def test_rewards_to_go_is_gae_without_critic():
    torch.manual_seed(2)
    mask = torch.rand(4, 9) < 0.5
    rewards = torch.randn(4, 9)
    plain, _ = gae(rewards, torch.zeros(4, 9), mask, torch.zeros(4))
    torch.testing.assert_close(rewards_to_go(rewards, mask), plain)


def test_reward_is_on_the_last_trained_token_and_kl_on_all():
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]])
    placed = token_rewards(torch.tensor([1.0, 2.0, 3.0]), mask, torch.ones(3, 4), kl_ctl=0.5)
    assert placed.tolist() == [[0, -0.5, 0.5, 0], [0, -0.5, 0, 1.5], [0, 0, 0, 0]]


def test_whiten_uses_the_sums_of_the_whole_batch():
    torch.manual_seed(0)
    values, mask = torch.randn(4, 6) * 3 + 2, torch.rand(4, 6) < 0.7
    kept = values[mask].double()
    result = whiten(values, mask, len(kept), kept.sum().item(), kept.square().sum().item())
    torch.testing.assert_close(result[mask].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(result[mask].std(unbiased=False), torch.tensor(1.0), atol=1e-4, rtol=0)
    assert result[~mask].abs().sum() == 0


def test_adaptive_kl_moves_towards_the_target():
    assert adapted_kl_ctl(0.1, kl=12.0, target=6.0, num_sequences=100) == pytest.approx(0.1 * 1.002)
    assert adapted_kl_ctl(0.1, kl=3.0, target=6.0, num_sequences=100) == pytest.approx(0.1 * 0.998)
    assert adapted_kl_ctl(0.1, kl=6.06, target=6.0, num_sequences=100) == pytest.approx(0.1 * 1.0001)


def test_distillation_advantage_pulls_towards_the_teacher():
    logp, teacher = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -1.0]])
    result = distillation_advantages(logp, teacher, torch.tensor([[1, 1]]), coef=0.5)
    assert result.tolist() == [[-1.0, 0.5]]


def sample_advantages(returns, mask, groups, samples, *levels, eps=1e-6):
    """Return `[B, T]` as the actor computes them, for one rank. The last column has the rewards of the rows."""
    owner, sample_groups = sample_of_row(groups, samples)
    mean, divisor = sample_baselines(
        RowReturns.of(returns, mask, returns[:, -1]), owner, sample_groups, *levels, eps=eps
    )
    return torch.where(mask, (returns - mean[:, None]) / divisor[:, None], 0.0)


@pytest.mark.parametrize("mean_level,std_level,leave_one_out", LEVEL_PAIRS + LEAVE_ONE_OUT)
def test_rows_of_a_sample_count_once(mean_level, std_level, leave_one_out):
    """Any number of rows and tokens of a sample gives the advantages of one row for each sample."""
    torch.manual_seed(0)
    rewards, groups = torch.rand(6), torch.tensor([5, 5, 5, 2, 2, 2])
    expected = normalize(rewards, groups, mean_level, std_level, leave_one_out)
    owner = torch.tensor([0, 3, 3, 3, 1, 2, 5, 2, 4, 0])
    mask = torch.rand(10, 7) < 0.6
    mask[:, 3] = True
    returns = rewards[owner][:, None].expand(10, 7)
    ours = sample_advantages(returns, mask, groups[owner], owner, mean_level, std_level, leave_one_out)
    torch.testing.assert_close(ours.float(), torch.where(mask, expected[owner][:, None], 0.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mean_level,std_level,leave_one_out", LEVEL_PAIRS + LEAVE_ONE_OUT)
def test_a_sample_without_trained_tokens_counts_with_its_reward(mean_level, std_level, leave_one_out):
    """As in `normalize`, which does not look at tokens."""
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 3.0, 3.0]), torch.tensor([5, 5, 5, 2, 2])
    expected = normalize(rewards, groups, mean_level, std_level, leave_one_out)
    # The third sample has two rows. In the first group only it differs from the others.
    owner, mask = torch.tensor([0, 1, 2, 2, 3, 4]), torch.ones(6, 2, dtype=torch.bool)
    mask[[2, 3, 5]] = False
    returns = rewards[owner][:, None].expand(6, 2)
    ours = sample_advantages(returns, mask, groups[owner], owner, mean_level, std_level, leave_one_out)
    torch.testing.assert_close(ours.float(), torch.where(mask, expected[owner][:, None], 0.0), rtol=1e-5, atol=1e-6)


def test_returns_of_turns_by_hand():
    """One group: a sample of two rows (returns 1, 3 | 3, 3) and one of a single row (0, 2)."""
    returns = torch.tensor([[0.0, 1.0, 3.0], [3.0, 3.0, 0.0], [0.0, 2.0, 9.0]])
    mask = torch.tensor([[False, True, True], [True, True, False], [True, True, False]])
    ours = sample_advantages(returns, mask, torch.tensor([4, 4, 4]), torch.tensor([0, 0, 1]))
    # Values of the samples: (1 + 3 + 3 + 3) / 4 = 2.5 and (0 + 2) / 2 = 1; their mean is 1.75. Squares of the
    # distances: (0.5625 + 3 · 1.5625) / 4 = 1.3125 and (3.0625 + 0.0625) / 2 = 1.5625; over n - 1 = 1.
    std = math.sqrt(1.3125 + 1.5625)
    expected = [[0, -0.75, 1.25], [1.25, 1.25, 0], [-1.75, 0.25, 0]]
    torch.testing.assert_close(ours, torch.tensor(expected) / std, check_dtype=False, rtol=1e-5, atol=1e-6)
    without_std = sample_advantages(returns, mask, torch.tensor([4, 4, 4]), torch.tensor([0, 0, 1]), "group", "none")
    torch.testing.assert_close(without_std, torch.tensor(expected), check_dtype=False)
    others = sample_advantages(returns, mask, torch.tensor([4, 4, 4]), torch.tensor([0, 0, 1]), "group", "none", True)
    torch.testing.assert_close(others[2], torch.tensor([-2.5, -0.5, 0.0]), check_dtype=False)


def test_samples_with_equal_returns_get_exactly_zero():
    returns, mask = torch.full((3, 2), 0.3), torch.ones(3, 2, dtype=torch.bool)
    assert not sample_advantages(returns, mask, torch.zeros(3, dtype=torch.long), torch.tensor([0, 1, 1])).any()


def test_returns_of_turns_are_the_sums_of_placed_rewards():
    torch.manual_seed(0)
    mask = torch.rand(5, 9) < 0.5
    mask[4] = False
    returns = torch.randn(5, 9)
    to_go = rewards_to_go(token_rewards(returns, mask), mask)
    torch.testing.assert_close(to_go, torch.where(mask, returns, 0.0), rtol=1e-5, atol=1e-5)
    # Equal returns of all tokens are one reward on the last token.
    flat = torch.randn(5)
    torch.testing.assert_close(token_rewards(flat[:, None].expand(5, 9), mask), token_rewards(flat, mask))
