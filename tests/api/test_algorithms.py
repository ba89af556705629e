"""Algorithms by name: their definitions, and rejection of contradictions and keys without effect."""

import pytest

from arealite.algo.policy_losses import LOSSES
from arealite.api.algorithms import ALGORITHMS, resolve_objective
from arealite.api.cli_args import (
    DatasetConfig,
    DPOConfig,
    FrozenEngineConfig,
    GenerationHyperparameters,
    GRPOConfig,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOCriticConfig,
    PreferenceConfig,
)
from arealite.api.errors import ConfigError
from arealite.utils.config import load_config

LENGTH = {"max_answer_length": 512}
NEEDED = {"dr_grpo": LENGTH, "dapo": {**LENGTH, "overlong_buffer": 100}}


def actor(algorithm="grpo", **kwargs):
    return PPOActorConfig(path="m", algorithm=algorithm, **{**NEEDED.get(algorithm, {}), **kwargs})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_resolves(name):
    objective = resolve_objective(actor(name))
    assert objective.loss in ALGORITHMS[name].loss and objective.loss_mean in ALGORITHMS[name].mean


def test_every_loss_has_a_function():
    assert {loss for algorithm in ALGORITHMS.values() for loss in algorithm.loss} == set(LOSSES)


def test_sequences_without_advantage_are_skipped_unless_other_terms_train_them():
    assert resolve_objective(actor()).skip_zero_advantage
    assert not resolve_objective(actor(skip_zero_advantage=False)).skip_zero_advantage
    for term in ("kl_loss_coef", "entropy_coef", "router_aux_loss_coef", "router_bias_update_rate"):
        assert not resolve_objective(actor(**{term: 0.1})).skip_zero_advantage
    assert resolve_objective(actor(router_aux_loss_coef=0.1, skip_zero_advantage=True)).skip_zero_advantage


def test_definitions_of_some_algorithms():
    assert resolve_objective(actor("rloo")).norm.leave_one_out
    assert resolve_objective(actor("rloo")).loss_mean == "sequence_sum"
    assert resolve_objective(actor("dr_grpo")).norm.std_level == "none"
    assert resolve_objective(actor("dapo")).eps_clip_higher == 0.28
    assert resolve_objective(actor("dapo", eps_clip_higher=0.3)).eps_clip_higher == 0.3
    assert resolve_objective(actor("grpo", loss_mean="sequence")).loss_mean == "sequence"
    assert resolve_objective(actor("custom", loss="sapo", loss_mean="token")).loss == "sapo"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (actor("grop"), "use one of grpo"),
        (actor("dr_grpo", reward_norm=NormConfig("group", "group")), "set actor.algorithm=custom"),
        (actor("gspo", loss="clip"), "contradicts actor.algorithm=gspo"),
        (actor("dapo", loss_mean="sequence"), "contradicts"),
        (actor("custom", loss="clop"), "use one of"),
        (actor("sapo", eps_clip_higher=0.3), "does not clip"),
        (actor("cispo", c_clip=3.0), "no dual clip"),
        (actor("grpo", m2_threshold=0.1), "belongs to algorithm=m2po"),
        (actor("grpo", use_decoupled_loss=False, prox_logp="recompute"), "no effect"),
        (actor("grpo", use_decoupled_loss=False, behav_imp_weight_mode="token_clamp"), "leaves out"),
        (actor("grpo", kl_ctl=0.1, kl_loss_coef=0.1), "not both"),
        (actor("grpo", kl_loss_coef=0.1, kl_estimator="k1"), "does not depend on the reference"),
        (actor("grpo", kl_ctl=0.1, kl_estimator="k4"), "none of k1"),
        (actor("grpo", kl_estimator="k2"), "set kl_ctl or kl_loss_coef > 0 too"),
        (actor("grpo", kl_target=6.0), "set kl_ctl"),
        (actor("grpo", max_answer_length=100), "neither is set"),
        (actor("grpo", entropy_coef=0.1, skip_zero_advantage=True), "leave skip_zero_advantage out"),
        (actor("dr_grpo", max_answer_length=None), "max_answer_length"),
        (actor("dapo", overlong_buffer=None, max_answer_length=None), "set actor.overlong_buffer"),
        (actor("dapo", overlong_buffer=1000), "must be in"),
        (actor("m2po", prox_logp="interpolate"), "prox_logp=first_pass or recompute"),
    ],
)
def test_contradictions_are_rejected(config, message):
    with pytest.raises(ConfigError, match=message):
        resolve_objective(config)


def grpo(config, **kwargs):
    return GRPOConfig(
        experiment_name="e", trial_name="t", train_dataset=DatasetConfig(path="d"), actor=config,
        **{"gconfig": GenerationHyperparameters(n_samples=4), **kwargs},
    )  # fmt: skip


def test_models_are_required_or_rejected_by_the_algorithm():
    model = FrozenEngineConfig(path="m")
    critic = PPOCriticConfig(path="m")
    grpo(actor("ppo"), critic=critic).check()
    for config, message in (
        (grpo(actor("ppo")), "needs critic.path"),
        (grpo(actor("grpo"), critic=critic), "leave critic out"),
        (grpo(actor("grpo"), teacher=model), "distillation needs both"),
        (grpo(actor("dr_grpo", max_answer_length=99)), "differs from gconfig.max_new_tokens"),
        (grpo(actor("m2po", prox_logp="recompute", m2_threshold=0.0)), "m2_threshold"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.check()


@pytest.mark.parametrize("algorithm", ["reinforce_pp", "ppo"])
def test_dynamic_sampling_needs_groups(algorithm):
    """All rewards of a group of one are equal: no prompt would ever be trained."""
    critic = PPOCriticConfig(path="m") if algorithm == "ppo" else None
    grpo(actor(algorithm), critic=critic, dynamic_sampling=True).check()
    alone = GenerationHyperparameters(n_samples=1)
    grpo(actor(algorithm), critic=critic, gconfig=alone).check()
    with pytest.raises(ConfigError, match="rejects every group of one answer"):
        grpo(actor(algorithm), critic=critic, gconfig=alone, dynamic_sampling=True).check()


def test_the_reference_is_the_model_before_training():
    policy = PreferenceConfig(path="p", dtype="float32", loss="ipo", lora_rank=8, max_tokens_per_mb=99)
    config = DPOConfig(experiment_name="e", trial_name="t", train_dataset=DatasetConfig(path="d"), model=policy)
    config.check()
    assert config.ref == FrozenEngineConfig(path="p", dtype="float32", max_tokens_per_mb=99)
    assert grpo(actor("grpo", kl_loss_coef=0.1)).ref == grpo(actor("grpo", kl_ctl=0.1)).ref == FrozenEngineConfig("m")
    assert grpo(actor("grpo")).ref is None
    argv = ["experiment_name=e", "trial_name=t", "train_dataset.path=d", "model.path=m"]
    assert load_config(argv, DPOConfig).ref == FrozenEngineConfig("m")
    assert load_config([*argv, "model.loss=orpo"], DPOConfig).ref is None
    assert load_config([*argv, "ref.path=other"], DPOConfig).ref == FrozenEngineConfig("other")


def test_references_and_teachers_have_no_optimizer():
    argv = ["experiment_name=e", "trial_name=t", "train_dataset.path=d", "actor.path=m"]
    argv += ["actor.kl_ctl=0.1", "ref.path=m", "gconfig.n_samples=4"]
    assert load_config(argv, GRPOConfig).ref.optimizer is None
    with pytest.raises(ConfigError, match="leave its optimizer out"):
        load_config([*argv, "ref.optimizer.lr=0.1"], GRPOConfig)
    with pytest.raises(ConfigError, match="leave its optimizer out"):
        FrozenEngineConfig(path="m", optimizer=OptimizerConfig()).check()


def test_preference_losses_need_their_reference():
    def dpo(loss, ref):
        return DPOConfig(
            experiment_name="e", trial_name="t", train_dataset=DatasetConfig(path="d"),
            model=PreferenceConfig(path="m", loss=loss), ref=ref,
        )  # fmt: skip

    model = FrozenEngineConfig(path="m")
    dpo("dpo", model).check()
    dpo("simpo", None).check()
    with pytest.raises(ConfigError, match="leave ref out"):
        dpo("orpo", model).check()
    with pytest.raises(ConfigError, match="simpo only"):
        PreferenceConfig(path="m", loss="dpo", margin=1.0).check()
