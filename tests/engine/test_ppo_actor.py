"""The actor: log-probs, advantages and updates do not depend on skipping, splitting or ranks."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import NormConfig, PPOActorConfig
from arealite.api.errors import TrainingError
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.utils.data import select_rows
from tests.engine.engine_testing import SPEC, engine_config, random_batch

LENGTHS = [6, 15, 9, 9, 20, 5, 12, 3]


def make_actor(path, **kwargs):
    actor = FSDPPPOActor(engine_config(path, PPOActorConfig, **kwargs))
    actor.initialize(SPEC)
    return actor


def one_update(actor, batch):
    batch = dict(batch)
    if actor.config.prox_logp == "recompute":
        batch["prox_logp"] = actor.compute_logp(batch)
    actor.compute_advantages(batch)
    return actor.ppo_update(batch)


def parameters(actor):
    return torch.cat([p.detach().flatten() for p in actor.model.parameters()])


def test_update_raises_the_probability_of_rewarded_answers(model_dirs):
    actor = make_actor(model_dirs["qwen2"], lr=1e-3)
    batch = random_batch(LENGTHS)
    batch["rewards"] = (torch.arange(8) % 2).float()
    batch["logprobs"] = before = actor.compute_logp(batch)
    for _ in range(3):
        stats = one_update(actor, batch)[-1]
    change = ((actor.compute_logp(batch) - before) * batch["loss_mask"]).sum(1)
    good = batch["rewards"] == 1
    assert change[good].sum() > 0 > change[~good].sum()
    assert stats["reward"] == 0.5 and stats["reward/max"] == 1.0
    for key in ("entropy", "clip_share", "behav_kl/k3", "ratio/mean", "staleness", "grad_norm", "lr"):
        assert key in stats


def test_first_step_has_ratio_one_and_advantages_of_groups(model_dirs):
    actor = make_actor(model_dirs["qwen2"])
    batch = random_batch(LENGTHS)
    batch["logprobs"] = batch["prox_logp"] = actor.compute_logp(batch)
    actor.compute_advantages(batch)
    for first in range(0, 8, 2):
        scores = batch["advantages"][first : first + 2]
        mask = batch["loss_mask"][first : first + 2].bool()
        assert scores[mask].abs().sum() > 0 and scores[~mask].abs().sum() == 0
        rewards = batch["rewards"][first : first + 2]
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for row in range(2):
            assert torch.allclose(scores[row][mask[row]], expected[row])
    stats = actor.ppo_update(batch)[0]
    assert stats["ratio/mean"] == pytest.approx(1.0, abs=1e-6) and stats["clip_share"] == 0
    assert stats["behav_weight/mean"] == pytest.approx(1.0, abs=1e-6)


def test_rewards_of_any_scale_have_a_signal(model_dirs):
    """Points out of a hundred, or the scores of a reward model, may all be far from 0."""
    batch = random_batch(LENGTHS)
    batch["rewards"] = batch["rewards"] * 10 + 80
    scores = {}
    for clip in (None, 20.0):
        actor = make_actor(model_dirs["qwen2"], reward_clip=clip)
        batch["logprobs"] = batch["prox_logp"] = actor.compute_logp(batch)
        actor.compute_advantages(batch)
        scores[clip] = batch["advantages"][batch["loss_mask"].bool()]
    assert scores[None].abs().min() > 0.5 and scores[20.0].abs().max() == 0


def test_skipping_idle_rows_gives_the_same_update(model_dirs):
    batch = random_batch(LENGTHS)
    batch["rewards"][:4] = 0.5  # two groups without signal
    results = []
    for skip in (True, False):
        actor = make_actor(model_dirs["qwen2"], skip_zero_advantage=skip, ppo_n_minibatches=2)
        stats = one_update(actor, batch)
        results.append((parameters(actor), stats))
    # A gradient differs by rounding, at most 1e-7; Adam's step is lr / eps = 100 times that.
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    for skipped, full in zip(results[0][1], results[1][1], strict=True):
        assert skipped["grad_norm"] == pytest.approx(full["grad_norm"], rel=1e-4)
        assert skipped["zero_advantage_share"] == 0.5
    assert sum(s["num_tokens"] for s in results[0][1]) < sum(s["num_tokens"] for s in results[1][1])


@pytest.mark.parametrize(
    ("kind", "checkpointing"), [("gpt2", False), ("gpt2", True), ("opt", False), ("mixtral_noise", False)]
)
def test_on_policy_ratios_are_one_for_models_with_dropout(noisy_model_dirs, kind, checkpointing):
    """Dropout, layer drop and router noise are off: both passes compute the same log-probs."""
    actor = make_actor(noisy_model_dirs[kind], lr=1e-6, gradient_checkpointing=checkpointing)
    batch = random_batch(LENGTHS)
    batch["logprobs"] = batch["prox_logp"] = actor.compute_logp(batch)
    actor.compute_advantages(batch)
    (stats,) = actor.ppo_update(batch)
    assert stats["ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert stats["ratio/mean"] == pytest.approx(1.0, abs=1e-5)


def test_supervised_training_keeps_dropout_and_exports_keep_its_config(noisy_model_dirs, tmp_path):
    engine = FSDPLMEngine(engine_config(noisy_model_dirs["gpt2"], lr=1e-6))
    engine.initialize(SPEC)
    batch = random_batch(LENGTHS)
    assert engine.train_lm(batch)["loss"] != pytest.approx(engine.train_lm(batch)["loss"], rel=1e-4)
    actor = make_actor(noisy_model_dirs["gpt2"])
    actor.save(SaveLoadMeta(path=str(tmp_path / "saved")))
    assert AutoConfig.from_pretrained(tmp_path / "saved").resid_pdrop == 0.1


def test_rloo_sums_log_probs_over_each_answer(model_dirs):
    """The gradient is that of −1/B Σ_i A_i Σ_t log π by plain transformers, one answer at a time."""
    actor = make_actor(model_dirs["qwen2"], algorithm="rloo")
    batch = random_batch(LENGTHS)
    reference = AutoModelForCausalLM.from_pretrained(model_dirs["qwen2"], attn_implementation="eager")
    rewards, groups = batch["rewards"], batch["group_ids"]
    for row in range(len(LENGTHS)):
        others = [j for j in range(len(LENGTHS)) if groups[j] == groups[row] and j != row]
        advantage = rewards[row] - rewards[others].mean()
        ids = batch["input_ids"][row, : LENGTHS[row]]
        logp = reference(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        trained = batch["loss_mask"][row, 1 : LENGTHS[row]].bool()
        (-advantage * logp[trained].sum() / len(LENGTHS)).backward()
    batch["logprobs"] = batch["prox_logp"] = actor.compute_logp(batch)
    actor.compute_advantages(batch)
    actor.optimizer.step = actor.optimizer.zero_grad = lambda *a, **k: None
    actor.config.optimizer.gradient_clipping = 0.0
    actor.ppo_update(batch)
    expected = dict(reference.named_parameters())
    for name, parameter in actor.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-5, rtol=1e-4, msg=name)


def test_groups_with_signal_are_counted(model_dirs):
    actor = make_actor(model_dirs["qwen2"])
    batch = random_batch(LENGTHS)
    batch["rewards"][:6] = 1.0
    (stats,) = one_update(actor, batch)
    assert (stats["groups"], stats["groups_with_signal"]) == (4.0, 1.0)


@pytest.mark.parametrize(("algorithm", "expected"), [("grpo", [1.0, 0.0, 0.0]), ("reinforce_pp", [4.0, 4.0, 0.0])])
def test_the_kl_in_the_reward_is_no_signal(model_dirs, algorithm, expected):
    settings = {} if algorithm == "grpo" else {"reward_norm": None, "norm_advantages": None}
    actor = make_actor(model_dirs["qwen2"], algorithm=algorithm, kl_ctl=0.1, **settings)
    one_group, of_groups, equal = (random_batch(LENGTHS) for _ in range(3))
    one_group["rewards"][:6] = 1.0
    of_groups["rewards"] = of_groups["group_ids"].float()
    equal["rewards"].fill_(1.0)
    found = []
    for batch in (one_group, of_groups, equal):
        batch["ref_logp"] = batch["logprobs"] - 0.1
        (stats,) = one_update(actor, batch)
        assert stats["zero_advantage_share"] == 0
        found.append(stats["groups_with_signal"])
    assert found == expected


def test_equal_rewards_make_an_idle_step(model_dirs):
    actor = make_actor(model_dirs["qwen2"])
    batch = random_batch(LENGTHS)
    batch["rewards"].fill_(1.0)
    before = parameters(actor).clone()
    (stats,) = one_update(actor, batch)
    assert stats["idle_steps"] == 1 and stats["zero_advantage_share"] == 1
    assert stats["groups_with_signal"] == 0
    assert torch.equal(before, parameters(actor))


@pytest.mark.parametrize("term", ["kl_loss_coef", "entropy_coef"])
def test_a_minibatch_without_trained_tokens_makes_an_idle_step(model_dirs, term):
    """Attempts may end before anything was generated, such as those of an environment that is down."""
    actor = make_actor(model_dirs["qwen2"], ppo_n_minibatches=4, **{term: 0.1})
    batch = random_batch(LENGTHS)
    batch["loss_mask"][2:4] = 0
    batch["ref_logp"] = actor.compute_logp(batch)
    assert sorted(row["idle_steps"] for row in one_update(actor, batch)) == [0.0, 0.0, 0.0, 1.0]
    batch["loss_mask"][:] = 0
    assert [row["idle_steps"] for row in one_update(actor, batch)] == [1.0] * 4


def test_batch_mean_gives_a_signal_to_groups_of_one(model_dirs):
    norm = NormConfig(mean_level="batch", std_level="batch")
    actor = make_actor(model_dirs["qwen2"], algorithm="custom", reward_norm=norm)
    batch = random_batch(LENGTHS)
    batch["group_ids"] = torch.arange(8)
    (stats,) = one_update(actor, batch)
    assert stats["idle_steps"] == 0 and stats["grad_norm"] > 0


def test_groups_of_one_without_any_signal_are_rejected(model_dirs):
    """A workflow that returns one trajectory per row does not fit an algorithm with group means."""
    actor = make_actor(model_dirs["qwen2"])
    batch = random_batch(LENGTHS)
    batch["group_ids"] = torch.arange(len(LENGTHS))
    with pytest.raises(TrainingError, match=r"return gconfig\.n_samples trajectories"):
        one_update(actor, batch)


def test_kl_to_the_reference_is_in_the_reward(model_dirs):
    actor = make_actor(model_dirs["qwen2"], kl_ctl=0.1)
    batch = random_batch(LENGTHS)
    batch["prox_logp"] = actor.compute_logp(batch)
    with pytest.raises(TrainingError, match="ref_logp"):
        actor.compute_advantages(batch)
    batch["ref_logp"] = batch["prox_logp"] - 1.0 * batch["loss_mask"]
    actor.compute_advantages(batch)
    row, mask = 4, batch["loss_mask"][4].bool()
    scores = batch["advantages"][row][mask]
    # Each token has a penalty of 0.1 for itself and all later tokens.
    assert torch.allclose(scores.diff(), torch.full((len(scores) - 1,), 0.1), atol=1e-5)


def test_a_kl_that_is_not_a_number_costs_one_step_only(model_dirs):
    actor = make_actor(model_dirs["qwen2"], kl_ctl=0.1, kl_target=1.0)
    batch = random_batch(LENGTHS)
    batch["ref_logp"] = batch["logprobs"].clone()
    bad = batch | {"ref_logp": batch["ref_logp"] * torch.nan}
    assert one_update(actor, bad)[0]["bad_steps"] == 1
    assert actor.kl_ctl == 0.1
    assert one_update(actor, batch)[0]["bad_steps"] == 1
    assert all(parameter.isfinite().all() for parameter in actor.model.parameters())


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # Without a target the weight is the configured one: a run may resume with another, or switch the KL on or off.
        ({}, {"kl_ctl": 0.2}, 0.2),
        ({"kl_ctl": 0.1}, {}, 0.0),
        ({"kl_ctl": 0.1}, {"kl_ctl": 0.2, "kl_target": 1.0}, 0.2),
        ({"kl_ctl": 0.1, "kl_target": 1.0}, {"kl_ctl": 0.2}, 0.2),
        ({"kl_ctl": 0.1, "kl_target": 1.0}, {"kl_ctl": 0.1, "kl_target": 1.0}, 0.15),
    ],
)
def test_a_run_resumes_with_the_configured_or_the_adapted_kl_weight(model_dirs, tmp_path, before, after, expected):
    actor = make_actor(model_dirs["qwen2"], **before)
    if "kl_target" in before:
        actor.kl_ctl = 0.15
    meta = SaveLoadMeta(str(tmp_path / "dcp"), "dcp", with_optim=True)
    actor.save(meta)
    resumed = make_actor(model_dirs["qwen2"], **after)
    resumed.load(meta)
    assert resumed.kl_ctl == expected


def test_kl_in_the_loss_pulls_to_the_reference(model_dirs):
    """With equal rewards the gradient depends on the reference alone."""
    norms = []
    for shift in (0.0, 1.0):
        options = {"kl_loss_coef": 1.0}
        actor = make_actor(model_dirs["qwen2"], **options)
        batch = random_batch(LENGTHS)
        batch["rewards"][:] = 1.0
        batch["prox_logp"] = actor.compute_logp(batch)
        batch["ref_logp"] = batch["prox_logp"] - shift * batch["loss_mask"]
        actor.compute_advantages(batch)
        norms.append(actor.ppo_update(batch)[0]["grad_norm"])
    assert norms[0] < 1e-3 < 0.1 < norms[1]


def test_missing_steps_are_named(model_dirs):
    actor = make_actor(model_dirs["qwen2"])
    with pytest.raises(TrainingError, match=r"advantages.*prox_logp"):
        actor.ppo_update(random_batch(LENGTHS))


def test_first_pass_prox_equals_recompute(model_dirs):
    batch = random_batch(LENGTHS)
    results = []
    for mode in ("recompute", "first_pass"):
        actor = make_actor(model_dirs["qwen2"], prox_logp=mode, ppo_n_minibatches=2)
        one_update(actor, batch)
        results.append(parameters(actor))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_interpolated_prox_is_that_of_a_pass_up_to_the_first_step(model_dirs):
    """Later minibatches are estimated by how far the policy has moved since the tokens were sampled."""
    batch = random_batch(LENGTHS)
    sampler = make_actor(model_dirs["qwen2"])
    batch["logprobs"] = sampler.compute_logp(batch)
    batch["versions"] = torch.zeros_like(batch["versions"])
    found = {}
    for mode in ("first_pass", "interpolate"):
        actor = make_actor(model_dirs["qwen2"], prox_logp=mode, ppo_n_minibatches=2, lr=1e-4)
        one_update(actor, batch)
        actor.set_version(1)
        found[mode] = one_update(actor, batch)
    exact, estimated = found["first_pass"], found["interpolate"]
    for key in ("behav_kl/k3", "ratio/max", "grad_norm"):
        assert estimated[0][key] == pytest.approx(exact[0][key], rel=1e-4, abs=1e-9)
    assert estimated[1]["grad_norm"] == pytest.approx(exact[1]["grad_norm"], rel=0.01)
    assert abs(estimated[1]["ratio/mean"] - exact[1]["ratio/mean"]) < abs(exact[1]["ratio/mean"] - 1)


def test_an_update_without_steps_leaves_the_proximal_policy_exact(model_dirs):
    """Minibatches without an advantage make no step, so the policy has not moved when the first one does."""
    batch = random_batch(LENGTHS)
    batch["rewards"][:] = 0.5
    batch["rewards"][6] = 1.0
    actor = make_actor(model_dirs["qwen2"], prox_logp="interpolate", ppo_n_minibatches=4)
    stats = one_update(actor, batch)
    first = next(row for row in stats if not row["idle_steps"])
    assert first["ratio/max"] == pytest.approx(1.0) and len(stats) == 4 and stats[0]["idle_steps"] == 1


def test_m2po_computes_the_proximal_policy_if_it_is_not_given(model_dirs):
    batch = random_batch(LENGTHS)
    shares = []
    for mode in ("recompute", "first_pass"):
        actor = make_actor(model_dirs["qwen2"], algorithm="m2po", prox_logp=mode, m2_threshold=0.5)
        shares.append(one_update(actor, batch)[0]["m2_kept_share"])
    assert shares[0] == shares[1] and 0 < shares[0] < 1


def test_compiled_actor_has_the_log_probs_of_an_eager_one(model_dirs):
    """A compiled actor evaluates with the graph it trains with, and keeps no gradients of it."""
    batch = random_batch(LENGTHS)
    eager = make_actor(model_dirs["qwen2"]).compute_logp(batch)
    actor = make_actor(model_dirs["qwen2"])
    # As compile=True, which takes long on a CPU.
    actor.config.compile = True
    logp = actor.compute_logp(batch)
    assert torch.equal(logp, eager) and not logp.requires_grad
    assert all(p.grad is None for p in actor.model.parameters())


def _actor_on_rank(rank, path, world_size):
    actor = make_actor(path, max_tokens_per_mb=30)
    rows = [[0, 2, 4, 5, 7], [1, 3, 6]][rank] if world_size == 2 else list(range(8))
    answers = []
    for step in range(3):
        batch = random_batch(LENGTHS, seed=step)
        batch["rewards"][:2] = 1.0
        if step == 2:
            batch["token_rewards"] = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(0))
        stats = one_update(actor, select_rows(batch, rows))[0]
        # Speeds and the number of micro-batches may differ.
        answers.append({k: v for k, v in stats.items() if not k.endswith(("per_s", "tflops", "micro_batches"))})
    return answers


def test_groups_split_over_two_ranks_train_like_one(model_dirs, two_ranks):
    """Rows of every group are on both ranks, so rewards are normalised over ranks."""
    one = _actor_on_rank(0, model_dirs["qwen2"], 1)
    two = two_ranks.run(_actor_on_rank, model_dirs["qwen2"], 2)
    assert two[0] == two[1]
    for single, double in zip(one, two[0], strict=True):
        assert double == pytest.approx(single, rel=2e-4, abs=1e-5)


def _limited_update(rank, path, layout, options):
    """Return the statistics of one update of four minibatches at a high learning rate, and whether weights moved."""
    parallel = AllocationMode.from_str(layout).train
    actor = FSDPPPOActor(engine_config(path, PPOActorConfig, ppo_n_minibatches=4, **options), parallel)
    actor.initialize(SPEC)
    batch = random_batch(LENGTHS)
    rows = list(range(8))[rank::2] if layout == "d2" else list(range(8))
    stats = one_update(actor, select_rows(batch, rows))
    return [(s["prox_kl"], s["skipped_minibatches"]) for s in stats], len(actor.optimizer.state) > 0


def test_an_update_ends_once_the_policy_has_moved_too_far(model_dirs):
    path = model_dirs["qwen2"]
    free, _ = _limited_update(0, path, "d1", {"max_update_kl": None})
    kls = [kl for kl, _ in free]
    assert len(free) == 4 and {skipped for _, skipped in free} == {0.0}
    assert kls[0] == pytest.approx(0.0, abs=1e-6) and kls[0] < kls[1] < kls[2]
    # Above the KL that the second minibatch measures, below that of the third: two steps are made.
    limit = (kls[1] + kls[2]) / 2
    limited, _ = _limited_update(0, path, "d1", {"max_update_kl": limit})
    assert [kl for kl, _ in limited] == kls[:3]
    assert [skipped for _, skipped in limited] == [2.0] * 3


@pytest.mark.parametrize("options", [{}, {"algorithm": "gspo"}, {"prox_logp": "first_pass"}])
def test_the_minibatch_that_measures_too_large_a_kl_makes_no_step(model_dirs, options):
    actor = make_actor(model_dirs["qwen2"], ppo_n_minibatches=2, max_update_kl=1e-9, **options)
    once = make_actor(model_dirs["qwen2"], ppo_n_minibatches=2, max_update_kl=1e9, **options)
    batch, weights = random_batch(LENGTHS), []
    once.optimizer.register_step_post_hook(lambda *_: weights.append(parameters(once).clone()))
    one_update(once, batch)
    stats = one_update(actor, batch)
    assert [s["skipped_minibatches"] for s in stats] == [1.0, 1.0] and len(weights) == 2
    assert torch.equal(parameters(actor), weights[0])
    assert all(p.grad is None for p in actor.model.parameters())


def test_the_distance_of_old_samples_is_no_movement_of_the_update(model_dirs):
    """Without the decoupled loss, ratios are relative to the servers' log-probs, here far from the actor's own."""
    actor = make_actor(model_dirs["qwen2"], lr=1e-6, ppo_n_minibatches=2, use_decoupled_loss=False)
    batch = random_batch(LENGTHS)
    batch["logprobs"] = actor.compute_logp(batch) - 0.5 * batch["loss_mask"]
    stats = one_update(actor, batch)
    assert min(s["prox_kl"] for s in stats) > 0.1 and {s["skipped_minibatches"] for s in stats} == {0.0}


def test_one_token_alone_does_not_end_an_update(model_dirs):
    """A token whose probability was tiny can have a ratio of thousands, which would be the mean of all others."""
    actor = make_actor(model_dirs["qwen2"], lr=1e-6)
    batch = random_batch(LENGTHS)
    batch["prox_logp"] = actor.compute_logp(batch)
    row, token = batch["loss_mask"].nonzero()[-1].tolist()
    batch["prox_logp"][row, token] -= 8.0
    batch["logprobs"] = batch["prox_logp"]
    actor.compute_advantages(batch)
    (stats,) = actor.ppo_update(batch)
    assert stats["ratio/max"] > 2000
    assert stats["prox_kl"] == pytest.approx(10.0 / int(batch["loss_mask"][:, 1:].sum()), rel=0.05)


@pytest.mark.parametrize("layout", ["d2", "t2", "c2"])
def test_all_ranks_end_an_update_alike(model_dirs, two_ranks, layout):
    first, second = two_ranks.run(_limited_update, model_dirs["qwen2"], layout, {"max_update_kl": 1e-4})
    assert [row[1] for row in first[0]] == [row[1] for row in second[0]] == [3.0, 3.0]
    assert first[1] and second[1]


@pytest.mark.parametrize("prox_logp", ["recompute", "first_pass"])
def test_the_kl_under_equal_weights_is_measured_on_fresh_tokens_only(model_dirs, prox_logp):
    actor = make_actor(model_dirs["qwen2"], prox_logp=prox_logp, skip_zero_advantage=False)
    actor.set_version(3)
    batch = random_batch(LENGTHS)
    trained = batch["loss_mask"].bool()
    trained[:, 0] = False
    fresh = trained & (torch.arange(trained.shape[1]) >= 6)
    # The servers' log-probs of fresh tokens are 0.1 too low, those of the others are arbitrary.
    batch["logprobs"] = torch.where(fresh, actor.compute_logp(batch) - 0.1, batch["logprobs"])
    batch["versions"] = torch.where(fresh, 3, torch.where(trained, 2, -1))
    (stats,) = one_update(actor, batch)
    expected = (torch.tensor(0.1).exp() - 1 - 0.1).item()
    assert stats["behav_kl/fresh"] == pytest.approx(expected, rel=1e-3)
    batch["versions"] = torch.where(trained, 2, -1)
    assert "behav_kl/fresh" not in one_update(actor, batch)[0]


def test_rows_of_one_sample_share_its_advantage_and_count_once(model_dirs):
    """The branches of a sample change nothing for the others, and `sample_ids` of own rows change nothing at all."""
    actor = make_actor(model_dirs["qwen2"])
    plain = random_batch(LENGTHS)
    plain["prox_logp"] = plain["logprobs"]
    numbered = dict(plain, sample_ids=torch.tensor([0, 1] * 4))
    # The second sample of each group has a copy of its row: a second branch.
    branched = select_rows(numbered, [0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 7])
    for batch in (plain, numbered, branched):
        actor.compute_advantages(batch)
    torch.testing.assert_close(numbered["advantages"], plain["advantages"], rtol=1e-5, atol=1e-6)
    expected = select_rows(plain, [0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 7])["advantages"]
    torch.testing.assert_close(branched["advantages"], expected, rtol=1e-5, atol=1e-6)
    stats = actor.ppo_update(branched)[0]
    assert stats["reward"] == pytest.approx(plain["rewards"].mean().item()) and stats["num_seqs"] == 11
    alone = dict(plain, sample_ids=torch.zeros(8, dtype=torch.long))
    with pytest.raises(TrainingError, match="one trajectory"):
        actor.compute_advantages(alone)


def test_the_overlong_penalty_is_of_the_longest_answer_of_a_sample(model_dirs):
    actor = make_actor(model_dirs["qwen2"], algorithm="dapo", max_answer_length=4, overlong_buffer=2)
    batch = random_batch([8, 8, 8, 8])
    # Two short turns; a row with an overlong answer and one without, of the same sample; a single short answer.
    batch["loss_mask"] = torch.tensor(
        [[0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0, 0, 0]]
    )
    batch |= {"sample_ids": torch.tensor([0, 1, 1, 2]), "group_ids": torch.zeros(4, dtype=torch.long)}
    batch["rewards"] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    actor.compute_advantages(batch)
    assert batch["shaped_rewards"].tolist() == [1.0, 0.5, 0.5, 0.0]
    del batch["sample_ids"]
    actor.compute_advantages(batch)
    assert batch["shaped_rewards"].tolist() == [1.0, 0.5, 1.0, 0.0]


def test_returns_of_turns_become_advantages_of_their_tokens(model_dirs):
    actor = make_actor(model_dirs["qwen2"], algorithm="dr_grpo", max_answer_length=16)
    batch = random_batch([6, 6])
    batch["loss_mask"] = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 1, 0, 1, 1, 0]])
    batch["group_ids"] = torch.zeros(2, dtype=torch.long)
    batch["token_rewards"] = torch.tensor([[0.0, 0.5, 0.5, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]])
    batch["rewards"] = torch.tensor([0.5, 0.0])
    actor.compute_advantages(batch)
    # Both samples have the mean return 2/3.
    expected = torch.tensor([[0, -1, -1, 0, 2, 0], [0, -4, 0, 2, 2, 0]]) / 6
    torch.testing.assert_close(batch["advantages"], expected)


@pytest.mark.parametrize("options", [{}, {"ppo_n_minibatches": 2}, {"prox_logp": "recompute"}])
def test_the_log_probs_of_the_trainer_are_kept_in_the_batch(model_dirs, options):
    actor = make_actor(model_dirs["qwen2"], lr=1e-2, max_tokens_per_mb=32, **options)
    batch = random_batch(LENGTHS)
    batch["rewards"][:2] = 0.5  # a group without signal
    expected = actor.compute_logp(batch)
    if actor.config.prox_logp == "recompute":
        batch["prox_logp"] = expected
    actor.compute_advantages(batch)
    actor.ppo_update(batch)
    mask = batch["loss_mask"].bool()
    mask[:, 0] = False
    torch.testing.assert_close(batch["train_logp"][2:][mask[2:]], expected[2:][mask[2:]], atol=1e-4, rtol=1e-4)
    assert batch["train_logp"][:2].isnan().all()
