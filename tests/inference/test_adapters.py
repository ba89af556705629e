"""Tests of LoRA adapters in the engine: log-probs against PEFT, exact swaps, rejected folders."""

from __future__ import annotations

import copy
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from arealite.api.errors import WeightUpdateError
from arealite.inference.adapters import _matches, read_adapter
from arealite.inference.weights import WeightSource
from tests.inference.conftest import forward_logprobs, make_model, prompts, run, submit_and_see_start

peft = pytest.importorskip("peft")


def make_adapter(folder, model, seed, **settings):
    """Save a random adapter as a PEFT folder; returns PEFT's model with it."""
    torch.manual_seed(seed)
    given = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **(given | settings))
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.fixture(scope="module")
def saved_adapter(tmp_path_factory):
    """An adapter that fits `make_model()`, for tests that only read it or a copy."""
    folder = tmp_path_factory.mktemp("adapter")
    make_adapter(folder, make_model(), 1)
    return folder


VARIANTS = {
    "plain": {},
    "rank-stabilised": {"use_rslora": True, "lora_alpha": 3},
    "some layers": {"target_modules": ["q_proj", "down_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"1.mlp.up_proj": 32}},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("family", ["qwen2", "smollm2"])
def test_logprobs_equal_pefts_forward_pass(family, settings, make_engine, tmp_path):
    model = make_model(family)
    adapted = make_adapter(tmp_path, model, 1, **settings)
    engine = make_engine(model)
    engine.update(WeightSource.adapter(str(tmp_path), 3)).result(30)
    for prompt in prompts(3, low=3):
        (output,) = run(engine, prompt, max_new_tokens=12, ignore_eos=True)
        expected = forward_logprobs(adapted, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)
        assert output.version_spans == [(3, 0, 12)]
        base = forward_logprobs(model, prompt, output.token_ids)
        assert (expected - base).abs().max() > 1e-2


def test_swapping_adapters_restores_the_same_bits(make_engine, tmp_path):
    model = make_model()
    make_adapter(tmp_path / "one", model, 1)
    make_adapter(tmp_path / "two", model, 2, r=2, target_modules=["q_proj", "up_proj"])
    engine = make_engine(model)

    def weights():
        return {n: p.clone() for n, p in engine.model.named_parameters()}

    seen = [weights()]
    order = ["one", "two", "one", "two", "one"]
    for version, name in enumerate(order, 5):
        engine.update(WeightSource.adapter(str(tmp_path / name), version)).result(30)
        seen.append(weights())
    held = engine.fingerprints().result(30)
    assert sum(".lora_A." in name for name in held) == 7 * model.config.num_hidden_layers  # the adapter `one` is in use
    engine.update(WeightSource.base()).result(30)
    assert engine.version == 0 and engine.adapter_name == "" and engine.weights.adapter is None
    for now, same in ((seen[3], seen[1]), (seen[5], seen[1]), (seen[4], seen[2])):
        assert all(torch.equal(now[n], same[n]) for n in now)
    assert all(torch.equal(p, seen[0][n]) for n, p in engine.model.named_parameters())
    assert not all(torch.equal(seen[1][n], seen[2][n]) for n in seen[1])


def test_adapter_after_a_full_update_uses_the_new_base(make_engine, tmp_path):
    model, other = make_model(seed=0), make_model(seed=9)
    make_adapter(tmp_path / "one", model, 1)
    engine = make_engine(model)
    engine.update(WeightSource.adapter(str(tmp_path / "one"), 1)).result(30)
    engine.update(WeightSource.received(dict(other.named_parameters()), 2)).result(30)
    assert engine.weights.adapter is None and engine.adapter_name == ""
    with pytest.raises(WeightUpdateError, match="no adapter is loaded"):
        engine.update(WeightSource.base())
    assert engine.version == 2
    adapted = make_adapter(tmp_path / "two", other, 2)
    engine.update(WeightSource.adapter(str(tmp_path / "two"), 3)).result(30)
    (output,) = run(engine, [5, 6, 7], max_new_tokens=12, ignore_eos=True)
    expected = forward_logprobs(adapted, [5, 6, 7], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)
    engine.update(WeightSource.base()).result(30)
    assert engine.version == 2


def test_adapter_update_under_load_marks_later_tokens(make_engine, tmp_path):
    model = make_model()
    make_adapter(tmp_path, model, 1)
    engine = make_engine(model)
    future = submit_and_see_start(engine, [1, 2, 3], max_new_tokens=200, ignore_eos=True)
    engine.update(WeightSource.adapter(str(tmp_path), 4), flush_cache=False).result(30)
    (output,) = future.result(60)
    (first, start, cut), (second, again, end) = output.version_spans
    assert (first, second, start, end) == (0, 4, 0, 200) and cut == again > 0


def damage(folder, change):
    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    change(settings, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")


Q = "base_model.model.model.layers.1.self_attn.q_proj."
BAD = {
    "DoRA": (lambda s, t: s.update(use_dora=True), "use_dora"),
    "trained biases": (lambda s, t: s.update(bias="all"), "bias=all"),
    "moved base": (lambda s, t: s.update(init_lora_weights="pissa"), "pissa"),
    "not LoRA": (lambda s, t: s.update(peft_type="IA3"), "IA3"),
    "rank": (lambda s, t: s.update(r=3), "rank 3"),
    "no rank": (lambda s, t: s.pop("r"), "r of .* got None"),
    "rank of nothing": (
        lambda s, t: (s.update(r=0), t.update({k: v.narrow(int("lora_B" in k), 0, 0).clone() for k, v in t.items()})),
        "r of .* got 0",
    ),
    "no alpha": (lambda s, t: s.update(lora_alpha=None), "lora_alpha of .* got None"),
    "no number": (lambda s, t: s.update(lora_alpha=float("nan")), "lora_alpha of .* got nan"),
    "huge alpha": (lambda s, t: s.update(lora_alpha=10**400), "lora_alpha of .* got 1000"),
    "NaN": (lambda s, t: t[Q + "lora_A.weight"].fill_(torch.nan), "q_proj.weight holds NaN"),
    "integers": (lambda s, t: t.update({Q + "lora_A.weight": torch.ones(4, 48).long()}), "int64"),
    "bad pattern": (lambda s, t: s.update(rank_pattern={"(": 4}), "rank_pattern"),
    "slow pattern": (lambda s, t: s.update(rank_pattern={"(.*|.*)*(.*)*x": 4}), "cannot be used"),
    "slow alternatives": (lambda s, t: s.update(rank_pattern={"(.|.)" * 40 + "x": 4}), "cannot be used"),
    "many repetitions": (lambda s, t: s.update(alpha_pattern={".*" * 9 + "x": 4}), "cannot be used"),
    "no patterns": (lambda s, t: s.update(alpha_pattern=["q_proj"]), "alpha_pattern"),
    "no pair": (lambda s, t: t.pop(Q + "lora_B.weight"), "counterpart"),
    "unknown tensor": (lambda s, t: t.update({Q + "weird": torch.ones(1)}), "weird"),
    "unknown module": (
        lambda s, t: t.update({k.replace("layers.1", "layers.7"): t.pop(k) for k in list(t) if "layers.1" in k}),
        "layers.7",
    ),
    "shape": (
        lambda s, t: t.update({Q + "lora_A.weight": torch.ones(4, 47)}), r"\[48, 47\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_adapter_is_rejected_and_the_old_one_stays(change, message, make_engine, saved_adapter, tmp_path):
    shutil.copytree(saved_adapter, tmp_path / "bad")
    damage(tmp_path / "bad", change)
    engine = make_engine(make_model())
    engine.update(WeightSource.adapter(str(saved_adapter), 1)).result(30)
    before = engine.fingerprint().result(30)
    with pytest.raises(WeightUpdateError, match=message):
        engine.update(WeightSource.adapter(str(tmp_path / "bad"), 2))
    assert engine.fingerprint().result(30) == before and engine.version == 1
    engine.update(WeightSource.adapter(str(saved_adapter), 2)).result(30)  # the lock is free again


@pytest.mark.parametrize("content", ["[]", "3", "null"])
def test_settings_that_are_not_an_object_are_rejected(content, saved_adapter, tmp_path):
    shutil.copytree(saved_adapter, tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(WeightUpdateError, match="object"):
        read_adapter(tmp_path)


SECRET = "do not tell"


@pytest.mark.parametrize(
    "settings",
    [[SECRET], {"peft_type": SECRET}, {"rank_pattern": SECRET}, {"rank_pattern": {f"({SECRET}": 1}}, {"r": SECRET}],
)
def test_a_refusal_does_not_quote_the_settings(settings, saved_adapter, tmp_path):
    shutil.copytree(saved_adapter, tmp_path, dirs_exist_ok=True)
    if isinstance(settings, dict):
        settings = json.loads((tmp_path / "adapter_config.json").read_text()) | settings
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(WeightUpdateError) as caught:
        read_adapter(tmp_path)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        ("q_proj", True), ("proj", False), ("self_attn.q_proj", True), ("^q_proj", False), (r"layers\.\d+\..*", True),
        (r"^model\.layers\.(0|1)\.self_attn\.q_proj$", True), ("k_proj|q_proj", True), (r"layers\.[2-9]\..*", False),
    ],
)  # fmt: skip
def test_patterns_match_as_in_peft(pattern, is_match, tmp_path):
    module = "model.layers.1.self_attn.q_proj"
    assert bool(re.match(rf"(.*\.)?({pattern})$", module)) == is_match
    assert _matches(pattern, module, tmp_path) == is_match
