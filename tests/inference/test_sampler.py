"""The sampler against plain definitions: distributions, truncation, penalties, independence of the batch."""

from __future__ import annotations

import torch

from arealite.inference.sampler import SamplingBatch, gumbel_noise, sample, truncate


def batch_of(count: int, **given) -> SamplingBatch:
    seeds = torch.arange(2 * count).view(count, 2) * 7919 % 2**32
    return SamplingBatch(seeds, torch.arange(count), **given)


def test_frequencies_follow_the_tempered_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -3.0])
    count = 40_000
    batch = batch_of(count, temperature=torch.full((count,), 0.8))
    tokens, logprobs, _ = sample(logits.expand(count, -1), batch)
    expected = (logits / 0.8).softmax(0)
    frequencies = torch.bincount(tokens, minlength=5) / count
    assert (frequencies - expected).abs().max() < 4 * (0.25 / count) ** 0.5
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_noise_is_standard_gumbel_and_depends_on_its_row_alone():
    noise = gumbel_noise(torch.tensor([[5, 6]]), torch.tensor([3]), 200_000)
    assert abs(noise.mean().item() - 0.5772) < 0.01 and abs(noise.var().item() - 1.6449) < 0.03
    assert torch.isfinite(noise).all()
    both = gumbel_noise(torch.tensor([[1, 1], [5, 6]]), torch.tensor([9, 3]), 200_000)
    assert torch.equal(both[1], noise[0])
    assert abs(torch.corrcoef(both)[0, 1].item()) < 0.01


def test_truncation_keeps_what_the_definitions_keep():
    torch.manual_seed(0)
    logits = torch.randn(6, 50) * 2
    top_k = torch.tensor([0, 5, 0, 0, 3, 1])
    top_p = torch.tensor([1.0, 1.0, 0.7, 1.0, 0.5, 0.9])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.2, 0.0, 0.0])
    kept = truncate(logits, top_k, top_p, min_p) > -torch.inf
    for row in range(6):
        order = logits[row].argsort(descending=True)
        allowed = order[: top_k[row]] if top_k[row] else order
        probs = logits[row][allowed].softmax(0)
        allowed = allowed[(probs.cumsum(0) - probs) < top_p[row]] if top_p[row] < 1 else allowed
        whole = logits[row].softmax(0)
        allowed = [t for t in allowed.tolist() if whole[t] >= min_p[row] * whole.max()]
        assert sorted(allowed) == kept[row].nonzero()[:, 0].tolist()


def test_logprob_is_of_the_distribution_before_truncation():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    one = torch.ones(1)
    batch = batch_of(1, top_k=torch.tensor([1]), top_p=one, min_p=0 * one, want_raw=True)
    token, logprob, raw = sample(logits, batch)
    assert token.item() == 0
    torch.testing.assert_close(logprob, logits.log_softmax(-1)[:, 0])
    torch.testing.assert_close(raw, logprob)


def test_greedy_bias_ban_and_penalties():
    logits = torch.tensor([[2.0, 1.5, -1.0]]).expand(4, -1)
    greedy = {"greedy": torch.ones(4, dtype=torch.bool), "all_greedy": True}
    addend = torch.zeros(4, 3)
    addend[0, 2] = 10
    banned = torch.zeros(4, 3, dtype=torch.bool)
    banned[1, 0] = True
    counts = torch.zeros(4, 3)
    counts[2, 0] = 2  # 2.0 - 2 * 0.5 falls below 1.5
    seen = torch.zeros(4, 3, dtype=torch.bool)
    seen[3, 0] = True  # 2.0 / 2 falls below 1.5
    column = torch.ones(4, 1)
    batch = batch_of(
        4,
        **greedy,
        addend=addend,
        banned=banned,
        counts=counts,
        seen=seen,
        frequency=0.5 * column,
        presence=0 * column,
        repetition=2 * column,
    )
    assert sample(logits, batch)[0].tolist() == [2, 1, 1, 1]
