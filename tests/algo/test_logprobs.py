"""Log-probs and entropies from hidden states equal those of full logits, for any chunk size."""

import pytest
import torch

from arealite.algo import logprobs
from arealite.algo.logprobs import target_positions, token_logprobs

CU = torch.tensor([0, 4, 4, 5, 11], dtype=torch.int32)


def naive(hidden, weight, ids, positions, bias, temperature, softcap):
    """Full logits and autograd, one token at a time."""
    logp, entropy = [], []
    logits = hidden @ weight.T + (0 if bias is None else bias)
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    for t in positions.tolist():
        dist = (logits[t - 1] / temperature).log_softmax(-1)
        logp.append(dist[ids[t]])
        entropy.append(-(dist.exp() * dist).sum())
    return torch.stack(logp), torch.stack(entropy)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("temperature,softcap,with_bias", [(1.0, None, False), (0.7, 5.0, True)])
def test_values_and_gradients_equal_full_logits(monkeypatch, chunk, keep, temperature, softcap, with_bias):
    monkeypatch.setattr(logprobs, "_KEEP_LOGITS", 1 << 30 if keep else 0)
    torch.manual_seed(0)
    ids = torch.randint(0, 13, (11,))
    positions = target_positions(CU, torch.tensor([1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]))
    inputs = [torch.randn(11, 6), torch.randn(13, 6), torch.randn(13) if with_bias else None]
    weights = torch.randn(2, len(positions))
    results = []
    for function in ("chunked", "naive"):
        hidden, weight, bias = (None if x is None else x.clone().requires_grad_() for x in inputs)
        if function == "chunked":
            logp, entropy = token_logprobs(
                hidden[positions - 1], weight, ids[positions], bias, temperature=temperature, softcap=softcap,
                chunk_size=chunk, with_entropy=True,
            )  # fmt: skip
        else:
            logp, entropy = naive(hidden, weight, ids, positions, bias, temperature, softcap)
        (weights[0] * logp + weights[1] * entropy).sum().backward()
        grads = [x.grad for x in (hidden, weight, bias) if x is not None]
        results.append([logp.detach(), entropy.detach(), *grads])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_first_tokens_and_untrained_tokens_have_no_logprob():
    assert target_positions(CU, None).tolist() == [1, 2, 3, 6, 7, 8, 9, 10]
    assert target_positions(CU, torch.ones(11)).tolist() == [1, 2, 3, 6, 7, 8, 9, 10]
    assert target_positions(CU, torch.zeros(11)).tolist() == []


def test_no_trained_token_gives_zero_gradients():
    hidden = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(7, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    logp, _ = token_logprobs(hidden[none], weight, none)
    logp.sum().backward()
    assert hidden.grad.abs().sum() == 0 and (weight.grad is None or weight.grad.abs().sum() == 0)


@pytest.mark.parametrize("keep", [True, False])
def test_entropy_of_large_logits_does_not_cancel(monkeypatch, keep):
    """Against float64, at logits up to 300, where fp32 has a spacing of 3e-5."""
    monkeypatch.setattr(logprobs, "_KEEP_LOGITS", 1 << 30 if keep else 0)
    g = torch.Generator().manual_seed(0)
    # Multiples of 1/8 below 2^9 are exact in fp32, so the logits are those of float64.
    logits = (torch.randint(-40, 40, (64, 1000), generator=g) / 8).float()
    logits[:32] += 300
    logits[::2, 7] += 12
    labels = torch.randint(0, 1000, (64,), generator=g)
    identity = torch.eye(64)
    results = []
    for dtype in (torch.float32, torch.float64):
        weight = logits.T.to(dtype).requires_grad_()
        if dtype == torch.float32:
            logp, entropy = token_logprobs(identity, weight, labels, with_entropy=True, chunk_size=10)
        else:
            dist = (identity.double() @ weight.T).log_softmax(-1)
            logp, entropy = dist.gather(1, labels[:, None]).squeeze(1), -(dist.exp() * dist).sum(-1)
        (logp.sum() + 3 * entropy.sum()).backward()
        results.append((logp.detach().double(), entropy.detach().double(), weight.grad.double()))
    assert (results[0][1] > 0).all()
    # Sums of 1,000 terms, each with a few rounding errors of 6e-8.
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-6, rtol=1e-5)


def test_entropy_of_a_certain_prediction_is_zero():
    logits = torch.full((3, 50), -300.0)
    logits[:, 4] = 300.0
    _, entropy = token_logprobs(torch.eye(3), logits.T, torch.tensor([4, 4, 4]), with_entropy=True)
    assert entropy.tolist() == [0.0, 0.0, 0.0]
