"""Computing a group's prompt once must change nothing but the time it takes."""

from __future__ import annotations

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from arealite.api.cli_args import OptimizerConfig, TrainEngineConfig
from arealite.api.io_struct import Batch, Stat
from arealite.engine.fsdp.shared_prefix import plan_prefixes
from arealite.engine.fsdp_engine import FSDPEngine

SMALL = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip


def grouped_batch(seed: int = 0) -> Batch:
    """Groups of different sizes, prompts and answers of different lengths; one row has its own prompt."""
    rng = torch.Generator().manual_seed(seed)
    rows, groups = [], []
    for group, (size, prompt_len) in enumerate([(4, 9), (3, 20), (1, 5), (5, 2), (2, 7)]):
        prompt = torch.randint(3, 40, (prompt_len,), generator=rng)
        for _ in range(size):
            answer = torch.randint(3, 40, (int(torch.randint(1, 14, (1,), generator=rng)),), generator=rng)
            rows.append((prompt.clone(), answer))
            groups.append(group)
    rows[-1][0][3] += 1 if rows[-1][0][3] < 39 else -1
    length = max(len(p) + len(a) for p, a in rows)
    batch = {
        key: torch.zeros(len(rows), length, dtype=torch.long) for key in ("input_ids", "attention_mask", "loss_mask")
    }
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        batch["input_ids"][i, :end] = torch.cat([prompt, answer])
        batch["attention_mask"][i, :end] = 1
        batch["loss_mask"][i, len(prompt) : end] = 1
    batch["group_ids"] = torch.tensor(groups)
    batch["weight"] = torch.randn(len(rows), length, generator=rng)
    return batch


def gradients(folder, batch: Batch, share: bool, max_tokens: int) -> tuple[torch.Tensor, dict]:
    config = TrainEngineConfig(
        path=str(folder), dtype="float32", device="cpu", share_prefix=share,
        max_tokens_per_mb=max_tokens, optimizer=OptimizerConfig(lr=1.0, gradient_clipping=0.0),
    )  # fmt: skip
    engine = FSDPEngine(config)
    engine.initialize()
    logp = engine.forward(batch)["logp"]
    found: dict[str, torch.Tensor] = {}
    engine.optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in engine.model.named_parameters()})
    engine.train_batch(
        batch,
        lambda out, mb: ((out["logp"] * mb["weight"]).sum(), {"x": Stat(torch.tensor(1.0))}),
        lambda mb: mb["loss_mask"].sum(),
    )
    return logp, found


@pytest.mark.parametrize("max_tokens", [4096, 60])
@pytest.mark.parametrize("kind", ["qwen2", "sliding"])
def test_logprobs_and_gradients_equal_those_without_sharing(tmp_path, kind, max_tokens):
    torch.manual_seed(1)
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True))
    else:
        model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=6))
    model.save_pretrained(tmp_path)
    batch = grouped_batch()
    whole_logp, whole = gradients(tmp_path, batch, share=False, max_tokens=max_tokens)
    shared_logp, shared = gradients(tmp_path, batch, share=True, max_tokens=max_tokens)
    torch.testing.assert_close(shared_logp, whole_logp, atol=2e-5, rtol=1e-4)
    for name, gradient in whole.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(shared[name], gradient, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.gpu
def test_on_cuda_logprobs_equal_those_without_sharing(tmp_path):
    torch.manual_seed(1)
    Qwen2ForCausalLM(Qwen2Config(**{**SMALL, "hidden_size": 64})).save_pretrained(tmp_path)
    batch, found = grouped_batch(), []
    for share in (False, True):
        config = TrainEngineConfig(
            path=str(tmp_path), device="cuda", dtype="bfloat16", param_dtype="bfloat16",
            share_prefix=share, optimizer=OptimizerConfig(lr=1e-2),
        )  # fmt: skip
        engine = FSDPEngine(config)
        engine.initialize()
        logp = engine.forward(batch)["logp"]
        stats = engine.train_batch(
            batch, lambda out, mb: ((out["logp"] * mb["weight"]).sum(), {}), lambda mb: mb["loss_mask"].sum()
        )
        found.append((logp, stats["grad_norm"]))
    (whole, whole_norm), (shared, shared_norm) = found
    torch.testing.assert_close(shared, whole, atol=3e-2, rtol=0)
    assert shared_norm == pytest.approx(whole_norm, rel=2e-2)


def test_plan_shares_equal_prompts_only():
    ids = torch.tensor([5, 6, 7, 1, 5, 6, 7, 2, 5, 9, 7, 3])
    plan = plan_prefixes(ids, [4, 4, 4], [0, 0, 0], [3, 3, 3])
    assert plan is not None
    # The third row has another prompt and is computed in full.
    assert plan.lengths == [4, 1, 4]
    assert torch.equal(ids[plan.unique][plan.expand], ids)


def test_no_plan_if_it_saves_little():
    ids = torch.arange(40)
    assert plan_prefixes(ids, [20, 20], [0, 1], [10, 10]) is None
