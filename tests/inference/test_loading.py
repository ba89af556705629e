"""Tests of sharded loading: each rank reads and holds only its own part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError
from arealite.inference import loading
from arealite.inference.loading import load_shards, read_config
from arealite.inference.sharding import shard_model
from tests.inference.conftest import make_model

CPU = torch.device("cpu")


def group(rank: int):
    """Make a stand-in for the process group of two ranks."""
    return SimpleNamespace(rank=rank, size=2, sum=lambda value: value)


def load(path, rank: int):
    return load_shards(str(path), AutoConfig.from_pretrained(path), torch.float32, CPU, group(rank))


def save(family: str, path, **options):
    model = make_model(family)
    model.generation_config.eos_token_id = [7, 9]
    model.save_pretrained(path, **options)
    return model


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("family", "options"), [("qwen2", {}), ("qwen3", {"max_shard_size": "50KB"}), ("smollm2", {}), ("llama", {})]
)
def test_rank_loads_its_part_of_each_tensor(family, options, rank, tmp_path):
    save(family, tmp_path, **options)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected_shards = shard_model(whole, group(rank))
    model, shards = load(tmp_path, rank)
    assert shards == expected_shards
    expected = dict(whole.named_parameters())
    assert dict(model.named_parameters()).keys() == expected.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]) and parameter.is_contiguous(), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, whole.get_buffer(name)), name
    assert model.generation_config.eos_token_id == [7, 9]
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (family == "smollm2")


def test_a_reward_model_is_not_served(tmp_path):
    """With tied embeddings it lacks no weights of a language model."""
    config = save("smollm2", tmp_path).config
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is a reward model or critic \(LlamaForSeq\w+\), which generates no text"):
        read_config(ServerConfig(model_path=str(tmp_path)))


def test_rank_reads_only_its_part(tmp_path, monkeypatch):
    save("qwen2", tmp_path)
    read = []

    class Counting:
        def __init__(self, stored):
            self.stored, self.get_shape = stored, stored.get_shape

        def __getitem__(self, part):
            value = self.stored[part]
            read.append(value.numel())
            return value

    class CountingFile:
        def __init__(self, *args):
            self.file = safe_open(*args)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *args):
            self.file.__exit__(*args)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return Counting(self.file.get_slice(name))

    monkeypatch.setattr(loading, "safe_open", CountingFile)
    monkeypatch.setattr(loading, "load_decoder", lambda *args, **kwargs: pytest.fail("the whole model was loaded"))
    model, shards = load(tmp_path, 0)
    parameters = dict(model.named_parameters())
    assert sum(read) == sum(p.numel() for p in parameters.values())
    whole = sum(p.numel() for p in make_model("qwen2").parameters())
    cut = sum(p.numel() for name, p in parameters.items() if name in shards.dims)
    assert sum(read) == whole - cut  # the other rank has the other half of each cut tensor


def test_incomplete_weights_are_rejected_with_the_missing_name(tmp_path):
    save("qwen2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model.layers.1.mlp.up_proj.weight"):
        load(tmp_path, 1)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="damaged or incomplete"):
        load(tmp_path, 1)
