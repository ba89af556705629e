"""The policy-gradient algorithms: one entry each in `ALGORITHMS`.

An entry declares everything about an algorithm: how rewards become advantages, the loss (a function of
`algo.policy_losses.LOSSES`, found there under the same name), how token losses are averaged, and what it needs.
`resolve_objective(config)` returns the objective of an actor. It rejects configs that contradict their algorithm or
set a key without effect. `algorithm=custom` fixes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from arealite.api.errors import ConfigError
from arealite.api.train_args import NormConfig, PPOActorConfig

_LOSSES = ("clip", "reinforce", "gspo", "cispo", "sapo")
_MEANS = ("token", "sequence", "sequence_sum", "constant")


@dataclass(frozen=True)
class Algorithm:
    """Definition of one algorithm. Of several allowed values the first is the default."""

    summary: str
    # Normalization of rewards into advantages (actor.reward_norm): by default with mean and std of the group.
    norm: NormConfig = field(default_factory=NormConfig)
    # Name in `algo.policy_losses.LOSSES` (actor.loss).
    loss: tuple[str, ...] = ("clip",)
    # How token losses are averaged (actor.loss_mean; see `algo.policy_losses.aggregation_weights`).
    mean: tuple[str, ...] = ("token", "sequence")
    # Whether advantages are whitened over all tokens of the batch (actor.norm_advantages).
    norm_advantages: tuple[bool, ...] = (False,)
    # Default of actor.eps_clip_higher; None: as eps_clip.
    eps_clip_higher: float | None = None
    # Whether tokens far off-policy are masked (`algo.off_policy.m2po_mask`).
    m2_mask: bool = False
    needs_overlong: bool = False
    needs_critic: bool = False


ALGORITHMS = {
    "grpo": Algorithm("arXiv 2402.03300: clipped ratios, rewards normalized within each group"),
    "dr_grpo": Algorithm(
        "arXiv 2503.20783: GRPO without the division by std and length, which favour easy prompts and long answers",
        NormConfig("group", "none"),
        mean=("constant",),
    ),
    "dapo": Algorithm(
        "arXiv 2503.14476: GRPO with a higher upper clip, a token mean and a penalty for overlong answers",
        mean=("token",),
        eps_clip_higher=0.28,
        needs_overlong=True,
    ),
    "rloo": Algorithm(
        "arXiv 2402.14740: REINFORCE on whole answers, with the mean reward of the other answers as baseline",
        NormConfig("group", "none", leave_one_out=True),
        loss=("reinforce", "clip"),
        mean=("sequence_sum", "token"),
    ),
    "reinforce_pp": Algorithm(
        "arXiv 2501.03262: no groups, advantages whitened over the batch, KL in the reward",
        NormConfig("none", "none"),
        norm_advantages=(True,),
    ),
    "reinforce_pp_baseline": Algorithm(
        "arXiv 2501.03262: as reinforce_pp, with the group mean as baseline",
        NormConfig("group", "none"),
        norm_advantages=(True,),
    ),
    "lite_ppo": Algorithm(
        "arXiv 2508.08221: group mean, batch std, token mean", NormConfig("group", "batch"), mean=("token",)
    ),
    "gspo": Algorithm(
        "arXiv 2507.18071: one ratio per sequence, exp of its mean log-ratio", loss=("gspo",), mean=("sequence",)
    ),
    "cispo": Algorithm(
        "arXiv 2506.13585: REINFORCE weighted by the clipped ratio, so that clipped tokens keep their gradient",
        loss=("cispo",),
        mean=("token",),
    ),
    "sapo": Algorithm(
        "arXiv 2511.20347: a smooth gate on the ratio instead of a clip", loss=("sapo",), mean=("sequence", "token")
    ),
    "m2po": Algorithm(
        "arXiv 2510.01161: GRPO without the tokens that are farthest off-policy, for very old data",
        mean=("token",),
        m2_mask=True,
    ),
    "ppo": Algorithm(
        "arXiv 1707.06347: clipped ratios with a critic and GAE",
        NormConfig("none", "none"),
        norm_advantages=(True, False),
        needs_critic=True,
    ),
    "custom": Algorithm("any combination", loss=_LOSSES, mean=_MEANS, norm_advantages=(False, True)),
}


@dataclass(frozen=True)
class Objective:
    """The algorithm of one actor with all choices made."""

    norm: NormConfig
    loss: str
    loss_mean: str
    norm_advantages: bool
    eps_clip_higher: float | None
    m2_mask: bool
    needs_critic: bool
    skip_zero_advantage: bool


def resolve_objective(config: PPOActorConfig) -> Objective:
    """Return the objective of `config`; raise `ConfigError` if it contradicts its algorithm."""
    algorithm = ALGORITHMS.get(config.algorithm)
    if algorithm is None:
        known = ", ".join(ALGORITHMS)
        raise ConfigError(f"actor.algorithm is {config.algorithm!r}; use one of {known}")
    higher = config.eps_clip_higher
    higher = algorithm.eps_clip_higher if higher is None else higher
    objective = Objective(
        norm=_norm(config, algorithm),
        loss=_pick(config, "loss", algorithm.loss, _LOSSES),
        loss_mean=_pick(config, "loss_mean", algorithm.mean, _MEANS),
        norm_advantages=_pick(config, "norm_advantages", algorithm.norm_advantages, (True, False)),
        eps_clip_higher=higher,
        m2_mask=algorithm.m2_mask,
        needs_critic=algorithm.needs_critic,
        skip_zero_advantage=_skips(config),
    )
    for problem in chain(_useless_keys(config, objective), _missing_keys(config, objective, algorithm)):
        raise ConfigError(problem)
    return objective


def _norm(config: PPOActorConfig, algorithm: Algorithm) -> NormConfig:
    norm = config.reward_norm
    if norm is None:
        return algorithm.norm
    norm.check()
    if config.algorithm != "custom" and replace(norm, eps=algorithm.norm.eps) != algorithm.norm:
        raise ConfigError(
            f"actor.algorithm={config.algorithm} normalizes rewards by {_describe(algorithm.norm)}, but "
            f"actor.reward_norm is {_describe(norm)}: leave reward_norm out, or set actor.algorithm=custom"
        )
    return norm


def _skips(config: PPOActorConfig) -> bool:
    # Balancing the experts counts all tokens: those of rows with an advantage may be a small and unlike part of them.
    balances = config.router_aux_loss_coef or config.router_bias_update_rate
    has_other_terms = bool(config.kl_loss_coef or config.entropy_coef or balances)
    return not has_other_terms if config.skip_zero_advantage is None else config.skip_zero_advantage


def _describe(norm: NormConfig) -> str:
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
            f"actor.{key}={value} contradicts actor.algorithm={config.algorithm}, which has "
            f"{' or '.join(map(str, allowed))}: leave {key} out, or set actor.algorithm=custom"
        )
    return value


def _useless_keys(config: PPOActorConfig, objective: Objective) -> Iterator[str]:
    """Yield a message for each key that would have no effect."""
    default, loss = PPOActorConfig(path=""), objective.loss
    has_clip_range = config.eps_clip != default.eps_clip or config.eps_clip_higher is not None
    if has_clip_range and loss not in ("clip", "gspo", "cispo"):
        yield f"loss={loss} does not clip: leave eps_clip and eps_clip_higher out"
    if config.c_clip is not None and loss != "clip":
        yield f"c_clip belongs to loss=clip; loss={loss} has no dual clip"
    if not config.use_decoupled_loss:
        for key in ("behav_imp_weight_floor", "behav_imp_weight_mode"):
            if getattr(config, key) != getattr(default, key):
                yield f"{key} limits the prox/behaviour weight, which use_decoupled_loss=false leaves out"
        if config.prox_logp == "recompute":
            yield "prox_logp=recompute has no effect with use_decoupled_loss=false"
    if config.m2_threshold != default.m2_threshold and not objective.m2_mask:
        yield f"m2_threshold belongs to algorithm=m2po, not to {config.algorithm}"
    if config.kl_ctl and config.kl_loss_coef:
        yield "the KL to the reference goes either into the reward (kl_ctl) or into the loss (kl_loss_coef), not both"
    if config.kl_estimator not in (None, "k1", "k2", "k3"):
        yield f"kl_estimator={config.kl_estimator} is none of k1, k2, k3 and null"
    if config.kl_estimator is not None and not (config.kl_ctl or config.kl_loss_coef):
        yield "kl_estimator is of the KL to the reference: set kl_ctl or kl_loss_coef > 0 too"
    if config.kl_loss_coef and config.kl_estimator == "k1":
        yield "the gradient of k1 does not depend on the reference: with kl_loss_coef use kl_estimator=k3 (or k2)"
    if config.kl_target is not None and not config.kl_ctl:
        yield "kl_target adapts kl_ctl: set kl_ctl > 0 too"
    if config.max_answer_length is not None and objective.loss_mean != "constant" and config.overlong_buffer is None:
        yield "max_answer_length is used by loss_mean=constant and overlong_buffer only; neither is set"
    if config.skip_zero_advantage and (config.kl_loss_coef or config.entropy_coef):
        wrong = "with kl_loss_coef or entropy_coef, sequences without advantage have a gradient too"
        yield f"{wrong}: leave skip_zero_advantage out, or set it to false"


def _missing_keys(config: PPOActorConfig, objective: Objective, algorithm: Algorithm) -> Iterator[str]:
    """Yield a message for each key that the objective needs."""
    length, buffer = config.max_answer_length, config.overlong_buffer
    if objective.loss_mean == "constant" and not length:
        wrong = f"loss_mean=constant (algorithm={config.algorithm}) divides by actor.max_answer_length"
        yield f"{wrong}: set it to gconfig.max_new_tokens"
    if algorithm.needs_overlong and buffer is None:
        yield (
            f"algorithm={config.algorithm} punishes overlong answers: set actor.overlong_buffer (for example a fifth "
            "of max_answer_length) and actor.max_answer_length"
        )
    if buffer is not None and not length:
        yield "overlong_buffer needs max_answer_length: set it to gconfig.max_new_tokens"
    if buffer is not None and not 0 < buffer <= (length or 0):
        yield f"overlong_buffer must be in (0, max_answer_length], got {buffer}"
    if algorithm.m2_mask and not (config.use_decoupled_loss and config.prox_logp != "interpolate"):
        yield (
            "algorithm=m2po compares proximal and behaviour log-probs before the update: set use_decoupled_loss=true "
            "and prox_logp=first_pass or recompute"
        )
