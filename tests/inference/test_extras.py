"""Tests of penalties, bias, minimum length and raw log-probs on the device against the CPU sampler.

Where there is no GPU but Triton is installed, its interpreter runs the same kernels.
"""

from __future__ import annotations

import importlib.util
import math
import os

import numpy as np
import pytest
import torch

from arealite.inference.cpu.sampler import make_batch, sample
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.slots import SlotTable, split_seed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
VOCAB, EOS = 97, (96, 95)
CASES = [
    {},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"logit_bias": {5: 4.0, 7: -100.0, 96: 9.0}, "temperature": 0.7},
    {"min_new_tokens": 3, "stop_token_ids": list(range(40))},
    {
        "min_new_tokens": 9,
        "logit_bias": {i: 0.1 * i for i in range(90)},
        "repetition_penalty": 0.8,
        "top_k": 9,
        "temperature": 1.3,
    },
    {"frequency_penalty": -0.5, "temperature": 0.0},
    # One very low logit must not make the search for the threshold among the others coarse.
    {"logit_bias": {7: -1e6}, "top_k": 2, "temperature": 0.1},
    {"logit_bias": {7: -1e6}, "top_p": 0.9, "temperature": 2.0},
]


def test_the_device_samples_what_the_cpu_samples():
    cuda_ops = pytest.importorskip("arealite.inference.cuda.ops")
    from arealite.inference.cuda.extras import SamplingExtras

    slots = SlotTable(len(CASES), 32, 4)
    for i, params in enumerate(CASES):
        request = Request([1, 2, 3, 3, 50 + i], SamplingParams(**params), want_raw_logprobs=i != 3)
        request.sequences[0].seed = i
        slots.take(request.sequences[0], 32)
    rows = np.arange(len(CASES))
    extras = SamplingExtras(slots, VOCAB, EOS, torch.device(DEVICE))
    extras.take(rows)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(DEVICE)

    temperature, seeds = on_device(slots.temperature), on_device(slots.seed)
    at = torch.arange(len(CASES), dtype=torch.int32, device=DEVICE)
    out = torch.zeros(3, len(CASES), dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        logits = torch.randn(len(CASES), VOCAB, generator=generator) * 3
        batch = make_batch(slots, rows, VOCAB, list(EOS))
        tokens, logprobs, raw, _ = sample(logits, batch)

        given = logits.to(DEVICE)
        position = on_device((slots.length - 1).astype(np.int32))
        thresholds = torch.full((len(CASES),), float("-inf"), device=DEVICE)
        extras.adjust(given, at, position, temperature)
        cuda_ops.find_thresholds(
            given,
            at,
            temperature,
            on_device(slots.top_k.astype(np.int32)),
            on_device(slots.top_p),
            on_device(slots.min_p),
            thresholds,
        )
        floats = out.view(torch.float32)
        cuda_ops.sample(given, at, position, temperature, seeds, thresholds, out[0], floats[1])
        extras.finish(given, at, temperature, out)

        assert out[0].tolist() == tokens.tolist()
        torch.testing.assert_close(floats[1].cpu(), logprobs, atol=1e-4, rtol=1e-4)
        wanted = [i for i in range(len(CASES)) if slots.wants_raw[i]]
        torch.testing.assert_close(floats[2].cpu()[wanted], raw[wanted], atol=1e-4, rtol=1e-4)
        slots.tokens[rows, slots.length] = tokens.numpy()
        slots.length += 1


@pytest.mark.parametrize(("seed", "token"), [(2782, 1712), (1816, 45267)])
def test_the_device_draws_a_token_of_probability_1e_8(seed, token):
    cuda_ops = pytest.importorskip("arealite.inference.cuda.ops")
    logits = torch.full((1, 1 << 17), math.log(1e-8), device=DEVICE)
    logits[0, 5] = 0.0
    row = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    position = torch.full((1,), 8, dtype=torch.int32, device=DEVICE)
    seeds = torch.tensor([split_seed(seed)], device=DEVICE)
    threshold, temperature = torch.full((1,), -torch.inf, device=DEVICE), torch.ones(1, device=DEVICE)
    out = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    cuda_ops.sample(logits, row, position, temperature, seeds, threshold, out[0], out.view(torch.float32)[1])
    assert out[0].tolist() == [token]


def test_continued_sequence_has_the_counts_of_an_uninterrupted_one():
    pytest.importorskip("arealite.inference.cuda.ops")
    from arealite.inference.cuda.extras import SamplingExtras

    slots = SlotTable(1, 32, 4)
    (seq,) = Request([4, 4, 9], SamplingParams(presence_penalty=1.0)).sequences
    seq.saved_tokens, seq.saved_logprobs = np.array([9, 7, 7], np.int32), np.zeros(3, np.float32)
    seq.saved_raw = seq.saved_logprobs
    slots.take(seq, 32)
    extras = SamplingExtras(slots, VOCAB, EOS, torch.device(DEVICE))
    extras.take(np.array([0]))
    found = {int(i): int(extras.codes[0, i]) for i in extras.codes[0].nonzero()[:, 0]}
    assert found == {4: 16384, 9: 16385, 7: 2}
