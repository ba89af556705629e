"""Tests of the sampler against plain definitions: distribution, truncation, penalties, batch independence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from arealite.inference.cpu import sampler
from arealite.inference.cpu.sampler import SamplingBatch, gumbel_noise, make_batch, sample, truncate
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.slots import SlotTable, split_seed
from tests.inference.conftest import check_top_logprobs, make_model


def batch_of(count: int, **fields) -> SamplingBatch:
    seeds = torch.arange(2 * count).view(count, 2) * 7919 % 2**32
    return SamplingBatch(seeds, torch.arange(count), **fields)


def test_frequencies_follow_the_tempered_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -3.0])
    count = 40_000
    batch = batch_of(count, temperature=torch.full((count,), 0.8))
    tokens, logprobs, *_ = sample(logits.expand(count, -1), batch)
    expected = (logits / 0.8).softmax(0)
    frequencies = torch.bincount(tokens, minlength=5) / count
    assert (frequencies - expected).abs().max() < 4 * (0.25 / count) ** 0.5
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_noise_is_standard_gumbel_and_independent_of_other_rows():
    noise = gumbel_noise(torch.tensor([[5, 6]]), torch.tensor([3]), 200_000)
    assert abs(noise.mean().item() - 0.5772) < 0.01 and abs(noise.var().item() - 1.6449) < 0.03
    assert torch.isfinite(noise).all()
    both = gumbel_noise(torch.tensor([[1, 1], [5, 6]]), torch.tensor([9, 3]), 200_000)
    assert torch.equal(both[1], noise[0])
    assert abs(torch.corrcoef(both)[0, 1].item()) < 0.01


@pytest.mark.parametrize(("seed", "token"), [(2782, 1712), (1816, 45267)])
def test_token_of_probability_1e_8_can_be_sampled(seed, token):
    logits = torch.full((1, 1 << 17), math.log(1e-8))
    logits[0, 5] = 0.0
    batch = SamplingBatch(torch.tensor([split_seed(seed)]), torch.tensor([9]))
    assert sample(logits, batch)[0].tolist() == [token]


def test_large_noise_has_a_fine_resolution(monkeypatch):
    """The hash is replaced by its smallest values, which give the largest noise."""
    bits = np.array([[0, 1, 2, 1000, 1 << 16, 1 << 22, 1 << 31, (1 << 32) - 1]], np.uint32)
    monkeypatch.setattr(sampler, "_mix", lambda x: bits if x.ndim == 2 else x)
    (noise,) = gumbel_noise(torch.tensor([[3, 4]]), torch.tensor([5]), bits.size)
    assert torch.isfinite(noise).all() and (noise.diff() < 0).all() and noise[0] > 22
    uniform = torch.tensor((bits[0, 3:-1] + 0.5) * 2.0**-32)
    expected = -torch.log(-torch.log1p(-uniform))
    torch.testing.assert_close(noise[3:-1].double(), expected, atol=1e-3, rtol=0)


def test_truncation_equals_the_definitions():
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
    token, logprob, raw, _ = sample(logits, batch)
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


PROMPT, OUTPUT, EOS = [1, 2, 2, 5], [3, 3, 7, 2], 11
COMBINED = [
    {"temperature": 0.6},
    {"temperature": 1.7, "top_p": 0.8},
    {"top_k": 4, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.8, "min_p": 0.2, "logit_bias": {4: 3.0, 0: -math.inf}},
    {"repetition_penalty": 1.6, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.5, "temperature": 1.3, "top_k": 6},
    {
        "min_new_tokens": 9,
        "stop_token_ids": [6, 9],
        "logit_bias": {EOS: 5.0, 6: 2.0},
        "temperature": 1.2,
        "top_p": 0.95,
        "presence_penalty": 1.0,
    },
]


def naive_sampler(logits: list[float], params: SamplingParams) -> tuple[dict[int, float], list[float]]:
    """Return the probability of each token that may be sampled, and the log-probs, by the parameters' definition."""
    logits = list(logits)
    for token in range(len(logits)):
        if token in PROMPT + OUTPUT:
            penalty = params.repetition_penalty
            logits[token] *= 1 / penalty if logits[token] > 0 else penalty
        count = OUTPUT.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        logits[token] = (logits[token] + params.logit_bias.get(token, 0.0)) / params.temperature
    total = sum(map(math.exp, logits))
    reported = [x - math.log(total) for x in logits]
    banned = {EOS, *params.stop_token_ids} if len(OUTPUT) < params.min_new_tokens else set()
    order = sorted(set(range(len(logits))) - banned, key=lambda t: -logits[t])
    order = order[: params.top_k] if params.top_k > 0 else order
    total = sum(math.exp(logits[t]) for t in order)
    kept, before = [], 0.0
    for token in order:
        if before < params.top_p:
            kept.append(token)
        before += math.exp(logits[token]) / total
    kept = [t for t in kept if math.exp(logits[t] - logits[kept[0]]) >= params.min_p]
    total = sum(math.exp(logits[t]) for t in kept)
    return {t: math.exp(logits[t]) / total for t in kept}, reported


@pytest.mark.parametrize("settings", COMBINED)
def test_samples_follow_the_definition_of_all_parameters_combined(settings):
    count, params = 6000, SamplingParams(**settings)
    slots = SlotTable(count + 3, 16, 4)
    for seed in range(count + 3):  # the last three rows have default parameters
        request = Request(PROMPT, params if seed < count else SamplingParams())
        request.sequences[0].seed = seed
        request.sequences[0].saved_tokens = np.array(OUTPUT, np.int32)
        request.sequences[0].saved_logprobs = request.sequences[0].saved_raw = np.zeros(4)
        slots.take(request.sequences[0], 16)
    rows = np.arange(count + 3)
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5
    batch = make_batch(slots, np.flip(rows).copy(), 12, [EOS])
    tokens, logprobs, *_ = sample(logits.expand(len(rows), -1), batch)
    mine = [i for i, row in enumerate(np.flip(rows)) if slots.sequence[row].request.params is params]
    probs, reported = naive_sampler(logits.tolist(), params)
    drawn = torch.bincount(tokens[mine], minlength=12)
    assert set(drawn.nonzero()[:, 0].tolist()) <= set(probs)
    chi2 = sum((drawn[t].item() - count * p) ** 2 / (count * p) for t, p in probs.items())
    freedom = len(probs) - 1
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5 + 4
    torch.testing.assert_close(logprobs[mine], torch.tensor(reported)[tokens[mine]])
    alone = sample(logits[None], make_batch(slots, np.array([5]), 12, [EOS]))
    assert alone[0].item() == tokens[len(rows) - 1 - 5].item()


@pytest.mark.parametrize("deterministic", [False, True])
def test_top_logprobs_equal_the_forward_pass(deterministic, make_engine):
    model = make_model()
    check_top_logprobs(make_engine(model, deterministic=deterministic), model)
