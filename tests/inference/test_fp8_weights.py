"""Tests of weights in FP8: scales, refusals, updates in place, fingerprints; and, with Triton, the fused pass."""

from __future__ import annotations

import copy
import importlib.util
import os
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference import core, fp8
from arealite.inference.engine import Engine
from arealite.inference.fp8 import FP8, Fp8Linear, Quantized, check_device, quantize, stage_pairs
from arealite.inference.loading import read_config
from arealite.inference.sharding import RowLinear, Shards
from arealite.inference.weights import ServedWeights, WeightSource
from arealite.weights.fingerprint import first_mismatch
from tests.inference.conftest import SMALL, forward_logprobs, make_model, prompts, submit

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


# Sizes of all layers are multiples of 16.
SIZES = SMALL | {"hidden_size": 64, "head_dim": 16} | ({} if GPU else {"num_hidden_layers": 1})
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral-window": MistralConfig(**SIZES, sliding_window=11),
}


def small_model(seed: int = 0, family: str = "qwen2"):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def tensors_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def dequantized(model):
    """A copy of a model whose linear layers hold what FP8 makes of their weights."""
    model = copy.deepcopy(model)
    for name in fp8.linear_layers(model):
        layer = model.get_submodule(name)
        values, scales = quantize(layer.weight.data)
        layer.weight.data = (values.float() * scales).to(layer.weight.dtype)
    return model


def update(weights: ServedWeights, new: dict[str, torch.Tensor]) -> None:
    """Load weights as a runner does."""
    staged = weights.stage(WeightSource.received(new, 1))
    for target, value in list(stage_pairs(staged.pairs, weights.model, torch.device("cpu"))):
        target.copy_(value)
    weights.accept(staged)


def test_every_row_has_its_scale():
    x = torch.randn(6, 32) * torch.tensor([[1e-20], [1e-3], [1.0], [1e3], [1e20], [0.0]])
    values, scales = quantize(x)
    assert values.dtype == FP8 and values[:5].float().abs().amax(1).tolist() == [448.0] * 5
    assert values[5].float().abs().max() == 0 and scales[5] == 1
    # Half of a step of three bits; subnormal numbers have steps of 2**-9.
    error = (values.float() * scales - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, scales * 2**-10) * 1.001).all()


@pytest.mark.parametrize("bias", [True, False])
def test_product_is_that_of_the_rounded_numbers(bias):
    layer = torch.nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    rows, weight = quantize(x.flatten(0, 1)), quantize(layer.weight)
    expected = (rows.values.float() * rows.scales) @ (weight.values.float() * weight.scales).t()
    expected = expected + (layer.bias.float() if bias else 0)
    torch.testing.assert_close(Fp8Linear.of(layer)(x).flatten(0, 1).float(), expected, atol=0.01, rtol=0.01)


def test_ranks_are_summed_before_the_bias():
    class Group:
        def sum(self, value):
            return value.mul_(2)

    weight, bias = torch.randn(16, 32).bfloat16(), torch.randn(16).bfloat16()
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    row = Fp8Linear.of(RowLinear(torch.nn.Parameter(weight), torch.nn.Parameter(bias), Group()))
    alone = Fp8Linear.of(RowLinear(torch.nn.Parameter(weight), None, Group()))
    torch.testing.assert_close(row(x), alone(x) + bias)


def test_joined_layers_share_memory():
    layers = [Fp8Linear.of(torch.nn.Linear(32, n, dtype=torch.bfloat16)) for n in (48, 16, 16)]
    x = quantize(torch.randn(4, 32, dtype=torch.bfloat16))
    expected = torch.cat([layer(x) for layer in layers], 1)
    joined = Fp8Linear.join(layers)
    assert torch.equal(joined(x), expected)
    layers[1].scale.fill_(0.0)
    layers[2].weight.data.copy_(torch.zeros(16, 32).to(FP8))
    assert torch.equal(joined(x)[:, 48:], torch.cat([layer.bias.expand(4, -1) for layer in layers[1:]], 1))


def test_update_keeps_addresses_and_fingerprints():
    model, new = small_model(), small_model(1)
    weights = ServedWeights(model)
    before = sum(p.nbytes for p in model.model.layers.parameters())
    weights.use_fp8()
    assert first_mismatch(tensors_of(small_model()), weights.fingerprints()) is None
    places = [p.data_ptr() for p in model.parameters()] + [b.data_ptr() for b in model.buffers()]
    old = weights.fingerprint()
    update(weights, tensors_of(new))
    assert [p.data_ptr() for p in model.parameters()] + [b.data_ptr() for b in model.buffers()] == places
    assert sum(p.nbytes for p in model.model.layers.parameters()) < 0.52 * before
    assert weights.fingerprint() != old
    assert first_mismatch(tensors_of(new), weights.fingerprints()) is None
    assert first_mismatch(tensors_of(small_model()), weights.fingerprints()) is not None
    fresh = ServedWeights(copy.deepcopy(new))
    fresh.use_fp8()
    assert weights.fingerprint() == fresh.fingerprint()
    for name, layer in fp8.fp8_layers(model).items():
        expected = quantize(new.get_parameter(name))
        assert torch.equal(layer.weight.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(layer.scale, expected.scales[:, 0])


def test_fingerprints_show_weights_that_were_not_copied():
    weights = ServedWeights(small_model())
    weights.use_fp8()
    staged = weights.stage(WeightSource.received(tensors_of(small_model(1)), 1))
    weights.accept(staged)  # without the copy
    published = {n: t for n, t in tensors_of(small_model(1)).items() if n in fp8.fp8_layers(weights.model)}
    assert first_mismatch(published, weights.fingerprints()) is not None


def test_updates_in_float32_are_rounded_as_the_trainer_rounds_them():
    weights = ServedWeights(small_model())
    weights.use_fp8()
    new = {name: tensor.float() * 1.001 for name, tensor in tensors_of(small_model(1)).items()}
    update(weights, new)
    assert first_mismatch(new, weights.fingerprints()) is None


@pytest.mark.parametrize(("name", "dim"), [("q_proj", 0), ("o_proj", 1)])
def test_ranks_sample_their_parts(name, dim):
    """The parts of two ranks, in the order of the whole tensor, are the sample of the whole."""
    whole, name = small_model(), f"model.layers.0.self_attn.{name}"
    weight = whole.get_parameter(f"{name}.weight")
    found = torch.empty(weight.numel(), dtype=torch.bfloat16)
    for rank in range(2):
        model = copy.deepcopy(whole)
        shards = Shards(rank, 2, {f"{name}.weight": dim})
        model.get_submodule(name).weight.data = shards.cut(f"{name}.weight", weight.data).clone()
        if dim == 0:
            model.get_submodule(name).bias = None
        weights = ServedWeights(model, shards)
        # Only this layer: the others are not cut.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("arealite.inference.weights.linear_layers", lambda model: [name])
            weights.use_fp8()
        part = model.get_parameter(f"{name}.weight")
        found[shards.owners(f"{name}.weight", part.shape, 1) == rank] = weights.sample(f"{name}.weight", part)
    assert torch.equal(found, weight.flatten())


def test_adapters_are_refused(tmp_path):
    weights = ServedWeights(small_model())
    weights.use_fp8()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arealite.inference.weights.read_adapter", lambda path: None)
        with pytest.raises(WeightUpdateError, match="push merged weights"):
            weights.stage(WeightSource.adapter(str(tmp_path), 1))


def test_what_cannot_be_in_fp8_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="use auto or fp8"):
        ServerConfig(weight_dtype="int4").check()
    with pytest.raises(ConfigError, match="weight_dtype=fp8 works on CUDA only"):
        ServerConfig(weight_dtype="fp8", device="cpu").check()
    config = ServerConfig(model_path=str(tmp_path), weight_dtype="fp8")
    with pytest.raises(ConfigError, match="the device is cpu"):
        check_device(config, torch.device("cpu"))
    if not GPU:
        with pytest.raises(ConfigError, match="the device is cpu"):
            read_config(config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=r"A100 has 8\.0"):
        check_device(config, torch.device("cuda"))
    check_device(ServerConfig(), torch.device("cpu"))
    for model, why in (
        (make_model("qwen2"), "set dtype=bfloat16"),
        (make_model("smollm2").bfloat16(), "multiples of 16, .*q_proj has"),
        (make_model("gemma2-softcap").bfloat16(), "not Gemma2ForCausalLM"),
    ):
        with pytest.raises(ConfigError, match=why):
            ServedWeights(model).use_fp8()


# ---------------------------------------------------------------------------------------- with Triton or a GPU


def compute_logits(decoder, ids, batch, out):
    """On the CPU, products of bfloat16 are not returned in float32."""
    out.copy_(decoder.hidden(ids, batch).float() @ decoder.head.weight.float().t())


def attend_in_float32(attend, q, batch, *args):
    """The interpreter multiplies matrices of bfloat16 wrongly."""
    if batch.scales is None:
        batch = replace(batch, keys=[k.float() for k in batch.keys], values=[v.float() for v in batch.values])
    return attend(q.float(), batch, *args).to(q.dtype)


@pytest.fixture
def make_engine(monkeypatch):
    runner = pytest.importorskip("arealite.inference.cuda.runner")
    from arealite.inference.cuda import ops as cuda_ops
    from arealite.inference.cuda.fused_model import FusedDecoder

    monkeypatch.setattr(core, "make_runner", runner.CudaRunner)
    if not GPU:  # the interpreter has no device to check, and rounds FP8 in another way
        monkeypatch.setattr(core, "check_device", lambda *args: None)
        monkeypatch.setattr("arealite.inference.engine.check_trial", lambda *args: None)
        monkeypatch.setattr(FusedDecoder, "logits", compute_logits)
        attend = cuda_ops.attend
        monkeypatch.setattr(cuda_ops, "attend", lambda *args: attend_in_float32(attend, *args))
    engines = []

    def make(model, **settings):
        sizes = {"max_total_tokens": 1024, "block_size": 16, "max_running_requests": 8, "max_prefill_tokens": 64}
        sizes |= {} if GPU else {"max_running_requests": 2, "max_prefill_tokens": 32}
        config = ServerConfig(**sizes | {"weight_dtype": "fp8"} | settings)
        engines.append(Engine(config, model=copy.deepcopy(model).to(DEVICE)))
        return engines[-1].start()

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("size", [48, 896, 1536, 3584, 8960, 18944])
@pytest.mark.parametrize("count", [1, 7, 64])
def test_kernels_quantize_as_torch_does(size, count):
    ops = pytest.importorskip("arealite.inference.cuda.ops")
    if not GPU and size * count > 10_000:
        pytest.skip("the interpreter is slow")
    torch.manual_seed(0)
    x = torch.randn(count, 2 * size, device=DEVICE).bfloat16()
    residual, weight = torch.randn(count, size, device=DEVICE), torch.rand(size, device=DEVICE).bfloat16()
    delta = x[:, :size].contiguous()
    cases = [
        (ops.quantize(delta), delta),
        (ops.silu_mul(x, fp8=True), ops.silu_mul(x)),
        (ops.add_norm(delta, residual.clone(), weight, 1e-6, fp8=True), ops.add_norm(delta, residual, weight, 1e-6)),
    ]
    for found, exact in cases:
        assert isinstance(found, Quantized) and found.scales.shape == (count, 1)
        expected = quantize(exact)
        torch.testing.assert_close(found.scales, expected.scales, rtol=1e-6, atol=0)
        # Division may differ by a bit, which rounds few numbers to a neighbour; the interpreter rounds worse.
        differs = (found.values.float() != expected.values.float()).float().mean()
        error = (found.values.float() * found.scales - exact.float()).norm() / exact.float().norm()
        assert error < (0.04 if GPU else 0.1) and (not GPU or differs < 0.01), (size, count, error, differs)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_logprobs_are_near_those_of_the_models_own_pass(family, cache, make_engine):
    """Once with the same layers in FP8, and once with the rounded weights but exact activations."""
    model = small_model(0, family)
    engine = make_engine(model, kv_cache_dtype=cache)
    rounded, own = dequantized(model).float(), ServedWeights(copy.deepcopy(model))
    own.use_fp8()
    gaps, wide_gaps = [], []
    for prompt in prompts(8 if GPU else 1, low=10, high=30):
        count = 16 if GPU else 4
        (output,) = submit(engine, prompt, temperature=0.0, max_new_tokens=count, ignore_eos=True).result(600)
        found = torch.tensor(output.logprobs)
        gaps.append(found - forward_logprobs(own.model, prompt, output.token_ids))
        wide_gaps.append(found - forward_logprobs(rounded, prompt, output.token_ids))
    gap, wide_gap = torch.cat(gaps).abs().mean(), torch.cat(wide_gaps).abs().mean()
    assert gap < (0.3 if GPU else 0.5), (gap, wide_gap)
    assert 0 < wide_gap < (0.3 if GPU else 0.5), (gap, wide_gap)


@pytest.mark.gpu
@needs_triton
def test_update_and_sleep_under_graphs(make_engine):
    old, new = small_model(), small_model(1)
    engine, fresh = make_engine(old), make_engine(new)

    def logprobs(engine) -> list[float]:
        prompt, count = prompts(1, low=20, high=21)[0], 8 if GPU else 2
        future = submit(engine, prompt, temperature=0.0, max_new_tokens=count, ignore_eos=True)
        return future.result(600)[0].logprobs

    first, expected = logprobs(engine), logprobs(fresh)
    assert first != expected
    engine.update(WeightSource.received(tensors_of(new), 1)).result(600)
    assert first_mismatch(tensors_of(new), engine.fingerprints().result(600)) is None
    assert logprobs(engine) == expected
    engine.release_memory().result(600)
    engine.resume_memory().result(600)
    assert first_mismatch(tensors_of(new), engine.fingerprints().result(600)) is None
    assert logprobs(engine) == expected
    engine.update(WeightSource.received(tensors_of(old), 2)).result(600)
    assert logprobs(engine) == first


@pytest.mark.gpu
@needs_triton
def test_update_while_sequences_run(make_engine, tmp_path):
    old, new = small_model(), small_model(1)
    engine = make_engine(old)
    new.save_pretrained(tmp_path)
    futures = [submit(engine, p, max_new_tokens=40 if GPU else 12, ignore_eos=True) for p in prompts(6)]
    engine.update(WeightSource.published(WeightUpdateMeta("disk", str(tmp_path), 1))).result(600)
    for future in futures:
        (output,) = future.result(600)
        assert torch.tensor(output.logprobs).isfinite().all()
    assert first_mismatch(tensors_of(new), engine.fingerprints().result(600)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="measures the memory of a GPU")
def test_memory_of_layers_halves(make_engine):
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=4, vocab_size=1024)).bfloat16()
    layers = sum(p.nbytes for p in model.model.layers.parameters())
    used = {}
    for dtype in ("auto", "fp8"):
        torch.cuda.empty_cache()
        begin = torch.cuda.memory_allocated()
        engine = make_engine(model, weight_dtype=dtype, context_length=256)
        used[dtype] = torch.cuda.memory_allocated() - begin
        engine.close()
    assert used["auto"] - used["fp8"] > 0.45 * layers
