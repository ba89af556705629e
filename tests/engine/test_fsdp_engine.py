"""The engine: packed equals padded, ranks equal one process, non-finite steps are skipped."""

import math

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, CohereConfig, GPT2Config

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.errors import AllocationError, ConfigError, TrainingError
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.fsdp.optimizer import LowMemoryAdamW, load_moment, make_optimizer, store_rounded
from arealite.engine.fsdp.parallel import check_layout
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.rw.rw_engine import FSDPRWEngine
from arealite.engine.sft.lm_engine import FSDPLMEngine, lm_loss, num_trained_tokens
from arealite.utils.data import select_rows
from tests.engine.engine_testing import SPEC, VOCAB, engine_config, random_batch

LENGTHS = [3, 17, 9, 9, 30, 5, 12, 2]


def make_engine(path, cls=FSDPLMEngine, **kwargs):
    engine = cls(engine_config(path, **kwargs))
    engine.initialize(SPEC)
    return engine


def padded_logp(model, batch):
    """Reference: one padded forward pass of plain transformers with full logits."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logp = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(logp, (1, 0))


@pytest.mark.parametrize(
    "kind", ["qwen2", "qwen2_window", "qwen3", "llama", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
)
def test_packed_gradient_equals_padded(model_dirs, kind):
    batch = random_batch(LENGTHS)
    folder = model_dirs[kind]
    engine = make_engine(folder, max_tokens_per_mb=40)
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    mask = batch["loss_mask"].bool()
    mask[:, 0] = False
    logp = padded_logp(reference, batch)
    torch.testing.assert_close(engine.forward(batch)["logp"][mask], logp[mask], atol=1e-5, rtol=1e-5)

    (-(logp * mask).sum() / mask.sum()).backward()
    engine.optimizer.step = engine.optimizer.zero_grad = lambda *a, **k: None
    engine.config.optimizer.gradient_clipping = 0.0
    stats = engine.train_lm(batch)
    assert stats["num_micro_batches"] > 1
    expected = dict(reference.named_parameters())
    for name, parameter in engine.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-6, rtol=1e-4, msg=name)


def test_equal_lengths_need_no_reordering(model_dirs):
    batch = random_batch([8] * 6)
    engine = make_engine(model_dirs["qwen2"])
    reference = AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"])
    mask = batch["loss_mask"].bool()
    torch.testing.assert_close(
        engine.forward(batch)["logp"][mask], padded_logp(reference, batch)[mask], atol=1e-5, rtol=1e-5
    )


# CPUs without bfloat16 fall back to a slower product.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_one_rank_keeps_converted_weights_over_micro_batches(model_dirs):
    """The same bits as with conversions in each pass; afterwards the parameters are the optimizer's again."""
    results = []
    for keeps in (True, False):
        config = engine_config(model_dirs["qwen2"], max_tokens_per_mb=30)
        config.dtype = "bfloat16"
        engine = FSDPLMEngine(config)
        engine.initialize(SPEC)
        module = engine.module
        assert module.is_one_shard
        module.is_one_shard = keeps
        if not keeps:
            for part in (part for part in module.modules() if isinstance(part, FSDPModule)):
                part.set_reshard_after_forward(True)
        for step in range(3):
            batch = random_batch(LENGTHS, seed=step)
            stats = engine.train_lm(batch)
            assert stats["num_micro_batches"] > 1
            logp = engine.forward(batch)["logp"]
        assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in engine.model.parameters())
        results.append([logp, *(p.to_local().clone() for p in engine.model.parameters())])
    for kept, converted in zip(*results, strict=True):
        assert torch.equal(kept, converted)


def test_gradient_checkpointing_changes_nothing(model_dirs):
    batch = random_batch(LENGTHS)
    losses = [
        [make_engine(model_dirs["qwen2"], gradient_checkpointing=on).train_lm(batch)["grad_norm"]]
        for on in (False, True)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _losses(rank, path, layout, steps):
    parallel = AllocationMode.from_str(layout).train
    engine = FSDPLMEngine(engine_config(path, max_tokens_per_mb=30), parallel)
    engine.initialize(SPEC)
    losses = []
    for step in range(steps):
        batch = random_batch(LENGTHS, seed=step)
        if parallel.data == 2:
            # The last rank has two rows only and runs fillers.
            batch = select_rows(batch, [[0, 1, 2, 3, 4, 5], [6, 7]][engine.layout.dp_rank])
        stats = engine.train_lm(batch)
        losses.append([stats[k] for k in ("loss", "nll", "grad_norm", "num_tokens")])
        engine.step_lr_scheduler()
    return losses


@pytest.mark.parametrize(
    ("kind", "layout", "steps"),
    [
        ("qwen2", "d2", 4),
        ("qwen2", "t2", 4),
        ("qwen2", "c2", 4),
        # Embeddings that are not tied, and norms of single heads: those of qwen3_moe, too.
        pytest.param("llama", "d2", 3, marks=pytest.mark.slow),
        pytest.param("qwen3", "t2", 3, marks=pytest.mark.slow),
        ("qwen2_window", "c2", 3),
        ("three_heads", "c2", 4),  # keys and values go round a ring
        pytest.param("three_heads_window", "c2", 3, marks=pytest.mark.slow),
        ("qwen3_moe", "d2", 3),
        ("qwen3_moe", "t2", 3),  # each rank has half of the experts
        pytest.param("llama", "t2", 3, marks=pytest.mark.slow),
        ("gemma", "t2", 3),
        ("apertus", "t2", 3),
        ("glm4_moe", "t2", 3),
        pytest.param("mixtral", "t2", 3, marks=pytest.mark.slow),
        ("deepseek_v3", "t2", 3),  # attention is whole on each rank
        # Keys and values of other sizes go round a ring.
        ("deepseek_three_heads", "c2", 3),
    ],
)
def test_two_ranks_train_like_one(model_dirs, two_ranks, kind, layout, steps):
    answers = two_ranks.run(_losses, model_dirs[kind], layout, steps)
    assert answers[0] == answers[1]
    found = torch.tensor(answers[0])
    expected = torch.tensor(_losses(0, model_dirs[kind], "d1", steps))
    assert found[:, [0, 1, 3]].allclose(expected[:, [0, 1, 3]], rtol=1e-5)
    # Gradient norms.
    assert found[:, 2].allclose(expected[:, 2], rtol=1e-3)


@pytest.mark.parametrize(
    ("layout", "message"),
    [("d2", "1 ranks were started"), ("d1p2", "d1p2t1 .2 ranks"), ("d1e2", "leave out e"), ("t3", "started")],
)
def test_impossible_layouts_are_rejected_before_loading(model_dirs, layout, message):
    with pytest.raises(AllocationError, match=message):
        FSDPEngine(engine_config(model_dirs["qwen2"]), AllocationMode.from_str(layout).train)


def test_layout_must_fit_the_heads(model_dirs):
    config = AutoConfig.from_pretrained(model_dirs["qwen2"])
    with pytest.raises(AllocationError, match="key-value heads"):
        check_layout(ParallelStrategy(tensor=4), config, 4)


def test_loss_decreases(model_dirs):
    engine = make_engine(model_dirs["qwen2"])
    batch = random_batch(LENGTHS)
    first = engine.train_lm(batch)
    for _ in range(10):
        engine.step_lr_scheduler()
        last = engine.train_lm(batch)
    assert last["loss"] < first["loss"] - 0.5
    assert engine.evaluate_lm(batch)["loss"] < last["loss"]


def test_non_finite_gradient_skips_the_step_then_stops(model_dirs, caplog):
    engine = make_engine(model_dirs["qwen2"], max_bad_steps=2)
    before = [p.detach().clone() for p in engine.model.parameters()]
    batch = random_batch(LENGTHS)

    def bad_loss(outputs, mb):
        loss, stats = lm_loss(outputs, mb)
        return loss * math.nan, stats

    stats = engine.train_batch(batch, bad_loss, num_trained_tokens)
    assert stats["bad_steps"] == 1 and math.isnan(stats["grad_norm"])
    assert "step skipped" in caplog.text
    assert all(map(torch.equal, before, engine.model.parameters()))
    engine.train_lm(batch)
    engine.train_batch(batch, bad_loss, num_trained_tokens)
    with pytest.raises(TrainingError, match="2 times in a row"):
        engine.train_batch(batch, bad_loss, num_trained_tokens)


def test_batch_without_trained_tokens_is_rejected(model_dirs):
    batch = random_batch(LENGTHS)
    batch["loss_mask"].zero_()
    with pytest.raises(TrainingError, match="no trained token"):
        make_engine(model_dirs["qwen2"]).train_lm(batch)


def test_models_without_a_tensor_parallel_plan_are_rejected(model_dirs):
    config = AutoConfig.from_pretrained(model_dirs["qwen3_moe"])
    config.base_model_tp_plan = {"layers.*.mlp.experts": "of_another_kind"}
    with pytest.raises(AllocationError, match=r"of_another_kind.*use t1"):
        check_layout(ParallelStrategy(tensor=2), config, 2)
    config.num_experts = 3
    with pytest.raises(AllocationError, match=r"experts \(3\)"):
        check_layout(ParallelStrategy(tensor=2), config, 2)
    with pytest.raises(AllocationError, match=r"'gpt2' has no supported tensor-parallel plan.*use t1"):
        check_layout(ParallelStrategy(tensor=2), GPT2Config(), 2)
    check_layout(ParallelStrategy(tensor=2), CohereConfig(), 2)
    # Heads have different weights, which the plan of transformers does not divide.
    with pytest.raises(AllocationError, match=r"'cohere' has no.*norm_with_weights_per_head.*use t1"):
        check_layout(ParallelStrategy(tensor=2), CohereConfig(use_qk_norm=True), 2)


def test_low_memory_adamw_has_the_losses_of_adamw(model_dirs):
    batch = random_batch(LENGTHS)
    losses, sizes = {}, {}
    for kind in ("adamw", "adamw_bf16", "adamw_8bit"):
        engine = make_engine(model_dirs["qwen2"])
        engine.config.optimizer.type = kind
        engine.optimizer = make_optimizer(engine.model, engine.config.optimizer, engine.config.peak_lr)
        losses[kind] = [engine.train_lm(batch)["loss"] for _ in range(12)]
        sizes[kind] = sum(
            value.numel() * value.itemsize for state in engine.optimizer.state.values() for value in state.values()
        )
    assert losses["adamw_bf16"] == pytest.approx(losses["adamw"], rel=0.01)
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], rel=0.02)
    assert sizes["adamw_bf16"] == pytest.approx(sizes["adamw"] / 2, rel=0.02)
    # Rows of 32 have a scale each; larger ones have one per 128 entries.
    assert sizes["adamw_8bit"] < 0.4 * sizes["adamw"]


def test_8_bit_moments_are_accurate_and_small():
    weight = torch.nn.Parameter(torch.zeros(64, 512))
    optimizer = LowMemoryAdamW([weight], 1e-3, (0.9, 0.95), 1e-8, bits=8)
    mean, square = torch.zeros(64, 512), torch.zeros(64, 512)
    scale = 10.0 ** torch.empty(64, 512).uniform_(-4, 0)
    for _ in range(100):
        weight.grad = scale * (1.0 + 0.1 * torch.randn(64, 512))
        mean.lerp_(weight.grad, 0.1)
        square.mul_(0.95).addcmul_(weight.grad, weight.grad, value=0.05)
        optimizer.step()
    state = optimizer.state[weight]
    found = load_moment(state, "exp_avg") / load_moment(state, "exp_avg_sq").sqrt()
    ratio = found / (mean / square.sqrt())
    assert ratio.mean() == pytest.approx(1.0, abs=0.05) and ratio.median() == pytest.approx(1.0, abs=0.02)
    used = sum(v.numel() * v.itemsize for v in state.values())
    assert used < 0.27 * 8 * weight.numel()


def _8_bit(rank, path, folder):
    """Three steps of 8-bit AdamW, a checkpoint, and one more step."""
    engine = FSDPLMEngine(engine_config(path))
    engine.config.optimizer.type = "adamw_8bit"
    engine.initialize(SPEC)
    meta = SaveLoadMeta(folder, "dcp", with_optim=True)
    if rank is None:
        engine.load(meta)
    rows = list(range(8)) if rank is None else [[0, 1, 2, 3, 4, 5], [6, 7]][rank]
    batch = select_rows(random_batch(LENGTHS), rows)
    for _ in range(0 if rank is None else 3):
        engine.train_lm(batch)
    state = engine.optimizer.state[engine.model.get_input_embeddings().weight]
    whole = {k: (v.full_tensor() if isinstance(v, DTensor) else v).tolist() for k, v in state.items()}
    if rank is not None:
        engine.save(meta)
    return whole, engine.train_lm(batch)["loss"]


def test_8_bit_states_load_on_another_number_of_ranks(model_dirs, two_ranks, tmp_path):
    (state, loss), other = two_ranks.run(_8_bit, model_dirs["qwen2"], str(tmp_path / "c"))
    assert other == (state, loss)
    again, next_loss = _8_bit(None, model_dirs["qwen2"], str(tmp_path / "c"))
    assert again == state and max(max(row) for row in state["exp_avg_sq"]) == 255
    assert next_loss == pytest.approx(loss, rel=1e-5)


def test_stochastic_rounding_is_unbiased():
    target = torch.full((20000,), 1.0, dtype=torch.bfloat16)
    store_rounded(target, torch.full((20000,), 1.0 + 1e-3), torch.Generator().manual_seed(0))
    assert target.float().mean().item() == pytest.approx(1.0 + 1e-3, abs=2e-4)


def test_missing_model_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        FSDPEngine(engine_config(str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        FSDPEngine(engine_config(str(tmp_path)))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_named(model_dirs, token):
    engine = make_engine(model_dirs["qwen2"])
    batch = random_batch([3, 5])
    batch["input_ids"][1, 2] = token
    with pytest.raises(TrainingError, match=f"token id {token}, but the model's vocabulary has {VOCAB}"):
        engine.train_lm(batch)


def test_float16_keeps_gradients_of_a_small_share_of_a_batch(model_dirs):
    """The rest of a batch of millions of tokens is on other ranks: the weight is 1e5 times larger."""
    norms = []
    for dtype in ("float32", "float16"):
        config = engine_config(model_dirs["qwen2"])
        config.dtype = dtype
        engine = FSDPLMEngine(config)
        engine.initialize(SPEC)
        batch = random_batch([5, 12, 7, 9])

        def weight(mb):
            return mb["loss_mask"].sum() * 1e5

        norms.append(engine.train_batch(batch, lm_loss, weight)["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_lr_stays_constant_without_a_known_end(model_dirs):
    config = engine_config(model_dirs["qwen2"])
    config.optimizer.lr_scheduler_type = "linear"
    engine = FSDPLMEngine(config)
    engine.initialize()
    for _ in range(3):
        engine.step_lr_scheduler()
    assert engine.optimizer.param_groups[0]["lr"] == config.optimizer.lr


def test_a_new_head_starts_at_zero(model_dirs):
    """Random values are far larger than rewards: their noise would be the advantages of the first steps."""
    engine = make_engine(model_dirs["qwen2"], FSDPRWEngine)
    assert not engine.model.score.weight.any()
    assert engine.model.model.embed_tokens.weight.any()
