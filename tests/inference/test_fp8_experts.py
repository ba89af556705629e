"""Experts in FP8: the pass, updates in place, fingerprints, ranks; with Triton or a GPU, the kernel and the engine."""

from __future__ import annotations

import copy
import importlib.util
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.engine import Engine
from arealite.inference.experts.fp8_experts import MATRICES, convert_experts, forward_reference, multiply_groups
from arealite.inference.fp8 import FP8, fp8_layers, quantize, stage_pairs
from arealite.inference.sharding import shard_model
from arealite.inference.weights import ServedWeights, WeightSource
from arealite.utils.routing import expert_blocks
from arealite.weights.fingerprint import first_mismatch
from tests.inference.conftest import SMALL, forward_logprobs, prompts, submit

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SIZES = SMALL | {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2, "num_key_value_heads": 2}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, num_experts=8),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": DeepseekV3Config(
        **{k: v for k, v in SIZES.items() if k != "head_dim"} | MOE | {"num_key_value_heads": 4},
        n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    ),
}  # fmt: skip


def mixture(seed: int = 0, family: str = "qwen3_moe"):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        # transformers makes them empty, and a router with small numbers depends on rounding.
        if "experts." in name or name.endswith("gate.weight"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval().requires_grad_(False)


def tensors_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def update(weights: ServedWeights, new: dict[str, torch.Tensor]) -> None:
    staged = weights.stage(WeightSource.received(new, 1))
    for target, value in list(stage_pairs(staged.pairs, weights.model, torch.device("cpu"))):
        target.copy_(value)
    weights.accept(staged)


def in_fp8(model) -> ServedWeights:
    weights = ServedWeights(model)
    weights.use_fp8()
    return weights


def test_groups_are_multiplied_with_their_own_expert():
    torch.manual_seed(0)
    weight, x = torch.randn(3, 16, 32).bfloat16(), torch.randn(7, 32).bfloat16()
    values, scales = quantize(weight)
    out = multiply_groups(quantize(x), values, scales[..., 0], torch.tensor([2, 2, 5]))
    for rows, expert in (([0, 1], 0), ([2, 3, 4], 2)):
        expected = x[rows].float() @ weight[expert].float().t()
        assert (out[rows].float() - expected).norm() / expected.norm() < 0.06
    assert not out[5:].any(), "rows of other ranks"


@pytest.mark.parametrize("family", CONFIGS)
def test_the_pass_is_near_that_of_the_model(family):
    model = mixture(family=family)
    weights = in_fp8(copy.deepcopy(model))
    hidden = torch.randn(9, 64).bfloat16()
    for block, small in zip(expert_blocks(model), expert_blocks(weights.model), strict=True):
        count = block.experts.num_experts
        index = torch.stack([torch.randperm(count)[:2] for _ in range(9)])
        scores = torch.rand(9, 2).bfloat16()
        exact, found = block.experts(hidden, index, scores), small.experts(hidden, index, scores)
        assert found.dtype == torch.bfloat16 and (found - exact).norm() / exact.norm() < 0.08
    ids = torch.arange(20)[None]
    with torch.no_grad():
        gap = (model(ids).logits.log_softmax(-1) - weights.model(ids).logits.log_softmax(-1)).float().abs().mean()
    assert 0 < gap < 0.3
    names = {name for name, layer in fp8_layers(weights.model).items() if layer.weight.dim() == 3}
    assert names == {n for n, p in model.named_parameters() if n.endswith(MATRICES) and p.dim() == 3}


def test_updates_keep_addresses_and_fingerprints():
    old, new = mixture(), mixture(1)
    weights, fresh = in_fp8(old), in_fp8(copy.deepcopy(new))
    held = [*weights.model.parameters(), *weights.model.buffers()]
    places = [tensor.data_ptr() for tensor in held]
    assert first_mismatch(tensors_of(mixture()), weights.fingerprints()) is None
    update(weights, tensors_of(new))
    assert [tensor.data_ptr() for tensor in held] == places
    assert weights.fingerprint() == fresh.fingerprint()
    assert first_mismatch(tensors_of(new), weights.fingerprints()) is None
    assert first_mismatch(tensors_of(mixture()), weights.fingerprints()) is not None
    # Sleep and wake move what the modules have.
    weights.model.to(torch.device("cpu"))
    assert weights.fingerprint() == fresh.fingerprint()
    experts = weights.model.model.layers[0].mlp.experts
    assert experts.down_proj.dtype == FP8 and experts.down_proj_scale.shape == experts.down_proj.shape[:2]


def test_a_saved_model_with_each_expert_alone_is_loaded(tmp_path):
    new = mixture(1)
    new.save_pretrained(tmp_path)
    weights = in_fp8(mixture())
    staged = weights.stage(WeightSource.published(WeightUpdateMeta("disk", str(tmp_path), 1)))
    for target, value in list(stage_pairs(staged.pairs, weights.model, torch.device("cpu"))):
        target.copy_(value)
    weights.accept(staged)
    assert first_mismatch(tensors_of(new), weights.fingerprints()) is None


class OneOfTwo:
    """A rank of two whose sum is collected instead of exchanged."""

    size = 2

    def __init__(self, rank: int):
        self.rank, self.parts = rank, []

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        self.parts.append(value.clone())
        return value


def test_ranks_compute_their_own_experts():
    whole = in_fp8(mixture())
    hidden, scores = torch.randn(9, 64).bfloat16(), torch.rand(9, 2).bfloat16()
    index = torch.stack([torch.randperm(8)[:2] for _ in range(9)])
    expected = expert_blocks(whole.model)[0].experts(hidden, index, scores)
    total = torch.zeros_like(expected, dtype=torch.float32)
    for rank in range(2):
        model = mixture()
        weights = ServedWeights(model, shard_model(model, OneOfTwo(rank)))
        weights.use_fp8()
        experts = expert_blocks(model)[0].experts
        assert len(experts.down_proj) == 4
        total += experts(hidden, index, scores).float()
        name = "model.layers.0.mlp.experts.down_proj"
        assert weights.sample(name, experts.down_proj).numel() > 0
    torch.testing.assert_close(total, expected.float(), atol=0.02, rtol=0.02)


def test_experts_that_cannot_be_in_fp8_are_refused():
    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    other = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="not those of GptOssForCausalLM: use weight_dtype=auto"):
        in_fp8(other)
    odd = AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24), dtype=torch.bfloat16
    )
    with pytest.raises(ConfigError, match=r"multiples of 16, (gate_up|down)_proj is"):
        in_fp8(odd)
    assert all(parameter.dtype == torch.bfloat16 for parameter in odd.parameters()), "nothing was converted"


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("num_tokens", [1, 9, 70])
@pytest.mark.parametrize("sizes", [{}, {"num_experts": 128, "moe_intermediate_size": 768, "hidden_size": 2048}])
@pytest.mark.parametrize("is_part", [False, True])
def test_the_kernels_compute_what_the_reference_does(num_tokens, sizes, is_part):
    """Also where some experts are on other ranks."""
    grouped = pytest.importorskip("arealite.inference.cuda.experts")
    if not GPU and sizes:
        pytest.skip("the interpreter is slow")
    config = Qwen3MoeConfig(**SIZES | MOE | {"num_experts": 8, "num_hidden_layers": 1} | sizes)
    experts = expert_blocks(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))[0].experts.to(DEVICE)
    torch.manual_seed(0)
    for name in MATRICES:
        torch.nn.init.normal_(getattr(experts, name), std=0.1)
    convert_experts(experts)
    experts._is_expert_parallel = is_part
    hidden = torch.randn(num_tokens, config.hidden_size, device=DEVICE).bfloat16()
    scores, index = torch.rand(num_tokens, config.num_experts, device=DEVICE).topk(2)
    scores = scores.bfloat16()
    if is_part:
        index[::3, 0], scores[::3, 0] = config.num_experts, 0.0
    found = grouped.forward_grouped(experts, hidden, index, scores)
    expected = forward_reference(experts, hidden, index, scores)
    error = (found - expected).float().norm() / expected.float().norm()
    # The interpreter rounds to FP8 differently.
    assert error < (0.02 if GPU else 0.15), error


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("family", CONFIGS)
def test_the_engine_generates_with_experts_in_fp8_and_takes_updates(family):
    sizes = {"max_total_tokens": 1024, "block_size": 16, "max_running_requests": 8, "max_prefill_tokens": 64}
    old, new = mixture(family=family), mixture(1, family)
    if not expert_blocks(old):
        pytest.skip("this version of transformers does not say where the routers are")
    engine = Engine(ServerConfig(**sizes, weight_dtype="fp8"), model=copy.deepcopy(old).to(DEVICE)).start()
    try:
        for model, sleeps in ((old, False), (new, False), (new, True)):
            if model is new and not sleeps:
                engine.update(WeightSource.received(tensors_of(new), 1)).result(60)
            if sleeps:
                engine.release_memory().result(60)
                engine.resume_memory().result(120)
            own, gaps = in_fp8(copy.deepcopy(model)), []
            for prompt in prompts(8, low=10, high=30):
                (output,) = submit(engine, prompt, temperature=0.0, max_new_tokens=16, ignore_eos=True).result(120)
                found = torch.tensor(output.logprobs)
                gaps.append(found - forward_logprobs(own.model, prompt, output.token_ids))
            assert torch.cat(gaps).abs().mean() < 0.3
    finally:
        engine.close()
