"""Configuration of what is trained: optimizer, engine, and the objectives of policies, critics and preference models.

Part of the tree in `cli_args`. Which switches an algorithm implies, and which it refuses, is in `algorithms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from arealite.api.config_field import help_field as _help
from arealite.api.config_field import require as _require
from arealite.api.config_field import require_one_of as _require_one_of
from arealite.api.config_field import require_within as _require_within


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    type: str = _help(
        "adamw; adamw_bf16 or adamw_8bit (its states in two bytes or one, rounded stochastically).",
        "adamw",
    )
    lr: float = _help("Peak learning rate.", 1e-5)
    weight_decay: float = _help("Decoupled weight decay (not on biases and norms).", 0.01)
    beta1: float = _help("AdamW beta 1.", 0.9)
    beta2: float = _help("AdamW beta 2.", 0.95)
    eps: float = _help("AdamW epsilon.", 1e-8)
    lr_scheduler_type: str = _help("constant, linear or cosine.", "constant")
    warmup_steps_proportion: float = _help(
        "Share of all steps that warm up linearly from 0.", 0.001
    )
    min_lr_ratio: float = _help("The schedule ends at this share of the peak.", 0.0)
    gradient_clipping: float = _help("Largest global gradient norm; 0 turns clipping off.", 1.0)

    def check(self) -> None:
        _require_one_of("optimizer.type", self.type, ("adamw", "adamw_bf16", "adamw_8bit"))
        kinds = ("constant", "linear", "cosine")
        _require_one_of("lr_scheduler_type", self.lr_scheduler_type, kinds)
        _require(self.lr > 0, f"optimizer.lr must be positive, got {self.lr}")
        _require_within(
            self,
            {"warmup_steps_proportion": (0, 1), "min_lr_ratio": (0, 1), "beta1": (0, 1), "beta2": (0, 1),
             "weight_decay": (0, inf), "eps": (0, inf), "gradient_clipping": (0, inf)},
            prefix="optimizer.",
        )  # fmt: skip


@dataclass
class TrainEngineConfig:
    """One model that is trained (or, without an optimizer, only evaluated)."""

    path: str = _help("Hugging Face folder or hub name of the model.")
    init_from_scratch: bool = _help(
        "Random weights; only config and tokenizer are read from `path`.", False
    )
    dtype: str = _help("Compute type: float32, bfloat16 or float16.", "bfloat16")
    param_dtype: str = _help("Type of the weights the optimizer holds.", "float32")
    device: str = _help("cpu, cuda, or auto (cuda where there is one).", "auto")
    max_tokens_per_mb: int = _help("Token budget of one packed micro-batch on one rank.", 16384)
    share_prefix: bool = _help("Compute a prompt once for all samples of its group (exact).", True)
    gradient_checkpointing: bool = _help("Recompute activations in the backward pass.", False)
    compile: bool = _help("torch.compile each layer (a minute at the start, then faster).", False)
    cpu_offload: bool = _help("Keep weights and optimizer in host memory (cuda only).", False)
    lora_rank: int = _help("Train low-rank adapters of this rank instead of all weights; 0 is off.", 0)  # fmt: skip
    lora_targets: list[str] = _help("Names of the linear layers that get adapters; empty: all.", list)  # fmt: skip
    freeze_vision: bool = _help("Vision-language models: train the language model only.", True)
    logprob_chunk_size: int = _help("Tokens per chunk of the vocabulary projection.", 1024)
    max_bad_steps: int = _help("Stop after this many non-finite gradients in a row.", 5)
    optimizer: OptimizerConfig | None = _help(
        "Optimizer; null for an evaluated model.", OptimizerConfig
    )

    def check(self) -> None:
        dtypes = ("float32", "bfloat16", "float16")
        _require_one_of("dtype", self.dtype, dtypes)
        _require_one_of("param_dtype", self.param_dtype, dtypes)
        _require_one_of("device", self.device, ("cpu", "cuda", "auto"))
        _require_within(
            self,
            {"max_tokens_per_mb": (1, inf), "logprob_chunk_size": (1, inf), "max_bad_steps": (1, inf), "lora_rank": (0, inf)},
        )  # fmt: skip
        _require(
            self.lora_rank or not self.lora_targets,
            "lora_targets is set but lora_rank is 0: set lora_rank too",
        )
        _require(
            not self.cpu_offload or self.device != "cpu",
            "cpu_offload moves weights from the accelerator to the host: with device=cpu they are there already",
        )
        if self.optimizer is not None:
            self.optimizer.check()


@dataclass
class NormConfig:
    """Where a mean is subtracted and a deviation divided out."""

    mean_level: str = _help("none, group or batch.", "group")
    std_level: str = _help("none, group or batch.", "group")
    leave_one_out: bool = _help("Leave the sample itself out of its mean (RLOO).", False)
    eps: float = _help("Added to the deviation.", 1e-6)

    def check(self) -> None:
        levels = ("none", "group", "batch")
        _require_one_of("mean_level", self.mean_level, levels)
        _require_one_of("std_level", self.std_level, levels)
        _require(
            not self.leave_one_out or self.mean_level == "group",
            f"leave_one_out needs mean_level=group, got {self.mean_level!r}",
        )


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """The trained policy and its objective. Switches that are null are as `algorithm` says."""

    algorithm: str = _help(
        "grpo, dr_grpo, dapo, rloo, reinforce_pp, reinforce_pp_baseline, lite_ppo, gspo, cispo, sapo, m2po, ppo, custom.",
        "grpo",
    )
    ppo_n_minibatches: int = _help("Optimizer steps per training batch.", 1)
    loss: str | None = _help("clip, reinforce, gspo, cispo or sapo.", None)
    loss_mean: str | None = _help(
        "Average losses over each token, sequence (then the batch), or by a constant length.", None
    )
    eps_clip: float = _help("Lower (and upper) clip range of the ratio.", 0.2)
    eps_clip_higher: float | None = _help("Upper clip range, if it differs.", None)
    c_clip: float | None = _help("Dual clip for negative advantages (> 1); null is off.", None)
    use_decoupled_loss: bool = _help(
        "Clip around the proximal policy, weight by prox/behaviour.", True
    )
    prox_logp: str = _help(
        "recompute (a pass over the batch), first_pass (only where the update brings none), interpolate (no pass).",
        "recompute",
    )
    behav_imp_weight_cap: float | None = _help(
        "Largest prox/behaviour weight; what happens above is behav_imp_weight_mode.", 5.0
    )
    behav_imp_weight_floor: float = _help("Smallest prox/behaviour weight, likewise.", 0.0)
    behav_imp_weight_mode: str = _help(
        "Outside the bounds: token_mask, token_clamp (TIS), sequence_mask (MIS), sequence_clamp; prefix_clamp: of all tokens so far.",
        "token_mask",
    )
    m2_threshold: float = _help("M2PO: largest mean of (prox - behaviour)^2 of kept tokens.", 0.04)
    temperature: float = _help("Temperature the log-probs are computed at; as in gconfig.", 1.0)
    reward_scaling: float = _help("Rewards become (r + bias) * scaling.", 1.0)
    reward_bias: float = _help("Rewards become (r + bias) * scaling.", 0.0)
    reward_clip: float = _help("Shaped rewards are clipped to +- this.", 20.0)
    max_answer_length: int | None = _help(
        "Longest answer, for loss_mean=constant and overlong_buffer; as gconfig.max_new_tokens.",
        None,
    )
    overlong_buffer: int | None = _help(
        "Answers in the last so many tokens before max_answer_length lose up to 1.", None
    )
    reward_norm: NormConfig | None = _help("Normalisation of rewards into advantages.", None)
    norm_advantages: bool | None = _help("Whiten advantages over all tokens of the batch.", None)
    kl_ctl: float = _help("Weight of the per-token KL to the reference in the reward.", 0.0)
    kl_target: float | None = _help("Adapt kl_ctl to keep the KL per sequence near this.", None)
    kl_loss_coef: float = _help("Weight of the KL to the reference in the loss.", 0.0)
    kl_estimator: str = _help("k1, k2 or k3.", "k1")
    entropy_coef: float = _help("Weight of the entropy bonus.", 0.0)
    distill_coef: float = _help("Weight of the reverse KL to the teacher.", 0.0)
    discount: float = _help("GAE gamma.", 1.0)
    gae_lambda: float = _help("GAE lambda.", 1.0)
    skip_zero_advantage: bool = _help(
        "Leave out sequences whose advantage is zero everywhere.", True
    )

    def check(self) -> None:
        super().check()
        modes = ("recompute", "first_pass", "interpolate")
        _require_one_of("prox_logp", self.prox_logp, modes)
        _require_one_of("kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        weight_modes = (
            "token_mask", "token_clamp", "sequence_mask", "sequence_clamp", "prefix_clamp",
        )  # fmt: skip
        _require_one_of("behav_imp_weight_mode", self.behav_imp_weight_mode, weight_modes)
        _require(
            self.c_clip is None or self.c_clip > 1,
            f"c_clip must be larger than 1, got {self.c_clip}",
        )
        _require_within(
            self,
            {"ppo_n_minibatches": (1, inf), "eps_clip": (0, 1), "eps_clip_higher": (0, inf), "discount": (0, 1),
             "gae_lambda": (0, 1), "reward_clip": (0, inf), "behav_imp_weight_floor": (0, inf), "m2_threshold": (0, inf),
             "kl_ctl": (0, inf), "kl_loss_coef": (0, inf)},
        )  # fmt: skip
        _require(self.temperature > 0, f"temperature must be positive, got {self.temperature}")
        cap, floor = self.behav_imp_weight_cap, self.behav_imp_weight_floor
        _require(
            cap is None or cap > floor,
            f"behav_imp_weight_cap={cap} is not above behav_imp_weight_floor={floor}: no token would be trained",
        )
        if self.reward_norm is not None:
            self.reward_norm.check()


@dataclass
class PPOCriticConfig(TrainEngineConfig):
    """The value function of PPO."""

    ppo_n_minibatches: int = _help("Optimizer steps per training batch.", 1)
    value_eps_clip: float | None = _help("New values stay this near the old; null is off.", 0.5)
    value_norm: bool = _help("Learn values of normalised returns (running mean and std).", False)


@dataclass
class PreferenceConfig(TrainEngineConfig):
    """A model trained on chosen and rejected answers."""

    loss: str = _help("dpo, ipo, kto, orpo or simpo.", "dpo")
    beta: float = _help("How strongly the reference (or, for simpo, the margin) binds.", 0.1)
    margin: float = _help("simpo: target margin between chosen and rejected.", 0.0)

    def check(self) -> None:
        super().check()
        _require_one_of("loss", self.loss, ("dpo", "ipo", "kto", "orpo", "simpo"))
        _require(self.beta > 0, f"beta must be positive, got {self.beta}")
        _require(
            self.margin == 0 or self.loss == "simpo",
            f"margin={self.margin} is of loss=simpo only, not of {self.loss}",
        )

    @property
    def needs_reference(self) -> bool:
        return self.loss in ("dpo", "ipo", "kto")
