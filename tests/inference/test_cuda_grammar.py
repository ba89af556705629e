"""Constrained decoding on the CUDA runner: it samples what the CPU runner samples, beside requests without a grammar.

Where there is no GPU but Triton is installed, its interpreter runs the same kernels.
"""

from __future__ import annotations

import copy
import importlib.util
import os

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from arealite.api.cli_args import ServerConfig
from arealite.inference import core
from arealite.inference.cpu.runner import CpuRunner
from arealite.inference.engine import Engine
from arealite.inference.grammar import Grammar
from arealite.inference.sequence import Request, SampleOutput, SamplingParams
from tests.inference.conftest import SMALL
from tests.inference.test_grammar import SCHEMA, matches
from tests.inference.tool_model import write_tokenizer

pytest.importorskip("llguidance")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
SHORT = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
# The last one has no grammar.
CASES = [{"temperature": 3.0}, {"temperature": 0.0}, {"top_k": 3}, {"frequency_penalty": 0.5}, {"temperature": 1.5}]


@pytest.fixture
def model(tmp_path):
    tokenizer = write_tokenizer(tmp_path)
    torch.manual_seed(0)
    # Some rows of the embedding are no tokens, as in most models.
    config = SMALL | {"vocab_size": len(tokenizer) + 11, "eos_token_id": tokenizer.eos_token_id}
    return Qwen2ForCausalLM(Qwen2Config(**config)).eval(), tokenizer


def answers(engine: Engine, schema: dict, count: int) -> list[SampleOutput]:
    grammar = Grammar(engine.tokenizer, schema, engine.shape.vocab_size, engine.shape.eos_ids)
    futures = []
    for seed, params in enumerate(CASES):
        is_free = seed == len(CASES) - 1
        settings = SamplingParams(max_new_tokens=count, sampling_seed=seed, ignore_eos=is_free, **params)
        request = Request(
            [1, 2, 3], settings, want_text=True, want_raw_logprobs=seed == 0, num_top_logprobs=2 * (seed == 1),
            grammar=None if is_free else grammar,
        )  # fmt: skip
        futures.append(engine.submit(request))
    return [future.result(300)[0] for future in futures]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_device_samples_what_the_cpu_samples(model, monkeypatch, deterministic):
    cuda_runner = pytest.importorskip("arealite.inference.cuda.runner")
    found = []
    for runner, device in ((cuda_runner.CudaRunner, "cuda" if GPU else "cpu"), (CpuRunner, "cpu")):
        monkeypatch.setattr(core, "make_runner", runner)
        config = ServerConfig(
            max_total_tokens=2048, max_running_requests=8, max_prefill_tokens=64, deterministic=deterministic
        )
        engine = Engine(config, model=copy.deepcopy(model[0]).to(device), tokenizer=model[1]).start()
        try:
            found.append(answers(engine, SCHEMA if GPU else SHORT, 100 if GPU else 12))
        finally:
            engine.close()
    for ours, theirs in zip(*found, strict=True):
        assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-3, rtol=1e-3)
    if GPU:
        assert all(matches(output.text or "") for output in found[0][:-1])
    raw = [torch.tensor(outputs[0].raw_logprobs) for outputs in found]
    torch.testing.assert_close(*raw, atol=1e-3, rtol=1e-3)
    tops = [[[token for token, value in top if value > -9999] for top in outputs[1].top_logprobs] for outputs in found]
    assert tops[0] == tops[1]


def test_bits_forbid_tokens():
    cuda_ops = pytest.importorskip("arealite.inference.cuda.ops")
    generator = np.random.default_rng(0)
    logits = torch.from_numpy(generator.normal(size=(5, 4099)).astype(np.float32))
    allowed = generator.random((2, 4099)) < 0.3
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, 29))), axis=1, bitorder="little").view(np.int32)
    lines, device = [3, 0], "cuda" if GPU else "cpu"
    expected = logits.clone()
    for line, row in zip(lines, allowed, strict=True):
        expected[line, torch.from_numpy(~row)] = -torch.inf
    found = logits.to(device)
    cuda_ops.forbid(found, torch.tensor(lines, dtype=torch.int32, device=device), torch.from_numpy(bits).to(device))
    assert torch.equal(found.cpu(), expected)
