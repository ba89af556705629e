"""The memory estimate compared with the peaks that benchmark/memory.py has measured on an H200."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.cli_args import OptimizerConfig, ServerConfig, TrainEngineConfig
from arealite.engine.fsdp.lora import add_adapters
from arealite.engine.fsdp.low_bit import low_bit_buffers, quantize_frozen
from arealite.utils.memory.estimate import (
    CUDA_CONTEXT,
    MemoryPlan,
    Needs,
    choose_sizes,
    reserved_bytes,
    server_needs,
    sums_gradients,
    training_needs,
    weight_bytes,
    without_low_bit,
)
from arealite.utils.memory.model_size import ModelSize, read_model_size

BENCHMARK = Path(__file__).parents[2] / "benchmark"
LINE = re.compile(r"(\S+) +estimate +\S+ +measured +(\S+) .*?allocated +(\S+) +(\{.*\}|kv_tokens=\d+)")
MEASURED = [m.groups() for m in map(LINE.match, (BENCHMARK / "results/memory_h200.txt").read_text().splitlines()) if m]
H200 = 139.8 * 2**30


def tables() -> tuple[dict, dict, dict]:
    """The shapes and settings of the benchmark, without importing it."""
    found = {}
    for node in ast.parse((BENCHMARK / "memory.py").read_text()).body:
        target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
        if getattr(target, "id", None) in ("SHAPES", "TRAINERS", "SERVERS"):
            found[target.id] = ast.literal_eval(node.value)
    return found["SHAPES"], found["TRAINERS"], found["SERVERS"]


def size_of(shape: tuple) -> ModelSize:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "tie_word_embeddings")  # fmt: skip
    return ModelSize.of(dict(zip(names, shape, strict=True)) | {"max_position_embeddings": 32768})


def trainer_of(part: str) -> tuple[ModelSize, TrainEngineConfig]:
    shapes, trainers, _ = tables()
    shape, settings = trainers[part][0], dict(trainers[part][1])
    optimizer = OptimizerConfig(type=settings.pop("type", "adamw"))
    return size_of(shapes[shape]), TrainEngineConfig(path="", optimizer=optimizer, **settings)


def needs_of(part: str, plan: MemoryPlan) -> Needs:
    size, config = trainer_of(part)
    return training_needs(size, config, plan, on_gpu=True, step_tokens=2 * plan.max_tokens_per_mb)


@pytest.mark.parametrize(
    "part, measured, allocated, sizes", MEASURED, ids=[f"{number}-{row[0]}" for number, row in enumerate(MEASURED)]
)
def test_estimate_covers_the_measured_peak_and_is_at_most_15_percent_above(part, measured, allocated, sizes):
    shapes, trainers, servers = tables()
    if part in trainers:
        needs = needs_of(part, MemoryPlan(**ast.literal_eval(sizes)))
        assert tensors(needs) == pytest.approx(float(allocated), rel=0.04)
    else:
        shape, settings, _ = servers[part]
        needs = server_needs(size_of(shapes[shape]), ServerConfig(**settings), H200, on_gpu=True)
    assert 0.97 < (needs.total + CUDA_CONTEXT) / 2**30 / float(measured) < 1.15


def tensors(needs: Needs) -> float:
    """Return the GiB of tensors at the peak: reduced gradients take the place of summed ones, in other memory."""
    parts = needs.lasting | needs.passing
    others = ("communication", "fragmentation", "reduced gradients" if "gradients" in parts else "")
    return sum(value for name, value in parts.items() if name not in others) / 2**30


# large_models_h200.md: tokens, logits chunk that was chosen, what torch had allocated at most.
LARGE = {
    "train-7B-bf16": (32768, 2048, 72.4),
    "train-7B-lora": (32768, 4096, 29.7),
    "train-14B-8bit": (29696, 1024, 104.9),
    "train-14B-lora": (32768, 2048, 51.1),
    "train-32B-lora": (8192, 512, 70.4),
    "train-32B-lora-fp8": (8192, 4096, 45.5),
    "train-32B-lora-nf4": (8192, 4096, 31.9),
}


@pytest.mark.parametrize("part", LARGE)
def test_tensors_of_large_models_are_those_that_were_allocated(part):
    tokens, chunk, allocated = LARGE[part]
    assert tensors(needs_of(part, MemoryPlan(tokens, True, chunk))) == pytest.approx(allocated, rel=0.02)


def test_all_sizes_were_measured():
    assert {part.split("-")[1] for part, *_ in MEASURED} == {"0.5B", "1.5B", "7B"} and len(MEASURED) == 14


def planned(part: str) -> MemoryPlan:
    """Return the sizes that a trainer chooses on an empty H200."""
    size, config = trainer_of(part)
    layout, adapters = ParallelStrategy(), size.adapter_parameters(config.lora_rank)
    free = H200 - CUDA_CONTEXT - weight_bytes(size, config, layout)
    whole, trained = without_low_bit(size, config).parameters + adapters, adapters or size.parameters
    summed = trained if sums_gradients(config, layout) else 0.0
    return choose_sizes(size, config, free - reserved_bytes(config, trained, whole, summed))


@pytest.mark.parametrize("part", tables()[1])
def test_planned_sizes_fit_with_a_margin(part):
    assert needs_of(part, planned(part)).total + CUDA_CONTEXT < 0.97 * H200


def test_no_more_is_planned_than_what_was_measured_to_fit():
    plan = planned("train-1.5B")
    assert not plan.gradient_checkpointing and 24576 <= plan.max_tokens_per_mb <= 30720


def test_logits_and_a_recomputed_layer_are_not_there_at_once():
    size, config = trainer_of("train-7B-lora")
    plans = {chunk: MemoryPlan(32768, True, chunk) for chunk in (256, 2048, 16384)}
    small, medium, large = (training_needs(size, config, plan, True).passing for plan in plans.values())
    assert small == medium and "logits" not in small
    assert large["logits"] == 12 * 16384 * size.vocab and large["activations"] < small["activations"]


@pytest.mark.parametrize("part", ["train-1.5B", "train-7B"])
def test_gradients_that_fsdp_sums_and_reduces_are_in_different_memory(part):
    size, config = trainer_of(part)
    parts = training_needs(size, config, MemoryPlan(4096, True, 1024), True, step_tokens=8192).passing
    one = training_needs(size, config, MemoryPlan(4096, True, 1024), True, step_tokens=4096).passing
    if part == "train-7B":
        assert "reduced gradients" not in parts and parts["gradients"] == 2 * size.parameters
    else:
        assert parts["gradients"] == parts["reduced gradients"] == one["reduced gradients"] == 4 * size.parameters
        assert "gradients" not in one


def test_a_pipeline_stage_has_its_layers_and_one_end_of_the_model():
    size = size_of((4096, 12288, 36, 32, 8, 151936, False))
    config, plan = TrainEngineConfig(path=""), MemoryPlan(16384, True, 1024)
    one, stage = (
        training_needs(size, config, plan, True, ParallelStrategy(pipeline=p), step_tokens=65536) for p in (1, 4)
    )
    layers = size.parameters - size.ends
    assert stage.lasting["weights"] == 4 * (layers / 4 + size.embedding) < one.lasting["weights"]
    assert stage.passing["states between stages"] == 2 * 2 * 65536 * 4096
    # Weights and summed gradients of a stage are not divided over data-parallel ranks during a step.
    shards = training_needs(size, config, plan, True, ParallelStrategy(data=8, pipeline=4), step_tokens=65536)
    assert shards.passing["gathered weights"] == stage.passing["gathered weights"]
    assert shards.lasting["optimizer"] == stage.lasting["optimizer"] / 8


def test_the_estimate_needs_no_torch():

    code = "import sys, arealite.launcher.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 128,
}  # fmt: skip
PLAN = MemoryPlan(1024, False, 256)


def counted(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def make_small(cls, **settings):
    with torch.device("meta"):
        return cls.from_config(Qwen2Config(**SMALL, **settings))


@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"], ["o_proj", "down_proj"]])
def test_adapters_and_their_optimizer_are_those_of_the_real_model(targets):
    pytest.importorskip("peft")
    model = make_small(AutoModelForCausalLM, tie_word_embeddings=False)
    config = TrainEngineConfig(path="", optimizer=OptimizerConfig(), lora_rank=8, lora_targets=targets)
    size = ModelSize.of(model.config.to_dict(), counted(model))
    base = counted(model)
    add_adapters(model, config)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    needs = training_needs(size, config, PLAN, on_gpu=True)
    assert needs.lasting["weights"] == 4 * base and needs.lasting["adapters"] == 4 * adapters == 4 * (
        counted(model) - base
    )
    assert needs.lasting["optimizer"] == 8 * adapters
    assert needs.passing.get("gradients", 0) in (0, 4 * adapters)


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
def test_low_bit_weights_are_those_of_the_real_model(kind):
    pytest.importorskip("peft")
    model = make_small(AutoModelForCausalLM, tie_word_embeddings=False)
    config = TrainEngineConfig(lora_rank=8, frozen_weight_dtype=kind, device="cpu")
    size = ModelSize.of(model.config.to_dict(), counted(model))
    add_adapters(model, config)
    quantize_frozen(model, config)
    held = sum(t.nbytes for t in low_bit_buffers(model).values())
    held += sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    needs = training_needs(size, config, PLAN, on_gpu=True)
    # The scales of FP8 are not counted: here the rows are short.
    assert needs.lasting["weights"] == pytest.approx(held, rel=1e-6 if kind == "nf4" else 0.03)
    plain = training_needs(size, replace(config, frozen_weight_dtype="auto"), PLAN, on_gpu=True)
    assert needs.passing["gathered weights"] < plain.passing["gathered weights"]
    assert needs.lasting["optimizer"] == plain.lasting["optimizer"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_has_the_weights_of_the_real_one(tied):
    policy = make_small(AutoModelForCausalLM, tie_word_embeddings=tied)
    critic = make_small(AutoModelForSequenceClassification, tie_word_embeddings=tied, num_labels=1)
    size = ModelSize.of(policy.config.to_dict(), counted(policy))
    config = TrainEngineConfig(path="", optimizer=OptimizerConfig())
    needs = training_needs(size, config, PLAN, on_gpu=True, scalar_head=True)
    # All but the head's one row.
    assert needs.lasting["weights"] == 4 * (counted(critic) - SMALL["hidden_size"])
    assert needs.lasting["optimizer"] == 2 * needs.lasting["weights"] and "logits" not in needs.passing


def test_ranks_divide_weights_and_states_and_offload_moves_them_to_the_host():
    size = ModelSize.of(SMALL)
    config = TrainEngineConfig(path="", optimizer=OptimizerConfig())
    one = training_needs(size, config, PLAN, True, ParallelStrategy(data=1))
    four = training_needs(size, config, PLAN, True, ParallelStrategy(data=2, context=2))
    for part in ("weights", "optimizer"):
        assert four.lasting[part] == one.lasting[part] / 4
    frozen = training_needs(size, TrainEngineConfig(path="", optimizer=None), PLAN, True)
    assert frozen.lasting["weights"] == 4 * size.parameters and not {"optimizer", "gradients"} & {
        *frozen.lasting,
        *frozen.passing,
    }
    away = training_needs(size, replace(config, cpu_offload=True), PLAN, True)
    assert away.host == {
        "weights": 4 * size.parameters,
        "optimizer": 8 * size.parameters,
        "gradients": 4 * size.parameters,
    }
    assert not {"weights", "optimizer"} & away.lasting.keys()


def write_weights(file: Path, count: int) -> None:
    """Write the header of a safetensors file, which is all that is read."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def test_weights_of_a_folder_are_counted_once_and_only_if_they_are_whole(tmp_path):
    config = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_weights(tmp_path / "model-00001-of-00002.safetensors", 3000)
    write_weights(tmp_path / "consolidated.safetensors", 5000)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    size = read_model_size(str(tmp_path))
    # The second file is not there yet: the sizes of config.json count.
    assert size is not None and size.parameters == ModelSize.of(config).parameters
    write_weights(tmp_path / "model-00002-of-00002.safetensors", 2000)
    size = read_model_size(str(tmp_path))
    assert size is not None and size.parameters == 5000


def test_a_server_in_fp8_has_half_the_weights_and_half_the_cache():
    size = size_of((3584, 18944, 28, 28, 4, 152064, False))
    config = ServerConfig(max_total_tokens=1_000_000)
    wide = server_needs(size, config, H200, on_gpu=True)
    small = server_needs(size, replace(config, weight_dtype="fp8", kv_cache_dtype="fp8"), H200, on_gpu=True)
    layers = size.parameters - size.ends
    assert small.lasting["weights"] == pytest.approx(layers + 2 * size.ends, rel=0.01)
    assert small.passing["weight update"] == small.lasting["weights"]
    assert small.lasting["KV cache"] == wide.lasting["KV cache"] / 256 * (128 + 4)
    # With next to no cache, loading in bfloat16 is the peak.
    tiny = replace(config, weight_dtype="fp8", max_total_tokens=1024)
    assert server_needs(size, tiny, H200, on_gpu=True, is_updated=False).total == pytest.approx(2 * size.parameters)
    # More tokens fit into the same memory.
    tokens = {
        kind: server_needs(size, ServerConfig(kv_cache_dtype=kind), H200, on_gpu=True).notes["KV cache"]
        for kind in ("auto", "fp8")
    }
    assert float(tokens["fp8"].split()[0].replace(",", "")) > 1.9 * float(tokens["auto"].split()[0].replace(",", ""))
