"""Kernels of mixtures of experts against transformers; without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

import copy
import importlib.util
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from arealite.api.cli_args import ServerConfig
from arealite.inference import core
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SamplingParams
from arealite.utils.routing import expert_blocks
from tests.inference.conftest import SMALL, forward_logprobs, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, head_dim=16, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "qwen3_moe_dense": Qwen3MoeConfig(
        **SMALL, head_dim=16, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2, mlp_only_layers=[0]
    ),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}
# The GPU computes in bfloat16. A router whose scores differ by less than its rounding would choose other experts than
# float32, so all experts are chosen there.
NUM_CHOSEN = {"qwen3_moe": 6, "qwen3_moe_dense": 6, "mixtral": 4} if GPU else dict.fromkeys(CONFIGS, 2)


def make(kind: str, num_chosen: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[kind])
    config.num_experts_per_tok = num_chosen
    return AutoModelForCausalLM.from_config(config).to(DEVICE, DTYPE).eval()


@pytest.mark.parametrize(("num_pairs", "block"), [(5, 16), (64, 64), (200, 64), (4097, 4096)])
def test_pairs_are_sorted_by_expert(num_pairs, block):
    """Also if they are read in several blocks."""
    kernels = pytest.importorskip("arealite.inference.cuda.group_kernels")
    num_experts, rows = 6, 16
    torch.manual_seed(num_pairs)
    # Those of the last one are on another rank.
    index = torch.randint(num_experts + 1, (num_pairs,)).to(DEVICE)
    num_tiles = num_pairs // rows + num_experts
    order = torch.full((num_pairs,), -1, dtype=torch.int32, device=DEVICE)
    tiles = torch.full((num_tiles, 3), -9, dtype=torch.int32, device=DEVICE)
    kernels.group_pairs_kernel[(num_experts,)](
        index, order, tiles, num_pairs, num_tiles, BLOCK=block, BM=rows, TILES=16, EARLY=False
    )
    counts = index.bincount(minlength=num_experts + 1)[:num_experts].tolist()
    expected = index.argsort(stable=True)[: sum(counts)]
    assert torch.equal(order[: sum(counts)].long(), expected)
    found = [tuple(tile) for tile in tiles.tolist() if tile[0] >= 0]
    wanted = []
    for expert, count in enumerate(counts):
        first = sum(counts[:expert])
        wanted += [(expert, first + start, first + count) for start in range(0, count, rows)]
    assert found == wanted and -9 not in tiles[:, 0].tolist()


@pytest.mark.parametrize("num_tokens", [1, 3, 40, 300, *([5000] if GPU else [])])
@pytest.mark.parametrize("is_part", [False, True])
def test_experts_compute_what_those_of_transformers_do(num_tokens, is_part):
    """Also where some experts are on other ranks."""
    # Imported here: both load Triton, which must know before that it interprets.
    experts_of = pytest.importorskip("arealite.inference.cuda.experts")
    theirs = pytest.importorskip("transformers.integrations.moe")
    experts = expert_blocks(make("qwen3_moe"))[0].experts
    experts._is_expert_parallel = is_part
    torch.manual_seed(num_tokens)
    for name in ("gate_up_proj", "down_proj"):
        torch.nn.init.normal_(getattr(experts, name), std=0.1)
    count = experts.num_experts
    hidden = torch.randn(num_tokens, experts.hidden_dim).to(DEVICE, DTYPE)
    index = torch.stack([torch.randperm(count)[:2] for _ in range(num_tokens)]).to(DEVICE)
    shares = torch.rand(num_tokens, 2).to(DEVICE, DTYPE)
    if is_part:
        index[::3, 0], shares[::3, 0] = count, 0.0
    with torch.no_grad():
        expected = theirs.grouped_mm_experts_forward(experts, hidden, index, shares)
        found = experts_of.forward_grouped(experts, hidden, index, shares)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("kind", "normalized"), [("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", True)])
@pytest.mark.parametrize("num_chosen", [1, 2, 4])
def test_routers_choose_what_those_of_transformers_do(kind, normalized, num_chosen):
    experts_of = pytest.importorskip("arealite.inference.cuda.experts")
    router = expert_blocks(make(kind, num_chosen))[-1].router
    if kind == "qwen3_moe":
        router.norm_topk_prob = normalized
    # Logits of one number each, without ties.
    torch.nn.init.zeros_(router.weight)
    router.weight.data.fill_diagonal_(1.0)
    count = router.weight.shape[0]
    hidden = torch.zeros(70, router.hidden_dim)
    for row in hidden:
        row[:count] = torch.randperm(count) / 4 - 0.5
    hidden = hidden.to(DEVICE, DTYPE)
    with torch.no_grad():
        expected, found = router(hidden), experts_of.choose_experts(router, hidden)
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_of_equal_logits_the_first_experts_are_chosen():
    experts_of = pytest.importorskip("arealite.inference.cuda.experts")
    router = expert_blocks(make("mixtral"))[0].router
    hidden = torch.zeros(3, router.hidden_dim, device=DEVICE, dtype=DTYPE)
    _, shares, index = experts_of.choose_experts(router, hidden)
    assert index.tolist() == [[0, 1]] * 3 and shares.tolist() == [[0.5, 0.5]] * 3


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_mixture_is_served_with_the_log_probs_of_transformers(kind, monkeypatch):
    cuda_runner = pytest.importorskip("arealite.inference.cuda.runner")
    monkeypatch.setattr(core, "make_runner", cuda_runner.CudaRunner)
    # The interpreter serves float32 only, which keeps the experts of transformers.
    model = make(kind, NUM_CHOSEN[kind])
    model = model if GPU else model.float()
    settings = {"max_total_tokens": 512, "block_size": 4, "max_running_requests": 4, "max_prefill_tokens": 32}
    engine = Engine(ServerConfig(record_routing=True, **settings), model=copy.deepcopy(model)).start()
    try:
        assert type(engine.core.runner.decoder).__name__ == "FusedDecoder"
        for seed, prompt in enumerate(prompts(3, low=5, high=12)):
            params = SamplingParams(max_new_tokens=6, ignore_eos=True, sampling_seed=seed)
            (output,) = engine.submit(Request(prompt, params, want_routing=True)).result(120)
            expected = forward_logprobs(model.cpu().float(), prompt, output.token_ids)
            # Logits of up to 8 come from numbers with 8 bits in bfloat16.
            atol = 0.15 if GPU else 1e-3
            torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=atol, rtol=0.0)
            assert output.routed_experts.shape == (len(prompt) + 5, NUM_CHOSEN[kind] * len(expert_blocks(model)))
    finally:
        engine.close()


def test_other_experts_keep_the_function_of_transformers():
    experts_of = pytest.importorskip("arealite.inference.cuda.experts")
    model = AutoModelForCausalLM.from_config(CONFIGS["mixtral"]).float()
    experts_of.use_grouped_kernels(model)
    assert all(block.experts.config is model.config for block in expert_blocks(model))
