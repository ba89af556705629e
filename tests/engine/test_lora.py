"""LoRA: only adapters are trained; they are saved in PEFT's format and published merged."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import DatasetConfig, SFTConfig
from arealite.api.errors import CheckpointError, ConfigError
from arealite.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from arealite.engine.fsdp import sharded_checkpoint
from arealite.engine.fsdp.lora import add_adapters
from arealite.engine.rw.rw_engine import FSDPRWEngine
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.inference.adapters import read_adapter
from arealite.utils import distributed
from arealite.utils.data import select_rows
from arealite.weights.sync import make_transport
from tests.engine.engine_testing import SPEC, engine_config, random_batch

peft = pytest.importorskip("peft")
BATCH = random_batch([5, 12, 7, 9])


def lora_engine(path, steps=3, **kwargs):
    torch.manual_seed(0)
    engine = FSDPLMEngine(engine_config(path, **{"lora_rank": 4} | kwargs))
    engine.initialize(SPEC)
    for _ in range(steps):
        engine.train_lm(BATCH)
    return engine


def logp_of(model):
    with torch.no_grad():
        logits = model(input_ids=BATCH["input_ids"], attention_mask=BATCH["attention_mask"]).logits
    found = logits[:, :-1].log_softmax(-1).gather(-1, BATCH["input_ids"][:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(found, (1, 0))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_adapters_learn_and_load_in_peft_and_servers(model_dirs, tmp_path, kind):
    path = model_dirs[kind]
    engine = lora_engine(path)
    base = AutoModelForCausalLM.from_pretrained(path)
    frozen = dict(base.named_parameters())
    for name, parameter in engine.model.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(parameter, frozen[name.replace(".base_layer", "")])
    mask = BATCH["loss_mask"].bool()
    expected = engine.forward(BATCH)["logp"][mask]
    assert (expected - logp_of(base)[mask]).abs().max() > 0.05

    engine.save(SaveLoadMeta(str(tmp_path / "adapter"), "hf"))
    assert len(read_adapter(tmp_path / "adapter").layers) >= 8
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logp_of(adapted)[mask], expected, atol=1e-4, rtol=1e-4)

    engine.update_weights(WeightUpdateMeta("disk", str(tmp_path / "merged")))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logp_of(merged)[mask], expected, atol=1e-4, rtol=1e-4)

    fresh = lora_engine(path, steps=0)
    fresh.load(SaveLoadMeta(str(tmp_path / "adapter"), "hf"))
    assert torch.equal(fresh.forward(BATCH)["logp"][mask], expected)


def test_adapters_of_experts_and_routers_are_refused(model_dirs):
    for targets in (["gate_proj", "up_proj"], ["down_proj", "q_proj"], ["gate"]):
        with pytest.raises(ConfigError, match=r"lora_targets: adapters of .* cannot be trained; leave out .* experts"):
            lora_engine(model_dirs["qwen3_moe"], steps=0, lora_targets=targets)


@pytest.mark.parametrize(("alpha", "scale"), [(None, 2.0), (4, 1.0), (1, 0.25)])
def test_alpha_scales_the_adapters(model_dirs, tmp_path, alpha, scale):
    engine = lora_engine(model_dirs["qwen2"], lora_alpha=alpha)
    layer = engine.model.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == scale
    mask = BATCH["loss_mask"].bool()
    engine.save(SaveLoadMeta(str(tmp_path / "adapter"), "hf"))
    base = AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"])
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logp_of(adapted)[mask], engine.forward(BATCH)["logp"][mask], atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="lora_alpha is set but lora_rank is 0"):
        engine_config(model_dirs["qwen2"], lora_alpha=8).check()


@pytest.mark.parametrize("format", ["hf", "dcp"])
def test_adapters_of_another_scale_are_not_loaded(model_dirs, tmp_path, format):
    saved = SaveLoadMeta(str(tmp_path / "saved"), format, with_optim=format == "dcp")
    lora_engine(model_dirs["qwen2"]).save(saved)
    other = lora_engine(model_dirs["qwen2"], lora_alpha=16)
    before = other.forward(BATCH)["logp"]
    with pytest.raises(CheckpointError, match="trained with lora_alpha=8, and this engine has lora_alpha=16"):
        other.load(saved)
    assert torch.equal(before, other.forward(BATCH)["logp"])
    lora_engine(model_dirs["qwen2"], lora_alpha=8).load(saved)


@pytest.mark.parametrize("format", ["hf", "dcp"])
def test_adapters_of_another_rank_are_not_loaded(model_dirs, tmp_path, format):
    saved = SaveLoadMeta(str(tmp_path / "saved"), format, with_optim=format == "dcp")
    lora_engine(model_dirs["qwen2"], steps=1).save(saved)
    other = lora_engine(model_dirs["qwen2"], steps=1, lora_rank=8)
    before = other.forward(BATCH)["logp"]
    with pytest.raises(CheckpointError, match=r"adapters of rank 4, and this engine has lora_rank=8\. Set lora_rank=4"):
        other.load(saved)
    assert torch.equal(before, other.forward(BATCH)["logp"])


def test_a_sharded_checkpoint_of_other_targets_names_both(model_dirs, tmp_path):
    saved = SaveLoadMeta(str(tmp_path / "saved"), "dcp", with_optim=True)
    lora_engine(model_dirs["qwen2"], lora_targets=["q_proj", "v_proj"]).save(saved)
    others = {"k_proj, q_proj": lora_engine(model_dirs["qwen2"], lora_targets=["q_proj", "k_proj"])}
    others["no layer"] = lora_engine(model_dirs["qwen2"], lora_rank=0)
    for layers, other in others.items():
        before = other.forward(BATCH)["logp"]
        message = rf"has adapters of q_proj, v_proj, and this engine has adapters of {layers}: set lora_rank and"
        with pytest.raises(CheckpointError, match=message):
            other.load(saved)
        assert torch.equal(before, other.forward(BATCH)["logp"])


def test_checkpoints_that_do_not_name_their_alpha_are_loaded(model_dirs, tmp_path, monkeypatch):
    """Those of earlier versions."""
    saved = SaveLoadMeta(str(tmp_path / "saved"), "dcp", with_optim=True)
    with monkeypatch.context() as earlier:
        earlier.setattr(sharded_checkpoint, "alpha_mark", lambda config: {})
        engine = lora_engine(model_dirs["qwen2"])
        engine.save(saved)
    other = lora_engine(model_dirs["qwen2"], steps=0)
    other.load(saved)
    assert torch.equal(engine.forward(BATCH)["logp"], other.forward(BATCH)["logp"])


def test_folders_with_other_adapters_are_not_loaded(model_dirs, tmp_path):
    saved = SaveLoadMeta(str(tmp_path / "saved"))
    lora_engine(model_dirs["qwen2"]).save(saved)
    with pytest.raises(CheckpointError, match="has adapters that this engine lacks, such as base_model"):
        lora_engine(model_dirs["qwen2"], lora_targets=["q_proj"]).load(saved)
    file = tmp_path / "saved" / "adapter_config.json"
    settings = json.loads(file.read_text())
    # PEFT's rsLoRA divides by the root of the rank: 4 / √4 is 8 / 4.
    file.write_text(json.dumps(settings | {"lora_alpha": 4, "use_rslora": True}))
    lora_engine(model_dirs["qwen2"]).load(saved)
    file.write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(CheckpointError, match="has adapters with use_dora, which this engine does not train"):
        lora_engine(model_dirs["qwen2"]).load(saved)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        lora_engine(model_dirs["qwen2"]).load(saved)


@pytest.mark.parametrize("way", ["shm", "broadcast"])
def test_shared_memory_and_broadcast_publish_merged_weights(way, model_dirs, tmp_path):
    engine = lora_engine(model_dirs["qwen2"])
    meta = WeightUpdateMeta(way, str(tmp_path / "segment"))
    engine.update_weights(meta)
    published = make_transport(meta).open(meta)
    merged = AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"])
    assert set(published) == set(dict(merged.named_parameters()))
    merged.load_state_dict(published, strict=False)
    mask = BATCH["loss_mask"].bool()
    expected = engine.forward(BATCH)["logp"][mask]
    torch.testing.assert_close(logp_of(merged)[mask], expected, atol=1e-4, rtol=1e-4)
    engine.destroy()


@pytest.mark.parametrize("targets", [[], ["q_proj", "score"]])
def test_a_reward_models_head_is_trained_and_saved_with_the_adapters(model_dirs, tmp_path, targets):
    def reward_model():
        config = engine_config(model_dirs["qwen2"], lora_rank=4, lora_targets=targets)
        engine = FSDPRWEngine(config)
        engine.initialize(SPEC)
        return engine

    engine = reward_model()
    head = engine.model.score.weight.detach().clone()
    pairs = {"pair_ids": torch.tensor([1, 2, 1, 2]), "is_chosen": torch.tensor([1, 0, 0, 1])}
    for _ in range(10):
        engine.train_rw(BATCH | pairs)
    assert not torch.equal(engine.model.score.weight, head)
    expected = engine.score(BATCH)
    saved = SaveLoadMeta(str(tmp_path / "adapter"), "hf")
    engine.save(saved)

    fresh = reward_model()
    assert not torch.equal(fresh.score(BATCH), expected)
    fresh.load(saved)
    assert torch.equal(fresh.score(BATCH), expected)
    base = AutoModelForSequenceClassification.from_pretrained(model_dirs["qwen2"], num_labels=1)
    adapted = peft.PeftModel.from_pretrained(base, saved.path)
    inputs = {k: BATCH[k] for k in ("input_ids", "attention_mask")}
    scores = adapted(**inputs).logits.squeeze(-1).detach()
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


def _losses_on_rank(rank, path):
    engine = lora_engine(path, steps=0)
    rows = [0, 1, 2, 3] if rank is None else [[0, 1, 2], [3]][rank]
    return [engine.train_lm(select_rows(BATCH, rows))["loss"] for _ in range(4)]


def test_adapters_on_two_ranks_train_like_one(model_dirs, two_ranks):
    one = _losses_on_rank(None, model_dirs["qwen2"])
    two = two_ranks.run(_losses_on_rank, model_dirs["qwen2"])
    assert two[0] == two[1] == pytest.approx(one, rel=1e-5)
    assert one[-1] < one[0]


def _low_bit_on_rank(rank, path):
    found = {}
    for kind, layout in (("fp8", "d2"), ("nf4", "c2")):
        parallel = AllocationMode.from_str(layout).train if rank is not None else None
        engine = FSDPLMEngine(engine_config(path, lora_rank=4, frozen_weight_dtype=kind), parallel)
        engine.initialize(SPEC)
        # Context-parallel ranks get the same rows.
        rows = [[0, 1, 2], [3]][rank] if rank is not None and layout == "d2" else [0, 1, 2, 3]
        losses = [engine.train_lm(select_rows(BATCH, rows))["loss"] for _ in range(3)]
        found[kind] = losses, {name: value.clone() for name, value in engine.gather_weights()}
    return found


def test_a_base_in_low_bits_on_two_ranks_trains_and_is_published_like_on_one(model_dirs, two_ranks):
    one = _low_bit_on_rank(None, model_dirs["qwen2"])
    first, second = two_ranks.run(_low_bit_on_rank, model_dirs["qwen2"])
    for kind, (losses, weights) in one.items():
        assert first[kind][0] == second[kind][0] == pytest.approx(losses, rel=1e-5) and losses[-1] < losses[0]
        for name, value in first[kind][1].items():
            torch.testing.assert_close(value, weights[name], atol=1e-5, rtol=1e-4)
            assert torch.equal(value, second[kind][1][name])


def test_unknown_targets_are_rejected(model_dirs):
    with pytest.raises(ConfigError, match="q_proj"):
        lora_engine(model_dirs["qwen2"], lora_targets=["query"])


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_targets_that_no_gradient_reaches_are_rejected(model_dirs, target):
    config = engine_config(model_dirs["qwen2"], lora_rank=4, lora_targets=["q_proj", target])
    with pytest.raises(ConfigError, match=f"adapters of {target} cannot be trained"):
        # Before servers start.
        config.check()
    # By the model itself, whose layers may have other names.
    with pytest.raises(ConfigError, match=f"adapters of .*{target} cannot be trained"):
        add_adapters(AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"]), config)


def test_tensor_parallel_is_rejected_before_servers_start(model_dirs, monkeypatch):
    model = engine_config(model_dirs["qwen2"], lora_rank=4)
    data = DatasetConfig(path="rows.jsonl")
    config = SFTConfig("e", "t", allocation_mode="d1t2", model=model, train_dataset=data)
    with pytest.raises(ConfigError, match="lora_rank=4 with t2"):
        config.check()
    config.allocation_mode = "d2"
    config.check()
    # a script that makes its own engines
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match="lora_rank=4 with t2"):
        FSDPLMEngine(model, AllocationMode.from_str("t2").train)
