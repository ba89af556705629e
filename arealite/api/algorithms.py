"""The policy-gradient algorithms by name: what each implies, and which switches contradict it.

`resolve_objective(config)` gives the actor its objective; a config that asks for something its algorithm is not, or that sets a
switch which would have no effect, is refused with what to change. `algorithm=custom` fixes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from arealite.api.config_field import require
from arealite.api.errors import ConfigError
from arealite.api.train_args import NormConfig, PPOActorConfig

_LOSSES = ("clip", "reinforce", "gspo", "cispo", "sapo")
_MEANS = ("token", "sequence", "sequence_sum", "constant")
_NONE = NormConfig("none", "none")


@dataclass(frozen=True)
class Recipe:
    """What an algorithm is. Where several values are possible, the first is meant when nothing is said."""

    norm: NormConfig
    loss: tuple[str, ...] = ("clip",)
    mean: tuple[str, ...] = ("token", "sequence")
    norm_advantages: tuple[bool, ...] = (False,)
    eps_clip_higher: float | None = None
    m2_mask: bool = False
    needs_overlong: bool = False
    needs_critic: bool = False


RECIPES = {
    "grpo": Recipe(NormConfig("group", "group")),  # arXiv 2402.03300
    "dr_grpo": Recipe(NormConfig("group", "none"), mean=("constant",)),  # 2503.20783
    "dapo": Recipe(  # 2503.14476
        NormConfig("group", "group"), mean=("token",), eps_clip_higher=0.28, needs_overlong=True
    ),
    "rloo": Recipe(  # 2402.14740
        NormConfig("group", "none", leave_one_out=True), loss=("reinforce", "clip"), mean=("sequence_sum", "token"),
    ),
    "reinforce_pp": Recipe(_NONE, norm_advantages=(True,)),  # 2501.03262
    "reinforce_pp_baseline": Recipe(NormConfig("group", "none"), norm_advantages=(True,)),
    "lite_ppo": Recipe(NormConfig("group", "batch"), mean=("token",)),  # 2508.08221
    "gspo": Recipe(NormConfig("group", "group"), loss=("gspo",), mean=("sequence",)),  # 2507.18071
    "cispo": Recipe(NormConfig("group", "group"), loss=("cispo",), mean=("token",)),  # 2506.13585
    "sapo": Recipe(NormConfig("group", "group"), loss=("sapo",), mean=("sequence", "token")),  # 2511.20347
    "m2po": Recipe(NormConfig("group", "group"), mean=("token",), m2_mask=True),  # 2510.01161
    "ppo": Recipe(_NONE, norm_advantages=(True, False), needs_critic=True),  # 1707.06347
    "custom": Recipe(
        NormConfig("group", "group"), loss=_LOSSES, mean=_MEANS,
        norm_advantages=(False, True),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Objective:
    """The resolved switches of one actor."""

    norm: NormConfig
    loss: str
    loss_mean: str
    norm_advantages: bool
    eps_clip_higher: float | None
    m2_mask: bool
    needs_critic: bool


def resolve_objective(config: PPOActorConfig) -> Objective:
    """What `config` trains, or a ConfigError that names the contradiction."""
    recipe = RECIPES.get(config.algorithm)
    if recipe is None:
        known = ", ".join(RECIPES)
        raise ConfigError(f"actor.algorithm is {config.algorithm!r}; use one of {known}")
    higher = config.eps_clip_higher
    higher = recipe.eps_clip_higher if higher is None else higher
    objective = Objective(
        norm=_norm(config, recipe),
        loss=_pick(config, "loss", recipe.loss, _LOSSES),
        loss_mean=_pick(config, "loss_mean", recipe.mean, _MEANS),
        norm_advantages=_pick(config, "norm_advantages", recipe.norm_advantages, (True, False)),
        eps_clip_higher=higher,
        m2_mask=recipe.m2_mask,
        needs_critic=recipe.needs_critic,
    )
    _refuse_ineffective(config, objective)
    _refuse_incomplete(config, objective, recipe)
    return objective


def _norm(config: PPOActorConfig, recipe: Recipe) -> NormConfig:
    norm = config.reward_norm
    if norm is None:
        return recipe.norm
    norm.check()
    if config.algorithm != "custom" and replace(norm, eps=recipe.norm.eps) != recipe.norm:
        raise ConfigError(
            f"actor.algorithm={config.algorithm} normalises rewards by {_told(recipe.norm)}, but actor.reward_norm says "
            f"{_told(norm)}: leave reward_norm out, or set actor.algorithm=custom"
        )
    return norm


def _told(norm: NormConfig) -> str:
    extra = ", leave_one_out" if norm.leave_one_out else ""
    return f"mean {norm.mean_level}, std {norm.std_level}{extra}"


def _pick(config: PPOActorConfig, key: str, allowed: tuple[Any, ...], known: tuple[Any, ...]) -> Any:
    value = getattr(config, key)
    if value is None:
        return allowed[0]
    if value not in known:
        raise ConfigError(f"actor.{key} is {value!r}; use one of {known}")
    if value not in allowed:
        raise ConfigError(
            f"actor.{key}={value} contradicts actor.algorithm={config.algorithm}, which is {' or '.join(map(str, allowed))}: leave "
            f"{key} out, or set actor.algorithm=custom"
        )
    return value


def _refuse_ineffective(config: PPOActorConfig, objective: Objective) -> None:
    """No switch is silently ignored."""
    clips = objective.loss in ("clip", "gspo", "cispo")
    default = PPOActorConfig(path="")
    require(
        clips or (config.eps_clip == default.eps_clip and config.eps_clip_higher is None),
        f"loss={objective.loss} does not clip: leave eps_clip and eps_clip_higher out",
    )
    require(
        config.c_clip is None or objective.loss == "clip",
        f"c_clip belongs to loss=clip; loss={objective.loss} has no dual clip",
    )
    for key in ("behav_imp_weight_floor", "behav_imp_weight_mode"):
        require(
            config.use_decoupled_loss or getattr(config, key) == getattr(default, key),
            f"{key} acts on the prox/behaviour weight, which use_decoupled_loss=false leaves out",
        )
    require(
        config.use_decoupled_loss or config.prox_logp == default.prox_logp,
        f"prox_logp={config.prox_logp} has no effect with use_decoupled_loss=false",
    )
    require(
        objective.m2_mask or config.m2_threshold == default.m2_threshold,
        f"m2_threshold belongs to algorithm=m2po, not to {config.algorithm}",
    )
    require(
        not (config.kl_ctl and config.kl_loss_coef),
        "the KL to the reference goes either into the reward (kl_ctl) or into the loss (kl_loss_coef), not both",
    )
    require(
        config.kl_estimator in (None, "k1", "k2", "k3"),
        f"kl_estimator={config.kl_estimator} is none of k1, k2, k3 and null",
    )
    require(
        not (config.kl_loss_coef and config.kl_estimator == "k1"),
        "the gradient of k1 does not depend on the reference: with kl_loss_coef use kl_estimator=k3 (or k2)",
    )
    adapts = config.kl_target is not None
    require(config.kl_ctl or not adapts, "kl_target adapts kl_ctl: set kl_ctl > 0 too")
    length_used = objective.loss_mean == "constant" or config.overlong_buffer is not None
    require(
        config.max_answer_length is None or length_used,
        "max_answer_length is used by loss_mean=constant and overlong_buffer only; neither is set",
    )
    require(
        not (config.skip_zero_advantage and (config.kl_loss_coef or config.entropy_coef)),
        "with kl_loss_coef or entropy_coef, sequences without advantage have a gradient too: set skip_zero_advantage=false",
    )


def _refuse_incomplete(config: PPOActorConfig, objective: Objective, recipe: Recipe) -> None:
    length, buffer = config.max_answer_length, config.overlong_buffer
    require(
        objective.loss_mean != "constant" or length,
        f"loss_mean=constant (algorithm={config.algorithm}) divides by actor.max_answer_length: set it to "
        "gconfig.max_new_tokens",
    )
    require(
        not recipe.needs_overlong or buffer is not None,
        f"algorithm={config.algorithm} punishes overlong answers: set actor.overlong_buffer (for example a fifth of "
        "max_answer_length) and actor.max_answer_length",
    )
    require(buffer is None or length, "overlong_buffer needs max_answer_length: set it to gconfig.max_new_tokens")
    require(
        buffer is None or 0 < buffer <= (length or 0),
        f"overlong_buffer must be in (0, max_answer_length], got {buffer}",
    )
    require(
        not recipe.m2_mask or (config.use_decoupled_loss and config.prox_logp == "recompute"),
        "algorithm=m2po compares proximal and behaviour log-probs before the update: set use_decoupled_loss=true and "
        "prox_logp=recompute",
    )
