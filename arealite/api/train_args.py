"""Configuration of training engines: optimizer, model and objectives.

Part of the tree in `cli_args`. The values that each algorithm implies or rejects are in `algorithms`.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.config_field import (
    ANY_NUMBER,
    AT_LEAST_1,
    NOT_NEGATIVE,
    POSITIVE,
    SECONDS,
    SEED,
    SHARE,
    Range,
    Section,
)
from arealite.api.config_field import choice_field as _choice
from arealite.api.config_field import help_field as _help
from arealite.api.errors import ConfigError


@dataclass
class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    type: str = _choice(
        "AdamW; _bf16 and _8bit store its states in two bytes or one, rounded stochastically.",
        "adamw", "adamw_bf16", "adamw_8bit",
    )  # fmt: skip
    lr: float | None = _help(
        "Peak learning rate; null: 2e-6 for a policy, 3e-6 for DPO, else 1e-5; with LoRA ten times that.",
        None,
        POSITIVE,
    )
    weight_decay: float = _help("Decoupled weight decay, not on biases and norms.", 0.01, NOT_NEGATIVE)
    beta1: float = _help("AdamW beta 1.", 0.9, SHARE)
    beta2: float = _help("AdamW beta 2.", 0.95, SHARE)
    eps: float = _help("AdamW epsilon.", 1e-8, NOT_NEGATIVE)
    lr_scheduler_type: str = _choice("Schedule after the warm-up.", "constant", "linear", "cosine")
    warmup_steps_proportion: float = _help("Share of all steps with linear warm-up.", 0.05, SHARE)
    min_lr_ratio: float = _help("The schedule ends at this share of the peak.", 0.0, SHARE)
    gradient_clipping: float = _help("Largest global gradient norm; 0 is off.", 1.0, NOT_NEGATIVE)


def untrainable_target(name: str) -> str:
    """Return the message for a target whose adapter no gradient reaches, or servers cannot merge."""
    return (
        f"lora_targets: adapters of {name} cannot be trained; leave out the head and the embedding of the model, and "
        "the layers of experts and routers"
    )


@dataclass
class TrainEngineConfig(Section):
    """A model that is trained, or only evaluated if it has no optimizer."""

    path: str = _help("Hugging Face folder or hub name of the model.")
    init_from_scratch: bool = _help("Random weights; only config and tokenizer are read from `path`.", False)
    seed: int = _help("Seed of weights that are not loaded: a new head, adapters, random weights.", 1, SEED)
    dtype: str = _choice("Compute type.", "bfloat16", "float32", "float16")
    param_dtype: str = _choice("Type of the weights that the optimizer updates.", "float32", "bfloat16", "float16")
    device: str = _choice("auto: cuda if there is one.", "auto", "cpu", "cuda")
    max_tokens_per_mb: int | None = _help(
        "Token budget of a rank's micro-batch; null: what fits into the device's memory, at most 32768.",
        None, AT_LEAST_1,
    )  # fmt: skip
    share_prefix: bool = _help(
        "Compute tokens that several rows of a micro-batch begin with (prompts, earlier turns) only once; exact.", True
    )
    gradient_checkpointing: bool | None = _help(
        "Recompute activations in the backward pass; null: on a GPU, if its memory is too small to keep them.", None
    )
    pipeline_stages_per_rank: int = _help(
        "Stages of each pipeline rank; more than 1: the interleaved schedule. Needs p2 or more.", 1, AT_LEAST_1
    )
    deterministic: bool = _help("Repeat results bit for bit on a GPU, for `arealite replay` (slower).", False)
    compile: bool = _help("Compile each layer (takes a minute at the start).", False)
    cpu_offload: bool = _help("Keep weights and optimizer in host memory (cuda only).", False)
    lora_rank: int = _help("Train only LoRA adapters, of this rank; 0 is off.", 0, NOT_NEGATIVE)
    lora_alpha: int | None = _help("Adapters are scaled by alpha / rank; null: 2 * lora_rank.", None, AT_LEAST_1)
    lora_targets: list[str] = _help("Linear layers that get adapters, by name; empty: all.", list)
    frozen_weight_dtype: str = _choice(
        "Storage of linear layers that are not trained (under adapters, of a reference). auto: param_dtype; nf4: 4 "
        "bits, as QLoRA.",
        "auto", "fp8", "nf4",
    )  # fmt: skip
    freeze_vision: bool = _help("Vision-language models: train the language model only.", True)
    router_aux_loss_coef: float = _help(
        "Mixtures of experts: weight of the load-balancing loss of the Switch Transformer; 0 is off.", 0.0, NOT_NEGATIVE
    )
    router_bias_update_rate: float = _help(
        "DeepSeek-V3: how far a minibatch moves routers' biases towards equal load; 0 keeps them.", 0.0, NOT_NEGATIVE
    )
    logprob_chunk_size: int | None = _help(
        "Tokens per chunk of logits; null: 1024 on CPU, on a GPU by its memory.", None, AT_LEAST_1
    )
    collective_timeout_s: float = _help("Timeout of collectives between ranks.", 1800.0, SECONDS)
    max_bad_steps: int = _help("Stop after this many non-finite gradients in a row.", 5, AT_LEAST_1)
    optimizer: OptimizerConfig | None = _help("null for an evaluated model.", OptimizerConfig)

    # Peak learning rates of full fine-tuning and of adapters if `optimizer.lr` is null.
    default_lr: ClassVar[float] = 1e-5
    default_lora_lr: ClassVar[float] = 1e-4

    @property
    def peak_lr(self) -> float:
        """The configured peak learning rate, or the default for this kind of model and training."""
        assert self.optimizer is not None
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        # Adapters start at zero and have few parameters: they take larger steps than pretrained weights.
        return self.default_lora_lr if self.lora_rank else self.default_lr

    @property
    def sends_adapters(self) -> bool:
        """Whether servers can get adapters alone: not if their base differs from the trainer's."""
        return self.lora_rank > 0 and self.frozen_weight_dtype == "auto"

    def problems(self) -> Iterator[str]:
        low_bit = f"frozen_weight_dtype={self.frozen_weight_dtype}"
        if self.frozen_weight_dtype != "auto" and self.optimizer is not None and not self.lora_rank:
            yield f"{low_bit} is for weights that are not trained: set lora_rank too, or leave it out"
        if self.frozen_weight_dtype != "auto" and self.cpu_offload:
            yield f"{low_bit} keeps weights on the device, cpu_offload in host memory: leave one of them out"
        for key in ("lora_targets", "lora_alpha"):
            if getattr(self, key) and not self.lora_rank:
                yield f"{key} is set but lora_rank is 0: set lora_rank too"
        ends = [name for name in self.lora_targets if name.rpartition(".")[2] in ("lm_head", "embed_tokens")]
        if ends:
            yield untrainable_target(ends[0])
        if self.router_bias_update_rate and self.lora_rank:
            yield "router_bias_update_rate moves biases that adapter checkpoints do not hold: set it or lora_rank to 0"
        if self.cpu_offload and self.device == "cpu":
            yield "cpu_offload moves weights from the accelerator to the host: leave it out with device=cpu"

    def check_parallel(self, layout: ParallelStrategy) -> None:
        """Raise `ConfigError` if these settings do not go together with the layout of the ranks."""
        if self.pipeline_stages_per_rank > 1 and layout.pipeline == 1:
            raise ConfigError(
                f"pipeline_stages_per_rank={self.pipeline_stages_per_rank} with p1: it is for pipelines of two ranks "
                "or more. Leave it out, or set p in allocation_mode"
            )
        if self.cpu_offload and layout.pipeline > 1:
            raise ConfigError(
                f"cpu_offload=true with p{layout.pipeline}: pipeline stages keep their weights on the device. Leave it "
                "out, or use p1 and give those ranks to d"
            )
        if self.frozen_weight_dtype != "auto" and max(layout.tensor, layout.pipeline, layout.expert) > 1:
            raise ConfigError(
                f"frozen_weight_dtype={self.frozen_weight_dtype} with {layout}: layers in low bits are whole on every "
                "rank, and not divided over ranks of t, p or e. Give those ranks to d or c"
            )
        if layout.tensor > 1 and self.lora_rank:
            raise ConfigError(
                f"lora_rank={self.lora_rank} with t{layout.tensor}: layers with adapters cannot be split over tensor "
                "ranks. Use t1 and give those ranks to d (FSDP shards the weights over them too) or c"
            )
        if layout.expert > 1 and self.lora_rank:
            raise ConfigError(
                f"lora_rank={self.lora_rank} with e{layout.expert}: experts with adapters cannot be divided over "
                "expert ranks. Leave out e: FSDP shards the experts over d"
            )


@dataclass
class FrozenEngineConfig(TrainEngineConfig):
    """A model that is only evaluated, such as a reference policy or a teacher.

    In a configuration, `ref.dtype` is that of the trained model unless it is given.
    """

    optimizer: OptimizerConfig | None = _help("A frozen model has none.", None)

    @classmethod
    def start_of(cls, policy: TrainEngineConfig) -> Self:
        """Return the reference policy that a trained one starts from."""
        own: dict[str, Any] = {"optimizer": None, "lora_rank": 0, "lora_alpha": None, "lora_targets": []}
        shared = {field.name: getattr(policy, field.name) for field in dataclasses.fields(TrainEngineConfig)}
        return cls(**{**shared, **own})

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.optimizer is not None:
            yield "a reference or teacher is not trained: leave its optimizer out (optimizer=null)"


@dataclass
class NormConfig(Section):
    """Normalization of rewards: which mean is subtracted, and by which std the result is divided."""

    mean_level: str = _choice("The mean is over the group, the batch, or not subtracted.", "group", "batch", "none")
    std_level: str = _choice("The std is over the group, the batch, or not used.", "group", "batch", "none")
    leave_one_out: bool = _help("Exclude the row itself from its mean (RLOO).", False)
    eps: float = _help("Added to the std.", 1e-6, NOT_NEGATIVE)

    def problems(self) -> Iterator[str]:
        if self.leave_one_out and self.mean_level != "group":
            yield f"leave_one_out needs mean_level=group, got {self.mean_level!r}"


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """The trained policy and its objective. `algorithm` sets the keys that are null."""

    default_lr: ClassVar[float] = 2e-6
    default_lora_lr: ClassVar[float] = 2e-5

    algorithm: str = _help(
        "grpo, dr_grpo, dapo, rloo, reinforce_pp, reinforce_pp_baseline, lite_ppo, gspo, cispo, sapo, m2po, ppo, "
        "custom.",
        "grpo",
    )
    ppo_n_minibatches: int = _help("Optimizer steps per training batch.", 1, AT_LEAST_1)
    max_update_kl: float | None = _help(
        "Skip the rest of an update's minibatches once the policy has moved by this KL per token; null is off.",
        0.02,
        POSITIVE,
    )
    loss: str | None = _help("clip, reinforce, gspo, cispo or sapo; null: that of `algorithm`.", None)
    loss_mean: str | None = _help(
        "token: mean over tokens; sequence: over each sequence, then sequences; sequence_sum: sum over each sequence, "
        "mean over sequences; constant: divide by sequences * max_answer_length; null: that of `algorithm`.",
        None,
    )
    eps_clip: float = _help("Lower (and upper) clip range of the ratio.", 0.2, SHARE)
    eps_clip_higher: float | None = _help("Upper clip range, if it differs.", None, NOT_NEGATIVE)
    c_clip: float | None = _help("Dual clip for A < 0; null is off.", None, Range(1, above=True))
    use_decoupled_loss: bool = _help(
        "Decoupled PPO: clip the ratio to the proximal policy, weight tokens by proximal/behaviour.", True
    )
    prox_logp: str = _choice(
        "Log-probs of the proximal policy. first_pass: the first minibatch takes those of its own forward pass, an "
        "extra pass computes the others; recompute: an extra pass over the batch; interpolate: estimated.",
        "first_pass", "recompute", "interpolate",
    )  # fmt: skip
    behav_imp_weight_cap: float | None = _help("Largest weight (proximal/behaviour); null is off.", 5.0, POSITIVE)
    behav_imp_weight_floor: float = _help("Smallest weight (proximal/behaviour).", 0.0, NOT_NEGATIVE)
    behav_imp_weight_mode: str = _choice(
        "What happens to tokens outside of these bounds (token_clamp: TIS, sequence_mask: MIS, prefix_clamp: product "
        "over the prefix).",
        "token_mask", "token_clamp", "sequence_mask", "sequence_clamp", "prefix_clamp",
    )  # fmt: skip
    m2_threshold: float = _help("M2PO: largest mean (proximal - behaviour log-prob)^2 kept.", 0.04, POSITIVE)
    temperature: float = _help("Temperature of the log-probs; must equal gconfig.temperature.", 1.0, POSITIVE)
    reward_scaling: float = _help("Rewards become (r + bias) * scaling.", 1.0, ANY_NUMBER)
    reward_bias: float = _help("Rewards become (r + bias) * scaling.", 0.0, ANY_NUMBER)
    reward_clip: float | None = _help("Shaped rewards are clipped to +- this; null: they are not.", None, POSITIVE)
    max_answer_length: int | None = _help(
        "gconfig.max_new_tokens; loss_mean=constant and overlong_buffer need it.", None, AT_LEAST_1
    )
    overlong_buffer: int | None = _help(
        "Length penalty: from 0 to -1 over this many tokens before max_answer_length; null is off.", None, AT_LEAST_1
    )
    reward_norm: NormConfig | None = _help("Normalization of rewards into advantages; null: that of `algorithm`.", None)
    norm_advantages: bool | None = _help("Whiten advantages over all tokens of the batch; null: as `algorithm`.", None)
    kl_ctl: float = _help("Weight of the KL to the reference in the reward.", 0.0, NOT_NEGATIVE)
    kl_target: float | None = _help("Adapt kl_ctl to keep the KL per sequence near this.", None, POSITIVE)
    kl_loss_coef: float = _help("Weight of the KL to the reference in the loss.", 0.0, NOT_NEGATIVE)
    kl_estimator: str | None = _help(
        "k1, k2 or k3, of the KL to the reference; null: k1 in the reward, k3 in the loss.", None
    )
    entropy_coef: float = _help("Weight of the entropy bonus.", 0.0, ANY_NUMBER)
    distill_coef: float = _help("Weight of the reverse KL to the teacher.", 0.0, NOT_NEGATIVE)
    discount: float = _help("GAE gamma.", 1.0, SHARE)
    gae_lambda: float = _help("GAE lambda.", 1.0, SHARE)
    skip_zero_advantage: bool | None = _help(
        "Skip sequences whose advantages are all 0; null: unless kl_loss_coef or entropy_coef trains them, or routers "
        "are balanced.",
        None,
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        cap, floor = self.behav_imp_weight_cap, self.behav_imp_weight_floor
        if cap is not None and cap <= floor:
            yield f"behav_imp_weight_cap={cap} is not above behav_imp_weight_floor={floor}: no token would be trained"
        elif floor > 1 or (cap is not None and cap < 1):
            yield (
                f"behav_imp_weight_floor={floor} and behav_imp_weight_cap={cap} leave out 1, the weight of a token "
                "that the current policy sampled: set a floor of at most 1 and a cap of at least 1"
            )


@dataclass
class PPOCriticConfig(TrainEngineConfig):
    """The value function of PPO."""

    ppo_n_minibatches: int = _help("Optimizer steps per training batch.", 1, AT_LEAST_1)
    value_eps_clip: float | None = _help("Clip range of new values around the old; null is off.", 0.5, NOT_NEGATIVE)
    value_norm: bool = _help("Learn values of normalized returns (running mean and std).", False)


@dataclass
class PreferenceConfig(TrainEngineConfig):
    """A model trained on chosen and rejected answers."""

    default_lr: ClassVar[float] = 3e-6

    loss: str = _choice("Which preference loss.", "dpo", "ipo", "kto", "orpo", "simpo")
    beta: float | None = _help(
        "Factor of log-ratios (orpo: of the odds; simpo: of log-probs); null: 0.1, simpo 2.", None, POSITIVE
    )
    margin: float | None = _help("simpo: target margin between chosen and rejected; null: 1.", None, ANY_NUMBER)
    desirable_weight: float = _help("kto: weight of good answers in the loss.", 1.0, POSITIVE)
    undesirable_weight: float = _help("kto: weight of bad answers in the loss.", 1.0, POSITIVE)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.margin and self.loss != "simpo":
            yield f"margin={self.margin} is of loss=simpo only, not of {self.loss}"
        for name in ("desirable_weight", "undesirable_weight"):
            if getattr(self, name) != 1 and self.loss != "kto":
                yield f"{name}={getattr(self, name)} is of loss=kto only, not of {self.loss}"

    @property
    def factor(self) -> float:
        """`beta`, or what the papers use."""
        return self.beta or (2.0 if self.loss == "simpo" else 0.1)

    @property
    def target_margin(self) -> float:
        return 1.0 if self.margin is None else self.margin

    @property
    def needs_reference(self) -> bool:
        return self.loss in ("dpo", "ipo", "kto")
