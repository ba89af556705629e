"""Tensor and context parallelism: log-probs of vocabulary shards, shared prompts, equal rounding."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from arealite.algo import logprobs
from arealite.algo.logprobs import token_logprobs
from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import PPOActorConfig
from arealite.api.io_struct import SaveLoadMeta, Stat
from arealite.engine.fsdp.optimizer import load_moment
from arealite.engine.fsdp.shared_prefix import plan_piece
from arealite.engine.fsdp.tensor_parallel import find_rows
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.utils import distributed
from tests.engine.engine_testing import SPEC, engine_config, random_batch

LENGTHS = [3, 17, 9, 9, 30, 5, 12, 2]


def _logprobs(rank, softcap, temperature, offset, sharded, in_chunks=False):
    g = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(n, 8, generator=g, requires_grad=True) for n in (13, 20))
    labels = torch.randint(0, 20, (13,), generator=g)
    states = torch.cat([states, torch.ones(13, 1)], dim=1).detach().requires_grad_()
    weight = torch.cat([weight, torch.full((20, 1), offset)], dim=1).detach().requires_grad_()
    ups = torch.randn(2, 13, generator=g)
    settings = {"temperature": temperature, "softcap": softcap, "with_entropy": True, "chunk_size": 4}
    if sharded:
        distributed.init_process_group("cpu")
        rows = weight[10 * rank : 10 * rank + 10]
        index, here = find_rows(labels, len(rows), dist.group.WORLD)
        with patch.object(logprobs, "_KEEP_LOGITS", 0 if in_chunks else 1 << 20):
            logp, entropy = token_logprobs(states, rows, index, here=here, group=dist.group.WORLD, **settings)
    else:
        logp, entropy = token_logprobs(states, weight, labels, **settings)
    (logp * ups[0] + entropy * ups[1]).sum().backward()
    return [x.tolist() for x in (logp, entropy, states.grad, weight.grad)]


@pytest.mark.parametrize("in_chunks", [True, False])
@pytest.mark.parametrize(("softcap", "temperature", "offset"), [(None, 1.0, 0.0), (2.0, 0.7, 0.0), (None, 1.0, 300.0)])
def test_logprobs_of_vocabulary_shards(two_ranks, softcap, temperature, offset, in_chunks):
    expected = _logprobs(0, softcap, temperature, offset, sharded=False)
    first, second = two_ranks.run(_logprobs, softcap, temperature, offset, True, in_chunks)
    # A logit is a sum of 9 products: its rounding error is about 9·6e-8 of the largest of them.
    close = {"rtol": 1e-5, "atol": 1e-6 * max(10.0, offset)}
    for name, want, a, b in zip(("logp", "entropy", "states"), expected, first, second, strict=False):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(want), msg=name, **close)
        assert a == b
    whole = torch.tensor(first[3]) + torch.tensor(second[3])
    torch.testing.assert_close(whole, torch.tensor(expected[3]), **close)
    assert min(first[1]) > 0


def _head_is_split(rank, path):
    engine = FSDPEngine(engine_config(path), AllocationMode.from_str("t2").train)
    engine.initialize(SPEC)
    return [
        tuple(m.weight.to_local().shape)
        for m in (engine.model.get_input_embeddings(), engine.model.get_output_embeddings())
    ]


def test_no_rank_has_the_full_vocabulary(model_dirs, two_ranks):
    assert two_ranks.run(_head_is_split, model_dirs["llama"]) == [[(32, 32), (32, 32)]] * 2


def _grouped(rank, path, layout, share):
    """Log-probs and a gradient of a batch whose rows share prompts."""
    engine = FSDPEngine(
        engine_config(path, share_prefix=share, max_tokens_per_mb=101), AllocationMode.from_str(layout).train
    )  # fmt: skip
    engine.initialize(SPEC)
    batch = random_batch([40] * 6)
    # Longer than the prompt: trained tokens are shared too. The last row continues none and equals the first one.
    batch["input_ids"][:, :20] = batch["input_ids"][batch["group_ids"] * 2, :20]
    batch["input_ids"][5] = batch["input_ids"][0]
    logp = engine.forward(batch)["logp"]
    plans = [mb.prefixes is not None for mb in engine._micro_batches(batch)]
    stats = engine.train_batch(
        batch,
        lambda out, mb: ((out["logp"] * mb["logprobs"]).sum(), {"x": Stat(torch.tensor(1.0))}),
        lambda mb: mb["loss_mask"].sum(),
    )
    return logp.tolist(), stats["loss"], stats["grad_norm"], any(plans)


@pytest.mark.parametrize(("kind", "shared"), [("qwen2", True), ("three_heads", False)])
def test_prompts_are_shared_under_context_parallel(model_dirs, two_ranks, kind, shared):
    expected = _grouped(0, model_dirs[kind], "d1", share=False)
    for answer in two_ranks.run(_grouped, model_dirs[kind], "c2", True):
        # A ring does not share prompts.
        assert answer[3] == shared
        torch.testing.assert_close(torch.tensor(answer[0]), torch.tensor(expected[0]))
        assert answer[1:3] == pytest.approx(expected[1:3], rel=1e-5)


def _values_and_entropy(rank, path, layout):
    """A critic's values, and a policy step with an entropy bonus."""
    parallel = AllocationMode.from_str(layout).train
    batch = random_batch(LENGTHS)
    critic = FSDPPPOCritic(engine_config(path), parallel)
    critic.initialize(SPEC)
    torch.nn.init.constant_(critic.model.score.weight, 0.1)
    config = engine_config(path, PPOActorConfig, entropy_coef=0.1)
    actor = FSDPPPOActor(config, parallel)
    actor.initialize(SPEC)
    batch["prox_logp"] = actor.compute_logp(batch)
    actor.compute_advantages(batch)
    stats = actor.ppo_update(batch)[0]
    norm = critic.forward(batch)["values"].norm()
    return [float(norm), stats["loss"], stats["grad_norm"], stats["entropy"]]


@pytest.mark.parametrize(("kind", "layout"), [("qwen2", "t2"), ("qwen2", "c2"), ("three_heads", "c2")])  # fmt: skip
def test_entropy_and_values_on_two_ranks(model_dirs, two_ranks, kind, layout):
    expected = _values_and_entropy(0, model_dirs[kind], "d1")
    for answer in two_ranks.run(_values_and_entropy, model_dirs[kind], layout):
        assert answer == pytest.approx(expected, rel=1e-4)


def _replicated_weights(rank, path, optimizer):
    """Return the replicated weights of a tensor group after some steps with different random states."""
    engine = FSDPLMEngine(engine_config(path, param_dtype="bfloat16"), AllocationMode.from_str("t2").train)
    engine.config.optimizer.type = optimizer
    engine.initialize(SPEC)
    torch.manual_seed(rank)
    for _ in range(5):
        engine.train_lm(random_batch(LENGTHS))
    parameters = engine.model.named_parameters()
    return {n: p.to_local().tolist() for n, p in parameters if p.device_mesh.ndim == 1}


@pytest.mark.parametrize("optimizer", ["adamw_bf16", "adamw_8bit"])
def test_replicated_weights_are_rounded_alike(model_dirs, two_ranks, optimizer):
    one, two = two_ranks.run(_replicated_weights, model_dirs["qwen3"], optimizer)
    assert one == two
    assert "model.norm.weight" in one and "model.layers.0.self_attn.q_norm.weight" in one


def _moments(rank, path, layout, saved, folder):
    """Return 8-bit moments of a matrix whose rows are cut, loaded from `saved` or after a step; save them."""
    engine = FSDPLMEngine(engine_config(path), AllocationMode.from_str(layout).train)
    engine.config.optimizer.type = "adamw_8bit"
    engine.initialize(SPEC)
    if saved is None:
        engine.train_lm(random_batch(LENGTHS))
    else:
        engine.load(SaveLoadMeta(f"{folder}/{saved}", "dcp", with_optim=True))
    engine.save(SaveLoadMeta(f"{folder}/{layout}-{saved}", "dcp", with_optim=True))
    parameter = engine.model.get_parameter("model.layers.0.self_attn.o_proj.weight")
    state = engine.optimizer.state[parameter]
    moments = [load_moment(state, key).tolist() for key in ("exp_avg", "exp_avg_sq")]
    return moments, engine.train_lm(random_batch(LENGTHS))["loss"]


def test_8_bit_moments_load_with_another_layout(model_dirs, two_ranks, tmp_path):
    """A tensor rank's part of a row has its own blocks: 16 values here, where one rank has 32."""
    path, folder = model_dirs["qwen2"], str(tmp_path)

    def on_two(saved):
        parts, losses = zip(*two_ranks.run(_moments, path, "t2", saved, folder), strict=True)
        return torch.cat([torch.tensor(part) for part in parts], dim=-1), losses[0]

    def on_one(saved):
        moments, loss = _moments(0, path, "d1", saved, folder)
        return torch.tensor(moments), loss

    for make, load, layouts in ((on_one, on_two, ("d1", "t2")), (on_two, on_one, ("t2", "d1"))):
        moments, loss = make(None)
        found, again = load(f"{layouts[0]}-None")
        assert moments.any() and torch.equal(found, moments)
        assert again == pytest.approx(loss, rel=1e-5)
        # Smaller blocks stay, and load again.
        assert torch.equal(make(f"{layouts[1]}-{layouts[0]}-None")[0], moments)


def test_ring_hops_depend_on_the_longest_reach_of_sequences():
    plan, hops = plan_piece([3, 5, 4], size=4, rank=1)  # pieces of 3: the second begins a sequence
    assert hops == 1 and plan.segments[0].prefix_length == 0
    plan, hops = plan_piece([3, 9], size=4, rank=3)
    assert hops == 2 and plan.segments == [(0, 3, 6)]
    assert plan.keys.tolist() == [3, 4, 5, 6, 7, 8, 0, 1, 2]
