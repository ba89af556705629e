"""Tests of the lean forward pass of Llama-like layers against the Hugging Face modules."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from arealite.inference.llama_like import is_llama_like
from tests.inference.conftest import SMALL, make_model, prompts, submit

ROPES = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def with_rope(kind: str) -> LlamaForCausalLM:
    rope = {"rope_type": kind, "rope_theta": 10_000.0} | ROPES[kind]
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, rope_parameters=rope, attention_bias=True)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "smollm2", "mistral-window", "qwen2-window", *ROPES])
def test_lean_and_plain_forward_give_the_same_logprobs(case, make_engine):
    model = with_rope(case) if case in ROPES else make_model(case)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # initialized as zeros and ones
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    engines = [make_engine(model, max_prefill_tokens=16) for _ in range(2)]
    assert engines[0].core.runner.lean is not None
    engines[1].core.runner.lean = None
    results = []
    for engine in engines:
        futures = [
            submit(engine, prompt, n=2, max_new_tokens=15, sampling_seed=i, ignore_eos=True)
            for i, prompt in enumerate(prompts(4))
        ]
        results.append([output for future in futures for output in future.result(60)])
    for lean, plain in zip(*results, strict=True):
        assert lean.token_ids == plain.token_ids
        expected = torch.tensor(plain.logprobs)
        torch.testing.assert_close(torch.tensor(lean.logprobs), expected, atol=1e-4, rtol=0)


def test_other_architectures_are_not_llama_like():
    assert not is_llama_like(make_model("gemma2-softcap"))
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not is_llama_like(Qwen2ForCausalLM(Qwen2Config(**SMALL, rope_parameters=dynamic)))
    assert not is_llama_like(LlamaForCausalLM(LlamaConfig(**SMALL, mlp_bias=True)))
    assert not is_llama_like(Qwen2ForCausalLM(Qwen2Config(**SMALL, hidden_act="gelu")))
