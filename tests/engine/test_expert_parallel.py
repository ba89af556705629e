"""Experts divided over gloo ranks train like one rank: gradients, steps, checkpoints and published weights."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.cli_args import PPOActorConfig
from arealite.api.errors import AllocationError, ConfigError
from arealite.api.io_struct import ROUTED_EXPERTS, WeightUpdateMeta
from arealite.engine.fsdp.parallel import local
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.utils.data import select_rows
from arealite.utils.model_config import check_experts
from arealite.utils.routing import expert_blocks
from tests.engine.engine_testing import SPEC, engine_config, random_batch
from tests.engine.test_pipeline import check_like_one_rank

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", FAMILIES)
def test_two_expert_ranks_train_like_one(two_ranks, model_dirs, tmp_path, kind):
    check_like_one_rank(two_ranks, model_dirs[kind], "d2e2", 1, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("qwen3_moe", "d4e2"), ("mixtral", "d4e4"), ("deepseek_v3", "d4e2"), ("gpt_oss", "d2c2e2"),
     ("qwen3_moe", "d2c2e4"), ("qwen3_moe", "d2t2e2"), ("mixtral", "c2t2e2")],
)  # fmt: skip
def test_combined_with_other_parallelism(four_ranks, model_dirs, tmp_path, kind, layout):
    check_like_one_rank(four_ranks, model_dirs[kind], layout, 1, tmp_path)


def _step(rank, path, layout, **settings):
    """One step; returns its statistics, and how many experts this rank has."""
    config = replace(engine_config(path), **settings)
    engine = FSDPLMEngine(config, AllocationMode.from_str(layout).train)
    engine.initialize(SPEC)
    batch = random_batch([9, 14, 6, 20])
    if engine.dp_size == 2:
        batch = select_rows(batch, [[0, 1, 2], [3]][rank])
    stats = engine.train_lm(batch)
    return [stats[k] for k in ("loss", "grad_norm")], len(local(expert_blocks(engine.model)[0].experts.down_proj))


def test_each_rank_has_some_of_the_experts(two_ranks, model_dirs):
    expected, count = _step(0, model_dirs["mixtral"], "d1")
    for answer, part in two_ranks.run(_step, model_dirs["mixtral"], "d2e2"):
        assert 2 * part == count
        assert answer == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mixed_precision(two_ranks, model_dirs):
    step = partial(_step, dtype="bfloat16")
    expected = two_ranks.run(step, model_dirs["qwen3_moe"], "d2")[0][0]
    for answer, _ in two_ranks.run(step, model_dirs["qwen3_moe"], "d2e2"):
        assert answer == pytest.approx(expected, rel=1e-2)


def update_policy(rank, path, layout, folder, experts, settings):
    """Two updates with recorded experts."""
    config = engine_config(path, PPOActorConfig, max_tokens_per_mb=60, ppo_n_minibatches=2, **settings)
    actor = FSDPPPOActor(config, AllocationMode.from_str(layout).train)
    actor.initialize(SPEC)
    results = []
    for step in range(2):
        batch = random_batch([30, 33, 31, 36, 30, 32, 12, 9], seed=step)
        batch["input_ids"][:4, :24] = batch["input_ids"][0, :24].clone()
        layers = actor.hf_config.num_hidden_layers
        routed = torch.rand(*batch["input_ids"].shape, layers, experts, generator=torch.Generator().manual_seed(step))
        routed[:4, :24] = routed[0, :24].clone()
        batch[ROUTED_EXPERTS] = routed.argsort(dim=-1)[..., :2].flatten(2).to(torch.uint8)
        if actor.dp_size == 2:
            batch = select_rows(batch, [[0, 1, 2, 3, 4, 5], [6, 7]][actor.layout.dp_rank])
        batch["prox_logp"] = actor.compute_logp(batch)
        actor.compute_advantages(batch)
        stats = actor.ppo_update(batch)
        ranks = [row.pop("moe/rank_imbalance", None) for row in stats]
        assert all(1.0 <= share <= 2.0 for share in ranks) if "e" in layout else ranks == [None] * 2
        keys = ["loss", "grad_norm", *sorted(key for key in stats[0] if key.startswith("moe/"))]
        results += [row[key] for row in stats for key in keys]
    actor.update_weights(WeightUpdateMeta("disk", f"{folder}/{layout}"))
    return results


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("experts", [4, 2])
def test_recorded_experts_with_recomputed_layers(two_ranks, model_dirs, tmp_path, experts):
    """With 2 experts all tokens go to rank 0, and rank 1 computes none."""
    path, settings = model_dirs["qwen3_moe"], {"gradient_checkpointing": True, "router_aux_loss_coef": 0.01}
    answers = [
        two_ranks.run(update_policy, path, layout, str(tmp_path), experts, settings) for layout in ("d2", "d2e2")
    ]
    for expected, answer in zip(*answers, strict=True):
        assert answer == pytest.approx(expected, rel=1e-4, abs=1e-4)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / layout).state_dict() for layout in ("d2", "d2e2"))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("experts", "layout", "message"),
    [(0, ParallelStrategy(2, expert=2), "'x' has none: leave out e"),
     (4, ParallelStrategy(3, expert=2), r"e must divide d·c \(3\)"),
     (4, ParallelStrategy(2, context=3, expert=2), r"multiple or a divisor of c \(3\)"),
     (6, ParallelStrategy(4, expert=4), "divisor"),
     (4, ParallelStrategy(4, tensor=2, expert=4), "e·t = 8 ranks, but the model has 4")],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(experts, layout, message):
    with pytest.raises(AllocationError, match=message):
        check_experts("x", experts, layout)


def test_adapters_of_experts_are_refused(model_dirs):
    with pytest.raises(ConfigError, match=r"lora_rank=4 with e2: .* Leave out e"):
        engine_config(model_dirs["mixtral"], lora_rank=4).check_parallel(ParallelStrategy(data=2, expert=2))
