"""Computing shared prefixes once must change nothing but the time it takes."""

import itertools
import logging
import random
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.cli_args import OptimizerConfig, PPOActorConfig, PPOCriticConfig, TrainEngineConfig
from arealite.api.io_struct import Batch, Stat
from arealite.engine.fsdp import micro_batches, shared_prefix
from arealite.engine.fsdp.shared_prefix import cut_sorted, plan_prefixes, shared_lengths, sort_rows
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.utils.data import select_rows
from tests.engine.engine_testing import SPEC, engine_config, make_model

CLOSE = {"atol": 2e-5, "rtol": 1e-4}
ONE = micro_batches.MicroBatchCount()


@pytest.fixture
def share_every_token(monkeypatch):
    """Share also prefixes of one token, so that small trees have every shape."""
    monkeypatch.setattr(shared_prefix, "_MIN_SHARED", 1)


def random_rows(seed: int, num_rows: int = 24) -> list[list[int]]:
    """Rows of random trees: several roots, branches anywhere, equal rows, prefixes of others, single tokens."""
    rng = random.Random(seed)
    rows: list[list[int]] = []
    while len(rows) < num_rows:
        kind = rng.random()
        base = rng.choice(rows) if rows and kind > 0.15 else []
        kept = len(base) if kind > 0.8 else rng.randint(0, len(base))
        more = rng.choice([0, 1, rng.randint(1, 14)])
        row = [*base[:kept], *(rng.randint(3, 39) for _ in range(more))]
        rows += [row[:60]] if row else []
    return rows


def tree_batch(seed: int = 0, num_rows: int = 24) -> Batch:
    """A batch of `random_rows`; rows train different tokens of what they share."""
    rows, g = random_rows(seed, num_rows), torch.Generator().manual_seed(seed)
    shape = len(rows), max(map(len, rows))
    mask = torch.arange(shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    ids = torch.zeros(shape, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    loss_mask = (torch.rand(shape, generator=g) < 0.7) & mask
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "loss_mask": loss_mask.long(),
        "weight": torch.randn(shape, generator=g) * mask,
        "logprobs": (-3 + 0.5 * torch.randn(shape, generator=g)) * loss_mask,
        "versions": torch.where(loss_mask, 0, -1),
        "rewards": torch.rand(len(rows), generator=g),
        "group_ids": torch.arange(len(rows)) // 4,
    }


def weighted_sum(outputs: Batch, mb: Batch):
    values = outputs["values"] if "values" in outputs else outputs["logp"] + 0.1 * outputs.get("entropy", 0.0)
    return (values * mb["weight"]).sum(), {"mean": Stat(values.detach().sum(), mb["loss_mask"].sum())}


def gradients(engine: FSDPEngine, batch: Batch) -> tuple[Batch, dict, dict]:
    """Return outputs, statistics and gradients of a batch."""
    engine.initialize(SPEC)
    if engine.scalar_head:
        with torch.no_grad():
            engine.model.score.weight.copy_(torch.linspace(-1.0, 1.0, engine.model.score.weight.numel()))
    engine.with_entropy = True
    outputs, found = engine.forward(batch), {}
    parameters = engine.model.named_parameters()
    engine.optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in parameters if p.grad is not None})
    stats = engine.train_batch(batch, weighted_sum, lambda mb: mb["loss_mask"].sum())
    return outputs, stats, found


def check_equal(make, batch: Batch) -> float:
    """Compare an engine that shares prefixes with one that does not; returns the share of computed tokens."""
    (whole, stats, expected), (shared, shared_stats, found) = (gradients(make(share), batch) for share in (False, True))
    for key in whole:
        torch.testing.assert_close(shared[key], whole[key], **CLOSE)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[name], gradient, **CLOSE, msg=name)
    for key in ("loss", "mean", "grad_norm", "num_tokens"):
        assert shared_stats[key] == pytest.approx(stats[key], rel=1e-4, abs=1e-5)
    assert stats["num_computed_tokens"] == stats["num_tokens"]
    return shared_stats["num_computed_tokens"] / stats["num_tokens"]


@pytest.mark.parametrize("max_tokens", [4096, 60])
@pytest.mark.parametrize("kind", ["qwen2", "qwen2_window", "qwen3_moe"])
def test_results_and_gradients_equal_those_of_unrolled_rows(model_dirs, share_every_token, kind, max_tokens):
    def make(share):
        return FSDPEngine(engine_config(model_dirs[kind], share_prefix=share, max_tokens_per_mb=max_tokens))

    for seed in (0, 1):
        assert check_equal(make, tree_batch(seed)) < (0.6 if max_tokens == 4096 else 0.9)


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"lora_rank": 4}], ids=["recompute", "lora"])
def test_gradients_are_equal_with(model_dirs, share_every_token, settings):
    path = model_dirs["qwen2"]
    batch = tree_batch(2)
    if "lora_rank" not in settings:
        check_equal(lambda share: FSDPEngine(engine_config(path, share_prefix=share, **settings)), batch)
        return
    engines = [FSDPEngine(engine_config(path, share_prefix=share, **settings)) for share in (False, True)]
    expected, found = (gradients(engine, batch)[2] for engine in engines)
    # B is zero at the start, so A has no gradient yet.
    trained = [name for name, gradient in expected.items() if gradient.abs().max() > 0]
    assert len(trained) >= 14
    for name in trained:
        torch.testing.assert_close(found[name], expected[name], **CLOSE, msg=name)


def test_values_and_gradients_of_a_critic_are_equal(model_dirs, share_every_token):
    def make(share):
        return FSDPPPOCritic(engine_config(model_dirs["qwen2"], PPOCriticConfig, share_prefix=share))

    check_equal(make, tree_batch(3))


def test_statistics_of_a_policy_update_are_equal(model_dirs, share_every_token):
    results = []
    for share in (False, True):
        settings = {"share_prefix": share, "entropy_coef": 0.1}
        actor = FSDPPPOActor(engine_config(model_dirs["qwen2"], PPOActorConfig, **settings))
        actor.initialize(SPEC)
        batch = tree_batch(4)
        batch["prox_logp"] = actor.compute_logp(batch)
        actor.compute_advantages(batch)
        (stats,) = actor.ppo_update(batch)
        results.append({k: v for k, v in stats.items() if "per_s" not in k and "flops" not in k})
    whole, shared = results
    assert shared.pop("num_computed_tokens") < 0.6 * whole.pop("num_computed_tokens")
    assert shared == pytest.approx(whole, rel=1e-3, abs=1e-5)


def _on_ranks(rank, path, layout, share):
    """Gradient norm, loss and log-probs of a batch that the data-parallel ranks divide unevenly."""
    batch = tree_batch(5)
    parallel = ParallelStrategy(**layout)
    if parallel.data == 2:
        batch = select_rows(batch, [range(20), range(20, 24)][rank])
    engine = FSDPEngine(engine_config(path, share_prefix=share, max_tokens_per_mb=50), parallel)
    engine.initialize(SPEC)
    with mock.patch.object(shared_prefix, "_MIN_SHARED", 1):
        logp = engine.forward(batch)["logp"]
        stats = engine.train_batch(batch, weighted_sum, lambda mb: mb["loss_mask"].sum())
    keys = ("loss", "grad_norm", "num_tokens", "num_micro_batches")
    return float(logp.sum()), [stats[key] for key in keys], stats["num_computed_tokens"]


@pytest.mark.parametrize("layout", [{"data": 2}, {"context": 2}, {"tensor": 2}], ids=lambda layout: next(iter(layout)))
def test_two_ranks_train_like_one_without_sharing(model_dirs, two_ranks, layout):
    path = model_dirs["qwen2"]
    logp, expected, num_tokens = _on_ranks(0, path, {}, False)
    answers = two_ranks.run(_on_ranks, path, layout, True)
    assert answers[0][1] == answers[1][1]
    for answer in answers:
        assert answer[1][:3] == pytest.approx(expected[:3], rel=1e-4)
        assert answer[2] < num_tokens
    sums = [answer[0] for answer in answers]
    assert (sum(sums) if "data" in layout else sums[0]) == pytest.approx(logp, rel=1e-4)


@pytest.mark.gpu
def test_on_cuda_results_equal_those_without_sharing(tmp_path, share_every_token):
    path, batch, found = make_model(tmp_path, "qwen3"), tree_batch(), []
    for share in (False, True):
        config = TrainEngineConfig(
            path=path, device="cuda", dtype="bfloat16", param_dtype="bfloat16",
            share_prefix=share, optimizer=OptimizerConfig(lr=1e-2),
        )  # fmt: skip
        outputs, stats, _ = gradients(FSDPEngine(config), batch)
        found.append((outputs["logp"], stats["grad_norm"]))
    (whole, whole_norm), (shared, shared_norm) = found
    torch.testing.assert_close(shared, whole, atol=3e-2, rtol=0)
    assert shared_norm == pytest.approx(whole_norm, rel=2e-2)


# ------------------------------------------------------------------------------------------------------ plans


def test_a_plan_computes_each_node_of_the_tree_once(share_every_token):
    for seed in range(20):
        rows = random_rows(seed)
        lengths, ids = [len(row) for row in rows], torch.tensor(list(itertools.chain(*rows)))
        starts = torch.tensor([0, *itertools.accumulate(lengths)])
        targets = torch.cat([torch.arange(a + 1, b) for a, b in itertools.pairwise(starts)])
        plan = plan_prefixes(ids, lengths, targets)
        assert plan is not None
        prefixes = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
        assert len(plan.unique) == len(prefixes)
        assert torch.equal(ids[plan.unique][plan.expand], ids)
        # Every row reads its own tokens in order, and keys of a segment are its path.
        for start, row in zip(starts.tolist(), rows, strict=False):
            assert ids[plan.unique][plan.expand[start : start + len(row)]].tolist() == row
        keys = iter(ids[plan.unique][plan.attention.keys].tolist())
        for segment in plan.attention.segments:
            path = list(itertools.islice(keys, segment.prefix_length + segment.length))
            own = ids[plan.unique][segment.start : segment.start + segment.length].tolist()
            assert tuple(path) in prefixes and path[segment.prefix_length :] == own
        assert next(keys, None) is None
        assert torch.equal(plan.targets, plan.expand[targets].unique())


def test_a_row_that_another_one_continues_computes_nothing():
    turns = [list(range(100, 100 + length)) for length in (20, 40, 60)]
    ids, lengths = torch.tensor(list(itertools.chain(*turns))), [20, 40, 60]
    plan = plan_prefixes(ids, lengths, torch.tensor([5, 30, 70]))
    assert plan is not None and plan.attention.segments == [(0, 60, 0)]
    # The first two targets are the tokens 5 and 10 of the tree, and the last one token 10 again.
    assert plan.targets.tolist() == [5, 10] and plan.before.tolist() == [4, 9]


def test_short_prefixes_of_long_rows_are_not_shared():
    def is_shared(prefix: int, length: int) -> bool:
        ids = torch.tensor([token for last in (1, 2) for token in [7] * prefix + [last] * (length - prefix)])
        return plan_prefixes(ids, [length, length], torch.tensor([length - 1, 2 * length - 1])) is not None

    assert not is_shared(prefix=15, length=64) and is_shared(prefix=16, length=64)
    assert not is_shared(prefix=2, length=12) and is_shared(prefix=6, length=12)


def test_micro_batches_count_computed_tokens_and_keep_blocks(share_every_token):
    for seed in range(20):
        rng = random.Random(seed)
        rows = [np.array(row) for row in random_rows(seed)]
        rows = [rows[i] for i in sort_rows(rows)]
        lengths, shared = [len(row) for row in rows], shared_lengths(rows)
        blocks = [index // 2 if rng.random() < 0.3 else 100 + index for index in range(len(rows))]
        for max_tokens, count in ((60, 1), (100, 5), (1000, 3)):
            cuts = cut_sorted(lengths, shared, blocks, max_tokens, count)
            parts = [list(range(a, b)) for a, b in itertools.pairwise([*cuts, len(rows)])]
            assert list(itertools.chain(*parts)) == list(range(len(rows)))
            for part in parts:
                computed = len({tuple(rows[i][: n + 1]) for i in part for n in range(len(rows[i]))})
                assert computed <= max_tokens or len({blocks[i] for i in part}) <= 2
            for a in cuts[1:]:
                assert blocks[a] != blocks[a - 1]


def test_a_rank_without_rows_has_no_parts():
    assert sort_rows([]) == [] and shared_lengths([]) == []
    assert cut_sorted([], [], [], max_tokens=400) == cut_sorted([], [], [], max_tokens=400, count=2) == []


def test_parts_are_nearly_equal():
    # One tree of 20 shared and 10 own tokens per row.
    lengths, shared = [30] * 40, [0] + [20] * 39
    sizes = []
    cuts = cut_sorted(lengths, shared, list(range(40)), max_tokens=400, count=1)
    for a, b in itertools.pairwise([*cuts, 40]):
        sizes.append(20 + 10 * (b - a))
    assert len(sizes) == 2 and max(sizes) - min(sizes) <= 10


def test_all_ranks_share_or_none(model_dirs, two_ranks):
    """Rank 0 alone would share; rank 1 has so many tokens that sharing saves too little of all."""
    assert two_ranks.run(_decision, model_dirs["qwen2"], 4) == [True, True]
    assert two_ranks.run(_decision, model_dirs["qwen2"], 60) == [False, False]


def _decision(rank, path, num_rows):
    engine = FSDPEngine(engine_config(path), ParallelStrategy(data=2))
    engine.initialize(SPEC)
    g = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 40, (num_rows if rank else 2, 40), generator=g)
    if rank == 0:
        ids[1, :35] = ids[0, :35]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)}
    return micro_batches._split_rows(batch, 4096, engine.dp_group, 0.0, ONE)[1]


def test_rows_of_a_pair_stay_together():
    ids = torch.arange(100).repeat(6, 1)
    ids[torch.arange(6), 50] = torch.tensor([9, 1, 8, 2, 7, 3])
    batch = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pair_ids": torch.tensor([1, 2, 3, 1, 2, 3]),
    }  # fmt: skip
    parts, shares = micro_batches._split_rows(batch, 200, None, 0.0, ONE)
    assert shares and sorted(parts) == [[0, 3], [1, 4], [2, 5]]


def test_keys_that_are_copied_count_towards_the_budget():
    ids = torch.arange(100).repeat(4, 1)
    ids[1:, 80] = torch.tensor([1, 2, 3])
    # The row that another one continues copies no keys.
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][3, 80:] = 0
    assert len(micro_batches._split_rows(batch, 140, None, 0.0, ONE)[0]) == 1
    assert len(micro_batches._split_rows(batch, 155, None, 0.1, ONE)[0]) == 2
    assert len(micro_batches._split_rows(batch, 156, None, 0.1, ONE)[0]) == 1
    # Eight times fewer key heads than query heads.
    assert 0.01 < micro_batches._key_cost(Qwen2Config(num_key_value_heads=4, intermediate_size=11008)) < 0.03


def test_dropout_computes_every_row(noisy_model_dirs, caplog):
    engine = FSDPLMEngine(engine_config(noisy_model_dirs["gpt2"]))
    with caplog.at_level(logging.INFO, "arealite.engine"):
        engine.initialize(SPEC)
    assert "computed for each row: dropout" in caplog.text
    assert all(mb.prefixes is None for mb in engine._micro_batches(tree_batch()))
    actor = FSDPEngine(engine_config(noisy_model_dirs["gpt2"]))
    actor.initialize(SPEC)
    assert any(mb.prefixes is not None for mb in actor._micro_batches(tree_batch(num_rows=60)))
