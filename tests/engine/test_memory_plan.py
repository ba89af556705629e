"""Tests of the sizes that an engine chooses from the free memory of its device."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.cli_args import OptimizerConfig, TrainEngineConfig
from arealite.api.errors import TrainingError
from arealite.engine.fsdp.memory import explains_out_of_memory, plan_memory
from arealite.utils.memory.estimate import MemoryPlan, choose_sizes
from arealite.utils.memory.model_size import ModelSize

GB = 1e9


@pytest.fixture(scope="module")
def model():
    """A model of 0.5B parameters without memory."""
    config = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def half_billion(model):
    return ModelSize.of(model.config.to_dict())


def test_parameters_are_counted_from_the_config(model, half_billion):
    assert half_billion.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-3)


def config(**settings) -> TrainEngineConfig:
    return TrainEngineConfig(path="", compile=True, optimizer=settings.pop("optimizer", OptimizerConfig()), **settings)


def test_a_large_device_keeps_activations_and_a_small_one_recomputes_them(half_billion):
    large = choose_sizes(half_billion, config(), 80 * GB)
    assert large == MemoryPlan(max_tokens_per_mb=32768, gradient_checkpointing=False, logprob_chunk_size=4096)
    small = choose_sizes(half_billion, config(), 8 * GB)
    assert small.gradient_checkpointing and 1024 <= small.max_tokens_per_mb <= 32768
    assert small.logprob_chunk_size < 1024
    tiny = choose_sizes(half_billion, config(), -1.0)
    assert tiny == MemoryPlan(1024, True, 256)


def test_more_memory_never_means_smaller_micro_batches(half_billion):
    plans = [choose_sizes(half_billion, config(gradient_checkpointing=False), gb * GB) for gb in range(2, 100, 7)]
    tokens = [plan.max_tokens_per_mb for plan in plans]
    assert tokens == sorted(tokens) and tokens[0] < tokens[-1]


def test_estimate_covers_the_measured_peak_of_activations(half_billion):
    """30 GiB were measured for 32,768 tokens of this model with compiled layers."""
    needs = next(
        gb
        for gb in range(1, 100)
        if choose_sizes(half_billion, config(gradient_checkpointing=False), gb * GB).max_tokens_per_mb == 32768
    )
    assert 30 * 2**30 / GB < needs < 60


def test_settings_are_kept(half_billion):
    settings = {"max_tokens_per_mb": 500, "gradient_checkpointing": True, "logprob_chunk_size": 7}
    assert choose_sizes(half_billion, config(**settings), 80 * GB) == MemoryPlan(500, True, 7)
    assert choose_sizes(half_billion, config(max_tokens_per_mb=500), 8 * GB).gradient_checkpointing is False


def test_a_frozen_model_keeps_no_activations(half_billion):
    plan = choose_sizes(half_billion, config(optimizer=None), 8 * GB)
    assert plan.max_tokens_per_mb == 32768 and not plan.gradient_checkpointing


def test_sizes_on_cpu_do_not_depend_on_memory(model):
    assert plan_memory(model, config(), "cpu") == MemoryPlan(16384, False, 1024)


def test_beside_a_server_less_is_planned(model, half_billion, monkeypatch):
    """What the allocator may not take, for the copy of the weights and for the server, is not planned either."""
    free = 40 * GB
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2 * GB)

    def planned(used_by_others: float, free: float) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free + used_by_others + 2 * GB))
        return plan_memory(model, config(), "cuda").max_tokens_per_mb

    room = 2 * GB + 2 * half_billion.parameters
    assert planned(60 * GB, free) == planned(1 * GB, free - room) < planned(1 * GB, free)


def test_weights_of_other_ranks_count_by_layers(monkeypatch):
    """FSDP gathers one layer after another: room for all of them would leave none for tokens."""
    config_of = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=48, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=8192, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of)
    parameters = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0.0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0.0)

    embedding = 896 * 8192
    gathered = 4 * (embedding + 2 * (parameters - embedding) / 48)
    # Gradients and optimizer states of all layers, and what is gathered in 16 bits.
    free = 12 * parameters + 2 * gathered + 3 * GB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
    found = plan_memory(model, config(), "cuda", ParallelStrategy(data=8))
    assert found == choose_sizes(ModelSize.of(config_of.to_dict(), parameters), config(), 3 * GB)
    assert found.max_tokens_per_mb > 4096


def test_out_of_memory_says_what_to_set():
    class Engine:
        memory = MemoryPlan(20480, False, 4096)

        @explains_out_of_memory
        def run(self, size: str) -> None:
            raise torch.OutOfMemoryError(f"Tried to allocate {size}")

    with pytest.raises(TrainingError, match=r"20,480 tokens.*gradient_checkpointing=true or max_tokens_per_mb=10240"):
        Engine().run("2 GiB")
