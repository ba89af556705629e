"""Frozen layers in FP8 and NF4: error bounds, gradients, memory, weights for servers, checkpoints, refusals."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import FrozenEngineConfig, GRPOConfig, InferenceEngineConfig, PPOActorConfig
from arealite.api.errors import CheckpointError, ConfigError
from arealite.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from arealite.engine.fsdp.low_bit import LowBitLinear, dequantize, low_bit_weights, num_weights, quantize
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.weights.sync import make_transport, make_weight_meta, needs_first_sync
from tests.engine.engine_testing import SPEC, engine_config, random_batch

LoraLayer = pytest.importorskip("peft").tuners.lora.LoraLayer
KINDS = ["fp8", "nf4"]
BATCH = random_batch([5, 12, 7, 9])
MASK = BATCH["loss_mask"].bool()


@pytest.fixture
def weight():
    torch.manual_seed(0)
    # Rows of very different sizes, one of them zero.
    return torch.randn(48, 128) * torch.logspace(-6, 4, 48)[:, None] * (torch.arange(48) != 7)[:, None]


def make_engine(path, kind="auto", steps=0, cls=FSDPLMEngine, **settings):
    torch.manual_seed(0)
    config = engine_config(path, lora_rank=4, frozen_weight_dtype=kind, **settings)
    engine = cls(config)
    engine.initialize(SPEC)
    for _ in range(steps):
        engine.train_lm(BATCH)
    return engine


def rounded_copy(path, kind, folder) -> str:
    """Write the model of `path` with the weights that `kind` represents."""
    model = AutoModelForCausalLM.from_pretrained(path)
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = dequantize(*quantize(module.weight.data, kind), kind, torch.float32)
    model.save_pretrained(folder)
    return str(folder)


# ------------------------------------------------------------------------------------------------ numbers


def test_fp8_keeps_four_significant_bits_of_every_row(weight):
    codes, scales = quantize(weight, "fp8")
    assert codes.dtype == torch.uint8 and codes.shape == weight.shape and scales.shape == (48, 1)
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))  # powers of two
    back = dequantize(codes, scales, "fp8", torch.float32)
    largest = weight.abs().amax(1, keepdim=True)
    assert ((back - weight).abs() <= weight.abs() / 16 + largest * 2**-17).all()
    assert torch.equal(back[7], torch.zeros(128))
    # Exact in 16 bits, and quantizing again changes nothing.
    assert torch.equal(dequantize(codes, scales, "fp8", torch.bfloat16).float(), back)
    assert torch.equal(dequantize(*quantize(back, "fp8"), "fp8", torch.float32), back)


def test_nf4_is_within_half_a_gap_of_its_levels(weight):
    codes, scales = quantize(weight, "nf4")
    assert codes.shape == (48, 64) and scales.shape == (48 * 2,) and scales.dtype == torch.bfloat16
    back = dequantize(codes, scales, "nf4", torch.float32)
    error = (back - weight).view(-1, 64)
    largest = weight.view(-1, 64).abs().amax(1, keepdim=True)
    # The widest gap is between -1 and -0.696; the scale is rounded to 8 bits.
    assert (error.abs() <= (0.152 + 2**-8) * largest).all()
    assert float(error.norm() / weight.norm()) < 0.12
    assert torch.equal(back[7], torch.zeros(128))
    half = dequantize(codes, scales, "nf4", torch.bfloat16).float()
    torch.testing.assert_close(half, back, rtol=2**-7, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_finite_stay_so(kind):
    for bad in (float("nan"), float("inf")):
        weight = torch.ones(2, 64)
        weight[0, 3] = bad
        back = dequantize(*quantize(weight, kind), kind, torch.float32)
        assert not back[0].isfinite().all() and back[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_with_the_dequantized_weight_and_keeps_the_codes_only(kind, dtype):
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 32, dtype=dtype).requires_grad_(False)
    layer = LowBitLinear(plain, kind, "cpu")
    plain.weight.data = layer.dequantized(dtype)
    x, upstream, kept = torch.randn(2, 5, 64, dtype=dtype), torch.randn(2, 5, 32, dtype=dtype), []
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = layer(inputs[0])
    assert {t.data_ptr() for t in kept} == {layer.codes.data_ptr(), layer.scales.data_ptr()}
    expected = plain(inputs[1])
    assert torch.equal(output, expected)
    for value in (output, expected):
        value.backward(upstream)
    assert torch.equal(inputs[0].grad, inputs[1].grad)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_is_one_graph_and_keeps_no_dequantized_weight(kind):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(LowBitLinear(torch.nn.Linear(64, 64), kind, "cpu") for _ in range(2)))
    layers.requires_grad_(False)
    compiled = torch.compile(layers, fullgraph=True, dynamic=True, backend="aot_eager_decomp_partition")
    x, kept = torch.randn(5, 64), []
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = compiled(inputs[0])
    assert not [t for t in kept if t.is_floating_point() and t.numel() >= 64 * 64]
    expected = layers(inputs[1])
    for value in (output, expected):
        value.square().sum().backward()
    assert torch.equal(output, expected) and torch.equal(inputs[0].grad, inputs[1].grad)


# ------------------------------------------------------------------------------------------------ engines


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_as_on_an_explicit_dequantized_model(kind, checkpointing, model_dirs, tmp_path):
    settings = {"gradient_checkpointing": checkpointing}
    low = make_engine(model_dirs["qwen2"], kind, **settings)
    plain = make_engine(rounded_copy(model_dirs["qwen2"], kind, tmp_path / "rounded"), **settings)
    # All linear layers of the decoder, and nothing else.
    assert len(low_bit_weights(low.model)) == 2 * 7
    assert num_weights(low.model) == num_weights(plain.model) == sum(p.numel() for p in plain.model.parameters())
    assert low._flops.body == plain._flops.body
    losses = [[engine.train_lm(BATCH)["loss"] for _ in range(4)] for engine in (low, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0][-1] < losses[0][0]
    trained = dict(plain.model.named_parameters())
    for name, parameter in low.model.named_parameters():
        torch.testing.assert_close(parameter, trained[name], atol=1e-6, rtol=1e-5)
    for (name, value), (other, expected) in zip(
        sorted(low.gather_weights()), sorted(plain.gather_weights()), strict=True
    ):
        assert name == other
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5)


def logp_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(input_ids=BATCH["input_ids"], attention_mask=BATCH["attention_mask"]).logits
    found = logits[:, :-1].log_softmax(-1).gather(-1, BATCH["input_ids"][:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(found, (1, 0))[MASK]


@pytest.mark.parametrize("way", ["disk", "shm", "broadcast"])
def test_servers_get_the_dequantized_base_with_merged_adapters(way, model_dirs, tmp_path):
    # Only the q_proj have adapters; the other layers are in low bits too.
    engine = make_engine(model_dirs["qwen2"], "nf4", steps=3, lora_targets=["q_proj"])
    expected = engine.forward(BATCH)["logp"][MASK]
    config = GRPOConfig("e", "t", actor=engine_config("", PPOActorConfig, lora_rank=4, frozen_weight_dtype="nf4"))
    config.rollout.weight_update = way
    assert not make_weight_meta(config, tmp_path).is_adapter and needs_first_sync(config, None)
    meta = WeightUpdateMeta(way, str(tmp_path / "merged"))
    engine.update_weights(meta)
    folder = tmp_path / "merged"
    if way != "disk":
        model = AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"])
        published = make_transport(meta).open(meta)
        assert set(published) == set(dict(model.named_parameters()))
        model.load_state_dict(published, strict=False)
        model.save_pretrained(folder := tmp_path / "opened")
    torch.testing.assert_close(logp_of(folder), expected, atol=1e-4, rtol=1e-4)
    engine.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_hold_adapters_and_belong_to_one_type_of_base(kind, model_dirs, tmp_path):
    engine = make_engine(model_dirs["qwen2"], kind, steps=2)
    expected = engine.forward(BATCH)["logp"]
    engine.save(SaveLoadMeta(str(tmp_path / "adapter"), "hf"))
    engine.save(SaveLoadMeta(str(tmp_path / "recover"), "dcp", with_optim=True))
    after = engine.train_lm(BATCH)["loss"]
    for folder, form in (("adapter", "hf"), ("recover", "dcp")):
        fresh = make_engine(model_dirs["qwen2"], kind)
        fresh.load(SaveLoadMeta(str(tmp_path / folder), form, with_optim=form == "dcp"))
        assert torch.equal(fresh.forward(BATCH)["logp"], expected)
    assert fresh.train_lm(BATCH)["loss"] == after
    saved = FileSystemReader(tmp_path / "recover").read_metadata().state_dict_metadata
    assert not [name for name in saved if name.endswith(("base_layer.weight", ".codes", ".scales"))]
    for other in {"auto", *KINDS} - {kind}:
        with pytest.raises(CheckpointError, match="does not fit this engine"):
            make_engine(model_dirs["qwen2"], other).load(SaveLoadMeta(str(tmp_path / "recover"), "dcp"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_in_low_bits_is_the_actor_without_adapters(kind, model_dirs, tmp_path):
    actor = make_engine(model_dirs["qwen2"], kind)
    settings = {"dtype": "float32", "device": "cpu", "frozen_weight_dtype": kind}
    ref = FSDPEngine(FrozenEngineConfig(path=model_dirs["qwen2"], **settings))
    ref.initialize()
    start = actor.forward(BATCH)["logp"]
    assert torch.equal(ref.forward(BATCH)["logp"], start)
    for _ in range(3):
        actor.train_lm(BATCH)
    assert not torch.equal(actor.forward(BATCH)["logp"], start)
    for module in actor.model.modules():
        if isinstance(module, LoraLayer):
            module.enable_adapters(False)
    assert torch.equal(actor.forward(BATCH)["logp"], start)
    # It loads the weights of a folder, in low bits.
    actor.save_weights(str(tmp_path / "merged"), adapter_only=False)
    ref.load(SaveLoadMeta(str(tmp_path / "merged"), "hf"))
    fresh = FSDPEngine(FrozenEngineConfig(path=str(tmp_path / "merged"), **settings))
    fresh.initialize()
    assert torch.equal(ref.forward(BATCH)["logp"], fresh.forward(BATCH)["logp"])


def test_two_types_on_one_rank_keep_adapters_in_float32(model_dirs):
    """FSDP converts adapters, embedding and norms; the base has no other copy."""
    config = engine_config(model_dirs["llama"], lora_rank=4, frozen_weight_dtype="fp8")
    engine = FSDPLMEngine(replace(config, dtype="bfloat16"))
    engine.initialize(SPEC)
    losses = [engine.train_lm(BATCH)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
    assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
    weights = dict(engine.gather_weights())
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert len(weights) == len(list(AutoModelForCausalLM.from_pretrained(model_dirs["llama"]).parameters()))


# ------------------------------------------------------------------------------------------------ refusals


def test_settings_that_do_not_go_together_are_rejected(model_dirs):
    path = model_dirs["qwen2"]
    with pytest.raises(ConfigError, match="frozen_weight_dtype=nf4 is for weights that are not trained: set lora_rank"):
        engine_config(path, frozen_weight_dtype="nf4").check()
    with pytest.raises(ConfigError, match="frozen_weight_dtype=fp8 keeps weights on the device"):
        config = engine_config(path, frozen_weight_dtype="fp8", lora_rank=4, cpu_offload=True)
        config.device = "cuda"
        config.check()
    with pytest.raises(ConfigError, match="frozen_weight_dtype is 'int4'; use one of"):
        engine_config(path, frozen_weight_dtype="int4", lora_rank=4).check()
    config = engine_config(path, frozen_weight_dtype="fp8", lora_rank=4)
    for layout in ("t2", "p2", "d2e2"):
        with pytest.raises(ConfigError, match=r"frozen_weight_dtype=fp8 with .* Give those ranks to d or c"):
            config.check_parallel(AllocationMode.from_str(layout).train)
    config.check_parallel(AllocationMode.from_str("d2c2").train)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
def test_models_without_such_layers_are_rejected(model_dirs, noisy_model_dirs):
    with pytest.raises(ConfigError, match="'qwen3_moe' has 4 experts"):
        make_engine(model_dirs["qwen3_moe"], "fp8", lora_targets=["q_proj"])
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layers"):
        make_engine(noisy_model_dirs["gpt2"], "fp8")


def test_servers_in_fp8_take_merged_weights():
    config = GRPOConfig("e", "t", rollout=InferenceEngineConfig())
    config.actor = engine_config("x", PPOActorConfig, lora_rank=4)
    config.server.weight_dtype, config.train_dataset.path, config.gconfig.n_samples = "fp8", "rows.jsonl", 4
    with pytest.raises(ConfigError, match="sends adapters alone"):
        config.check()
    config.actor.frozen_weight_dtype = "fp8"
    config.check()
