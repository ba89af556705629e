"""Pipeline stages on gloo ranks train like one rank: gradients, steps, log-probs, values, checkpoints and weights."""

import inspect
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.cli_args import PPOActorConfig, PPOCriticConfig
from arealite.api.errors import AllocationError, ConfigError
from arealite.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from arealite.engine.fsdp.model import load_config
from arealite.engine.fsdp.packed_attention import ATTENTION, PackedLayout
from arealite.engine.fsdp.parallel import check_layout, whole
from arealite.engine.pipeline.split import ModelParts, split_layers
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.engine.sft.lm_engine import FSDPLMEngine, lm_loss
from arealite.utils.data import num_trained_tokens, select_rows
from arealite.utils.model_config import STAGED_FAMILIES, check_layout_of
from tests.engine.engine_testing import SPEC, engine_config, random_batch
from tests.engine.test_families import FAMILIES, SIZES

LENGTHS = [3, 17, 9, 9, 30, 5, 12, 2]
_FOUR = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {
    "tied": lambda: Qwen2Config(**_FOUR, tie_word_embeddings=True),
    "untied": lambda: LlamaConfig(**_FOUR, tie_word_embeddings=False),
}


@pytest.fixture(scope="session")
def four_layers(tmp_path_factory):
    """Folders of models with four layers."""
    folders = {}
    for kind, config in MODELS.items():
        torch.manual_seed(0)
        folders[kind] = str(tmp_path_factory.mktemp(kind))
        AutoModelForCausalLM.from_config(config()).save_pretrained(folders[kind])
    return folders


def _make(cls, config, layout):
    engine = cls(config, AllocationMode.from_str(layout).train)
    engine.initialize(SPEC)
    return engine


def _share(engine, batch):
    """This rank's rows; ranks with few rows make fillers necessary."""
    rows = {2: [[0, 1, 2, 3, 4, 5], [6, 7]], 4: [[0, 1, 2], [3, 4], [5, 6], [7]]}
    return select_rows(batch, rows[engine.dp_size][engine.layout.dp_rank]) if engine.dp_size > 1 else batch


def _keep_gradients(engine, kept, stats):
    kept |= {name: whole(p.grad).clone() for name, p in engine.model.named_parameters() if p.grad is not None}
    return True


def _published(engine):
    """The weights as rank 0 publishes them; other ranks have some of them."""
    assert [name for name, _ in engine.gather_weights()] == list(engine.empty_weights())
    return {name: tensor.clone() for name, tensor in engine.gather_weights() if not tensor.is_meta}


def _train_lm(rank, path, layout, stages, folder, **settings):
    settings |= {"pipeline_stages_per_rank": stages if layout != "d1" else 1}
    engine = _make(FSDPLMEngine, engine_config(path, max_tokens_per_mb=30, **settings), layout)
    gradients: dict[str, torch.Tensor] = {}
    batch = _share(engine, random_batch(LENGTHS))
    stats = engine.train_batch(batch, lm_loss, num_trained_tokens, partial(_keep_gradients, engine, gradients))
    bubble = stats.pop("pipeline_bubble_share", 0.5)
    assert 0.0 <= bubble < 1.0
    weights = _published(engine)
    meta = SaveLoadMeta(f"{folder}/{layout}-{stages}", "dcp", with_optim=True)
    engine.save(meta)
    engine.train_lm(batch)
    engine.load(meta)
    again = engine.train_lm(_share(engine, random_batch(LENGTHS, seed=1)))
    return gradients, weights, [stats[k] for k in ("loss", "grad_norm", "num_tokens")], again["loss"]


def check_like_one_rank(ranks, path, layout, stages, folder, **settings):
    train = partial(_train_lm, **settings)
    gradients, weights, stats, again = train(0, path, "d1", 1, str(folder))
    answers = ranks.run(train, path, layout, stages, str(folder))
    found = {name: value for answer in answers for name, value in answer[0].items()}
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(answers[0][1], weights, rtol=1e-4, atol=1e-5)
    for answer in answers:
        assert answer[2] == pytest.approx(stats, rel=1e-5) and answer[3] == pytest.approx(again, rel=1e-5)
    # A checkpoint of stages is one of the whole model.
    engine = _make(FSDPLMEngine, engine_config(path, max_tokens_per_mb=30, **settings), "d1")
    engine.load(SaveLoadMeta(f"{folder}/{layout}-{stages}", "dcp", with_optim=True))
    assert engine.train_lm(random_batch(LENGTHS, seed=1))["loss"] == pytest.approx(again, rel=1e-5)


@pytest.mark.parametrize(("kind", "stages"), [("tied", 1), ("untied", 2)])
def test_two_pipeline_ranks_train_like_one(two_ranks, four_layers, tmp_path, kind, stages):
    check_like_one_rank(two_ranks, four_layers[kind], "p2", stages, tmp_path)


@pytest.mark.slow
def test_adapters_on_stages_train_like_on_one_rank(two_ranks, four_layers, tmp_path):
    pytest.importorskip("peft")
    check_like_one_rank(two_ranks, four_layers["tied"], "p2", 2, tmp_path, lora_rank=4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "layout", "stages"),
    [("tied", "d2p2", 1), ("untied", "d2p2", 2), ("untied", "p4", 1), ("tied", "p2t2", 2),
     ("untied", "p2c2", 1)],
)  # fmt: skip
def test_combined_with_other_parallelism(four_ranks, four_layers, tmp_path, kind, layout, stages):
    check_like_one_rank(four_ranks, four_layers[kind], layout, stages, tmp_path)


def _update_policy(rank, path, layout, folder):
    """Two updates of actor and critic, with minibatches, shared prefixes and bootstrapped values."""
    actor = _make(FSDPPPOActor, engine_config(path, PPOActorConfig, max_tokens_per_mb=60, ppo_n_minibatches=2), layout)
    critic = _make(FSDPPPOCritic, engine_config(path, PPOCriticConfig, max_tokens_per_mb=60), layout)
    results = []
    for step in range(2):
        batch = random_batch([30, 33, 31, 36, 30, 32, 12, 9], seed=step)
        batch["input_ids"][:4, :24] = batch["input_ids"][0, :24].clone()
        batch = _share(actor, batch)
        batch["prox_logp"] = actor.compute_logp(batch)
        batch["values"] = critic.compute_values(batch)
        actor.compute_advantages(batch)
        stats = [*actor.ppo_update(batch), *critic.ppo_update(batch)]
        results += [batch["prox_logp"].sum().item(), batch["values"].sum().item(), batch["train_logp"].nansum().item()]
        results += [row[key] for row in stats for key in ("loss", "grad_norm")]
    actor.update_weights(WeightUpdateMeta("disk", f"{folder}/{layout}"))
    return results


@pytest.mark.slow
def test_actor_and_critic_update_like_on_one_rank(two_ranks, four_layers, tmp_path):
    path = four_layers["tied"]
    expected = _update_policy(0, path, "d1", tmp_path)
    for answer in two_ranks.run(_update_policy, path, "p2", str(tmp_path)):
        assert answer == pytest.approx(expected, rel=1e-4, abs=1e-4)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / layout).state_dict() for layout in ("d1", "p2"))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", STAGED_FAMILIES)
def test_stages_of_a_family_compute_what_the_model_computes(family):
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    cls = CONFIG_MAPPING[family]
    given = next((values for name, values in FAMILIES.items() if name.split("-")[0] == family), {})
    known = set(inspect.signature(cls.__init__).parameters) | set(cls.attribute_map)
    config = cls(**{key: value for key, value in SIZES.items() if key in known} | given)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    tokens = torch.randint(3, 100, (1, 12))
    layout = PackedLayout.make(torch.tensor([0, 12], dtype=torch.int32), [12])
    settings = {"position_ids": torch.arange(12)[None], "use_cache": False, "packed_layout": layout}
    parts, names = ModelParts(model, 3, 1), {n for n, _ in model.named_parameters()}
    assert all(parts.owner(name) == int(part) for name, part in _owners(names).items())
    with torch.no_grad():
        expected = model.base_model(input_ids=tokens, **settings).last_hidden_state
        view, _ = parts.view(0)
        states = view.base_model(input_ids=tokens, **settings).last_hidden_state
        for stage in (1, 2):
            view, entry = parts.view(stage)
            assert entry is not None
            entry.states = states
            states = view.base_model(inputs_embeds=states, **settings).last_hidden_state
    assert torch.equal(states, expected)


def _owners(names):
    """Three layers on three ranks: the layer's number, 0 for the embedding, 2 for the norm and the head."""
    parts = {name: name.split(".layers.")[1][0] if ".layers." in name else "2" for name in names}
    return {name: "0" if "embed_tokens" in name else part for name, part in parts.items()}


def test_layers_are_divided_evenly():
    assert [len(stage) for stage in split_layers(10, 4)] == [3, 3, 2, 2]
    assert split_layers(4, 2) == [range(2), range(2, 4)]


def test_what_cannot_be_divided_is_refused(four_layers, noisy_model_dirs):
    with pytest.raises(AllocationError, match=r"'gpt2' cannot be divided into 2 pipeline stages; these can: .*llama"):
        check_layout(ParallelStrategy(pipeline=2), load_config(Path(noisy_model_dirs["gpt2"]), False), 2)
    config = load_config(Path(four_layers["tied"]), False)
    with pytest.raises(AllocationError, match="6 pipeline stages need as many layers, but the model has 4"):
        check_layout(ParallelStrategy(pipeline=2), config, 2, stages_per_rank=3)
    with pytest.raises(AllocationError, match="6 pipeline stages"):
        check_layout_of(four_layers["tied"], ParallelStrategy(pipeline=3), 2)
    with pytest.raises(ConfigError, match="pipeline_stages_per_rank=2 with p1"):
        engine_config(four_layers["tied"], pipeline_stages_per_rank=2).check_parallel(ParallelStrategy(data=2))
