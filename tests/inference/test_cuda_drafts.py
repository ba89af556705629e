"""Tests of drafts on CUDA; without a GPU, Triton's interpreter runs the kernels."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch

from arealite.inference.drafts.lookup import look_up
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.weights import WeightSource
from tests.inference.conftest import cuda_engines, forward_logprobs, submit
from tests.inference.test_drafts import CIRCLE, assert_same, copying_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.timeout(600),  # the interpreter needs minutes on a busy machine
]
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if GPU else "cpu"
SETTINGS: dict[str, Any] = {"block_size": 4, "max_prefill_tokens": 32}


@pytest.fixture
def make_engine(monkeypatch):
    with cuda_engines(monkeypatch, **SETTINGS, max_total_tokens=1024 if GPU else 256) as make:
        yield make


@pytest.fixture
def kernels() -> Any:
    return pytest.importorskip("arealite.inference.cuda.draft_kernels")


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(*values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("seed", range(3))
def test_kernel_drafts_as_the_host(seed: int, kernels):
    generator = np.random.default_rng(seed)
    width, lengths = 5, [1, 2, 3, 9, 30, 64, 40]
    texts = generator.integers(0, 2 + 3 * seed, (len(lengths), 64)).astype(np.int32)
    # Slots and lines in other orders than the sequences; slot 0 is padding, slot 7 has room for two tokens.
    slots, lines = ints([7, 3, 4, 5, 6, 2, 1]), ints([6, 5, 4, 3, 2, 1, 0])
    history = torch.zeros(7, 64, dtype=torch.int32, device=DEVICE)
    history[lines.long()] = torch.from_numpy(texts).to(DEVICE)
    position, room = ints([0] * 8), ints([0] + [64] * 6 + [2])
    position[slots.long()] = ints(lengths) - 1
    ids, rows, positions = torch.full((3, 7 * width), -7, dtype=torch.int32, device=DEVICE)
    first, count = torch.zeros(2, 7, dtype=torch.int32, device=DEVICE)
    kernels.draft_kernel[(7,)](
        slots, lines, position, room, history, 64, ids, rows, positions, first, count, 0, W=width, WIDTH=8, BLOCK=16
    )
    assert first.tolist() == list(range(0, 7 * width, width))
    for i, length in enumerate(lengths):
        most = min(width - 1, int(room[slots[i]]) - length)
        expected = look_up(texts[i, :length], most, shortest=1).tolist()
        expected = [] if most < 0 else [texts[i, length - 1], *expected]
        part, pad = slice(i * width, (i + 1) * width), [0] * (width - len(expected))
        assert count[i] == max(1, len(expected))
        assert ids[part].tolist() == expected + pad
        assert rows[part].tolist() == [int(slots[i])] * len(expected) + pad
        assert positions[part].tolist() == [length - 1 + j for j in range(len(expected))] + pad


def test_kernel_keeps_tokens_that_agree(kernels):
    width = 4
    # Sequences whose draft is wrong at once, wrong later, right, empty; and one without tokens in this pass.
    ids = ints([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 0, 0, 0, 0, 0, 0, 0])
    tokens = ints([9, 3, 4, 5, 2, 3, 9, 5, 2, 3, 4, 5, 7, 8, 9, 9, 9, 9, 9, 9])
    count, rows, lines = ints([4, 4, 4, 1, 1]), ints([4, 3, 2, 1, 0]).repeat_interleave(width), ints([0, 1, 2, 3, 4])
    history, last = torch.zeros(5, 32, dtype=torch.int32, device=DEVICE), ints([5] * 5)
    position = ints([10, 11, 12, 13, 14])
    kept, start, drafted = torch.zeros(3, 5, dtype=torch.int32, device=DEVICE)
    kernels.accept_kernel[(5,)](
        lines, last, position, history, 32, ids, rows, count, tokens, kept, start, drafted, 0, W=width, WIDTH=4
    )
    assert kept.tolist() == [1, 3, 4, 1, 0] and drafted.tolist() == [3, 3, 3, 0, 0]
    assert start.tolist() == [15, 14, 13, 12, 0]
    assert last.tolist() == [5, 7, 5, 9, 9] and position.tolist() == [10, 12, 16, 16, 15]
    assert history[1, 14:18].tolist() == [2, 3, 9, 0] and history[2, 13:17].tolist() == [2, 3, 4, 5]


def test_sequences_of_different_lengths_join_and_end(make_engine):
    """Steps with drafts are in flight while others end at their limit or a stop token, and new ones begin."""
    plain, drafted = (make_engine(copying_model(), draft_tokens=count, max_running_requests=3) for count in (0, 3))
    asked = [(4, {}), (11, {}), (9, {"temperature": 0.0, "stop_token_ids": [7]}), (5, {"top_p": 0.7})]
    outputs = []
    for engine in (plain, drafted):
        engine.pause("in_place").result(30)
        futures = [
            submit(engine, CIRCLE[i:], **{"temperature": 0.4, "sampling_seed": i, "max_new_tokens": count} | params)
            for i, (count, params) in enumerate(asked)
        ]
        engine.resume().result(30)
        outputs.append([output for future in futures for output in future.result(300)])
    assert_same(*outputs)
    stats = drafted.stats()
    assert 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]
    assert stats["generated_tokens"] == sum(len(output.token_ids) for output in outputs[1])
    assert stats["free_blocks"] == stats["total_blocks"]


def test_a_weight_update_between_steps_with_drafts(make_engine):
    """Tokens carry the version of the weights that sampled them."""
    model, other = copying_model(seed=0), copying_model(seed=1)
    weights = {name: tensor.detach().clone() for name, tensor in other.named_parameters()}
    engine = make_engine(model, draft_tokens=3, max_running_requests=1)
    engine.pause("in_place").result(30)
    request = Request(CIRCLE, SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True))
    future = engine.submit(request)
    engine.set_version(0).result(30)  # the request has been added
    staged = engine.core.stage(WeightSource.received(weights, 7))

    def advance() -> None:
        for _ in range(5):
            engine.core.step()
        assert len(engine.core._in_flight) == 2
        engine.core.swap(staged, 7, True, "")

    engine._call(advance).result(300)
    engine.resume().result(30)
    (output,) = future.result(300)
    (_, start, end), (_, again, last) = output.version_spans
    assert [version for version, *_ in output.version_spans] == [0, 7]
    assert (start, end, last) == (0, again, 20)
    expected = [forward_logprobs(weights_of, CIRCLE, output.token_ids) for weights_of in (model, other)]
    expected = torch.cat([expected[0][:end], expected[1][end:]])
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=2e-4, rtol=0)
    assert engine.stats()["drafted_tokens"] > 0
