"""Decoder families: served like `generate`, trained like their own forward pass, or rejected.

Each is served with prompts longer than its window, samples that share a prompt, chunks, and a cache too small for all.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.cli_args import ServerConfig
from arealite.api.errors import AllocationError, ConfigError, WeightUpdateError
from arealite.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from arealite.engine.fsdp.parallel import check_layout
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.weights import WeightSource
from arealite.utils.memory.model_size import ModelSize, read_model_size
from tests.engine.engine_testing import SPEC, engine_config

VOCAB, NEW = 120, 12
# Families name the same things differently: each takes those it knows.
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, n_embd=32, intermediate_size=48, ffn_dim=48, word_embed_proj_dim=32,
    num_hidden_layers=3, n_layer=3, num_attention_heads=4, n_head=4, num_key_value_heads=2,
    max_position_embeddings=128, n_positions=128, bos_token_id=1, eos_token_id=2, pad_token_id=0, sliding_window=7,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1,
    initializer_range=0.3, attention_dropout=0.0, dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
WIDE = {"head_dim": 16}
LATENT = dict(
    q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, num_key_value_heads=4
)  # fmt: skip
SHARED = dict(
    head_dim=8, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=4, num_kv_shared_layers=1,
    layer_types=["sliding_attention", "full_attention", "full_attention"],
)  # fmt: skip


def rope(kind: str, **given) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **given}}


ORIGINAL = {"original_max_position_embeddings": 32}
FAMILIES = {
    "llama-llama3": rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL),
    "llama-dynamic": rope("dynamic"),
    "mistral": {},
    "qwen2-window": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": WIDE,
    "mixtral": {},
    "gemma": WIDE,
    "gemma3_text": {**WIDE, "sliding_window_pattern": 2},
    "gemma4_text": {**SHARED, "global_head_dim": 16},  # layers of two widths
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_bigcode": {},  # one KV head
    "opt": {},
    "olmo2": {},
    "olmo3": {},
    "cohere2": {"sliding_window_pattern": 2},  # logits are multiplied
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2},  # and divided
    "starcoder2": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "glm4": WIDE,
    "exaone4": {"sliding_window_pattern": 2},
    "deepseek_v3": LATENT,  # values narrower than keys
    "gpt_oss": WIDE,  # sinks, biases of experts
}
# One family for each kind of computation; the others are slow tests.
FAST = {
    "llama-llama3", "qwen2-window", "qwen3_moe", "gemma3_text", "phi", "gpt2", "gpt_bigcode", "cohere2", "granite",
    "deepseek_v3", "gpt_oss",
}  # fmt: skip
SERVED_ONLY = {"gemma2": ({**WIDE, "attn_logit_softcapping": 2.0}, "caps attention logits")}
REFUSED = {
    "bloom": ({}, "attention interface"),
    "falcon": ({}, "attention interface"),
    "gptj": ({"rotary_dim": 8}, "attention interface"),
    "nemotron": (WIDE, "NemotronAttention"),
    "roberta": ({"is_decoder": True}, "of its own forward pass"),  # counts positions from 2
    "gemma3_text": ({**WIDE, "use_bidirectional_attention": True}, "attend to later ones"),
    "qwen2_moe": ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window of 64"),
    "llama4_text": (WIDE, "chunked_attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
    "qwen3_next": ({**WIDE, "linear_num_key_heads": 2, "linear_num_value_heads": 2}, "linear_attention"),
    "mamba": ({"state_size": 4}, "linear_attention|carries a state"),
}  # fmt: skip


def make(name: str, given: dict, folder) -> PreTrainedModel:
    kind = name.split("-")[0]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    cls = CONFIG_MAPPING[kind]
    known = set(inspect.signature(cls.__init__).parameters) | set(cls.attribute_map)
    config = cls(**{key: value for key, value in SIZES.items() if key in known} | given)
    torch.manual_seed(0)
    # Some versions of transformers would use SDPA, which does not cap logits.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for value in model.state_dict().values():
            # Biases, norms and a router's correction are zeros and ones after initialization.
            if value.dim() == 1:
                value.add_(0.2 * torch.randn_like(value))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", sorted({name.split("-")[0] for name in FAMILIES} | {"qwen2", "qwen3", "apertus"}))
def test_launchers_know_which_families_the_trainer_divides_over_tensor_ranks(kind):
    known = set(inspect.signature(CONFIG_MAPPING[kind].__init__).parameters) | set(CONFIG_MAPPING[kind].attribute_map)
    config = CONFIG_MAPPING[kind](
        **{key: value for key, value in SIZES.items() if key in known} | FAMILIES.get(kind, {})
    )
    try:
        check_layout(ParallelStrategy(tensor=2), config, 2)
        is_divided = True
    except AllocationError as error:
        assert "tensor-parallel plan" in str(error) or kind == "gpt_bigcode", error
        is_divided = False
    assert (ModelSize.of(config.to_dict()).untrainable(2) == "") == is_divided


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 9, 21, 34)
    return [torch.randint(3, VOCAB, (size,), generator=generator).tolist() for size in sizes]


def own_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits of `ids[1:]`."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, :-1]


def logprobs_of(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


def check_served(model: PreTrainedModel, folder) -> None:
    settings = {"block_size": 4, "max_total_tokens": 72, "max_prefill_tokens": 16, "device": "cpu"}
    engine = Engine(ServerConfig(model_path=str(folder), **settings)).start()
    try:
        size = read_model_size(str(folder))
        # Estimates of memory count the cache as it is.
        assert size is not None and engine.shape.kv_bytes_per_token(torch.float32) == 4 * size.cached_numbers(1)
        params = SamplingParams(n=2, temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
        futures = [engine.submit(Request(prompt, params)) for prompt in prompts()]
        for prompt, future in zip(prompts(), futures, strict=True):
            outputs = future.result(60)
            ids = prompt + outputs[0].token_ids
            logits = own_logits(model, ids)
            # Each token is the most likely one, so these are the tokens of greedy generation.
            assert logits[len(prompt) - 1 :].argmax(-1).tolist() == outputs[0].token_ids
            expected = logprobs_of(logits, ids)[len(prompt) - 1 :]
            for output in outputs:
                assert prompt + output.token_ids == ids
                torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)
        assert engine.stats()["preemptions"] > 0
    finally:
        engine.close()


def make_trainer(folder) -> FSDPLMEngine:
    engine = FSDPLMEngine(engine_config(str(folder), max_tokens_per_mb=50))
    engine.initialize(SPEC)
    return engine


# gpt_bigcode scripts a function when it is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in FAMILIES]
)
def test_served_and_trained_logprobs_equal_the_models_own(name, tmp_path):
    model = make(name, FAMILIES[name], tmp_path)
    check_served(model, tmp_path)
    rows = [torch.tensor(prompt) for prompt in prompts()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])).long()
    batch = {"input_ids": ids, "attention_mask": mask, "loss_mask": mask.clone()}
    batch["loss_mask"][:, 0] = 0
    logp = make_trainer(tmp_path).forward(batch)["logp"]
    for row, prompt in zip(logp, prompts(), strict=True):
        expected = logprobs_of(own_logits(model, prompt), prompt)
        torch.testing.assert_close(row[1 : len(prompt)], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "gpt_neox"])
def test_tensors_with_other_names_in_files_are_saved_and_updated(name, tmp_path):
    saved = tmp_path / "saved"
    model = make(name, FAMILIES[name], tmp_path)
    make_trainer(tmp_path).save(SaveLoadMeta(path=str(saved)))
    again, info = type(model).from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key

    engine = Engine(ServerConfig(model_path=str(tmp_path), device="cpu")).start()
    try:
        before = engine.fingerprint().result(10)
        changed = {key: value + 0.1 for key, value in model.named_parameters()}
        engine.update(WeightSource.received(changed, 1)).result(10)
        assert engine.fingerprint().result(10) != before
        engine.update(WeightSource.published(WeightUpdateMeta("disk", str(saved), 2))).result(60)
        assert engine.fingerprint().result(10) == before
        tensors = load_file(saved / "model.safetensors")
        del tensors[max(tensors)]
        save_file(tensors, saved / "model.safetensors")
        with pytest.raises(WeightUpdateError, match="still served"):
            engine.update(WeightSource.published(WeightUpdateMeta("disk", str(saved), 3)))
    finally:
        engine.close()


@pytest.mark.parametrize("name", SERVED_ONLY)
def test_models_that_can_only_be_served_are_rejected_for_training(name, tmp_path):
    given, message = SERVED_ONLY[name]
    check_served(make(name, given, tmp_path), tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_rejected_at_the_start(name, tmp_path):
    given, message = REFUSED[name]
    make(name, given, tmp_path)
    with pytest.raises(ConfigError, match=message):
        Engine(ServerConfig(model_path=str(tmp_path), device="cpu"))
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path)


def test_longrope_limits_the_length(tmp_path):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    make("llama-longrope", rope("longrope", **ORIGINAL, **factors), tmp_path)
    engine = Engine(ServerConfig(model_path=str(tmp_path), device="cpu"))
    assert engine.max_len == 32
    with pytest.raises(ConfigError, match="context_length=64"):
        Engine(ServerConfig(model_path=str(tmp_path), device="cpu", context_length=64))
    ids = torch.ones(1, 33, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, "loss_mask": ids.clone()}
    with pytest.raises(ConfigError, match="beyond 32"):
        make_trainer(tmp_path).forward(batch)
