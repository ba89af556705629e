"""The configuration tree: dataclasses with one line of help per field. No logic beyond `check()`.

Scripts load one of the experiment classes at the bottom with `arealite.utils.config.load_config`; YAML first, then
`key=value` overrides. A config is read at the edge and never changed after loading. A backend's own flags are not
repeated here: they pass through the dicts `sglang` and `vllm`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from arealite.api.errors import ConfigError


def _help(text: str, default: Any = MISSING, **kwargs: Any) -> Any:
    """A dataclass field with its line of help; mutable defaults are given as a factory (a class or lambda)."""
    if callable(default):
        return field(default_factory=default, metadata={"help": text, **kwargs})
    return field(default=default, metadata={"help": text, **kwargs})


# --------------------------------------------------------------------------------------------- generation


@dataclass
class GenerationHyperparameters:
    """How one prompt is continued."""

    n_samples: int = _help("Samples per prompt (the group size of GRPO).", 1)
    max_new_tokens: int = _help("Longest continuation in tokens.", 512)
    min_new_tokens: int = _help("No stop token is sampled before this many tokens.", 0)
    temperature: float = _help("Sampling temperature; 0 is greedy.", 1.0)
    top_p: float = _help("Nucleus sampling: keep the smallest set with this probability.", 1.0)
    top_k: int = _help("Keep the k most likely tokens; 0 keeps all.", 0)
    min_p: float = _help("Drop tokens less likely than this share of the most likely one.", 0.0)
    stop_token_ids: list[int] = _help("Extra token ids that end a continuation.", list)
    stop: list[str] = _help("Strings that end a continuation.", list)
    ignore_eos: bool = _help("Go on after the end-of-text token.", False)
    frequency_penalty: float = _help("Subtracted per earlier occurrence of a token.", 0.0)
    presence_penalty: float = _help("Subtracted once a token has occurred.", 0.0)
    repetition_penalty: float = _help(
        "Divides (multiplies, if negative) logits of tokens seen; 1 is off.", 1.0
    )

    def check(self) -> None:
        _require(self.n_samples >= 1, f"gconfig.n_samples must be at least 1, got {self.n_samples}")
        _require(
            self.max_new_tokens >= 1,
            f"gconfig.max_new_tokens must be at least 1, got {self.max_new_tokens}",
        )
        _require(
            self.temperature >= 0,
            f"gconfig.temperature must not be negative, got {self.temperature}",
        )
        _require(0 < self.top_p <= 1, f"gconfig.top_p must be in (0, 1], got {self.top_p}")
        _require(self.top_k >= 0, f"gconfig.top_k must be 0 (all) or positive, got {self.top_k}")
        _require(0 <= self.min_p <= 1, f"gconfig.min_p must be in [0, 1], got {self.min_p}")


# ----------------------------------------------------------------------------------------------- training


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

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
        kinds = ("constant", "linear", "cosine")
        _require(
            self.lr_scheduler_type in kinds,
            f"lr_scheduler_type is {self.lr_scheduler_type!r}; use one of {kinds}",
        )
        _require(self.lr > 0, f"the learning rate must be positive, got {self.lr}")
        _require(
            0 <= self.warmup_steps_proportion <= 1,
            f"warmup_steps_proportion must be in [0, 1], got {self.warmup_steps_proportion}",
        )


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
    gradient_checkpointing: bool = _help("Recompute activations in the backward pass.", False)
    logprob_chunk_size: int = _help("Tokens per chunk of the vocabulary projection.", 1024)
    max_bad_steps: int = _help("Stop after this many non-finite gradients in a row.", 5)
    optimizer: OptimizerConfig | None = _help(
        "Optimizer; null for an evaluated model.", OptimizerConfig
    )

    def check(self) -> None:
        dtypes = ("float32", "bfloat16", "float16")
        _require(self.dtype in dtypes, f"dtype is {self.dtype!r}; use one of {dtypes}")
        _require(
            self.param_dtype in dtypes, f"param_dtype is {self.param_dtype!r}; use one of {dtypes}"
        )
        _require(
            self.device in ("cpu", "cuda", "auto"),
            f"device is {self.device!r}; use cpu, cuda or auto",
        )
        _require(
            self.max_tokens_per_mb > 0,
            f"max_tokens_per_mb must be positive, got {self.max_tokens_per_mb}",
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
        _require(
            self.mean_level in levels, f"mean_level is {self.mean_level!r}; use one of {levels}"
        )
        _require(self.std_level in levels, f"std_level is {self.std_level!r}; use one of {levels}")
        _require(
            not self.leave_one_out or self.mean_level == "group",
            f"leave_one_out needs mean_level=group, got {self.mean_level!r}",
        )


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """The trained policy and its objective."""

    ppo_n_minibatches: int = _help("Optimizer steps per training batch.", 1)
    eps_clip: float = _help("Lower (and upper) clip range of the ratio.", 0.2)
    eps_clip_higher: float | None = _help("Upper clip range, if it differs.", None)
    c_clip: float | None = _help("Dual clip for negative advantages (> 1); null is off.", None)
    use_decoupled_loss: bool = _help(
        "Clip around the proximal policy, weight by prox/behaviour.", True
    )
    prox_logp: str = _help(
        "recompute (a pass over the batch) or first_pass (the same, but only where the update brings none).",
        "recompute",
    )
    behav_imp_weight_cap: float | None = _help(
        "Tokens with a larger prox/behaviour weight are dropped.", 5.0
    )
    temperature: float = _help("Temperature the log-probs are computed at; as in gconfig.", 1.0)
    reward_scaling: float = _help("Rewards become (r + bias) * scaling.", 1.0)
    reward_bias: float = _help("Rewards become (r + bias) * scaling.", 0.0)
    reward_clip: float = _help("Shaped rewards are clipped to +- this.", 20.0)
    reward_norm: NormConfig = _help("Normalisation of rewards into advantages.", NormConfig)
    kl_ctl: float = _help("Weight of the per-token KL to the reference in the reward.", 0.0)
    discount: float = _help("GAE gamma.", 1.0)
    gae_lambda: float = _help("GAE lambda.", 1.0)
    skip_zero_advantage: bool = _help(
        "Leave out sequences whose advantage is zero everywhere.", True
    )

    def check(self) -> None:
        super().check()
        modes = ("recompute", "first_pass")
        _require(self.prox_logp in modes, f"prox_logp is {self.prox_logp!r}; use one of {modes}")
        _require(
            self.c_clip is None or self.c_clip > 1,
            f"c_clip must be larger than 1, got {self.c_clip}",
        )
        _require(
            self.ppo_n_minibatches >= 1,
            f"ppo_n_minibatches must be at least 1, got {self.ppo_n_minibatches}",
        )
        self.reward_norm.check()


# ------------------------------------------------------------------------------------------------ rollout


@dataclass
class InferenceEngineConfig:
    """The client side of generation: how many episodes run, how old their data may be."""

    max_concurrent_rollouts: int | None = _help(
        "Episodes in flight at most; null: one batch per allowed version.", None
    )
    max_head_offpolicyness: int = _help(
        "Largest version lag of a trained sample (eta); 0 is synchronous.", 0
    )
    pause_mode: str = _help(
        "What a weight update does to requests in flight: abort or in_place.", "abort"
    )
    weight_update: str = _help("How weights reach the servers: disk, shm or broadcast.", "disk")
    setup_timeout_s: float = _help("Deadline for servers to become healthy.", 300.0)
    request_timeout_s: float = _help("Deadline of one generation request.", 3600.0)
    request_retries: int = _help("Attempts at one request before its episode fails.", 3)
    episode_timeout_s: float = _help(
        "Deadline of one episode; past it, it counts as failed.", 7200.0
    )
    batch_timeout_s: float = _help("Deadline of one prepare_batch.", 7200.0)
    max_failed_episodes: int = _help("Stop the run after this many failed episodes in a row.", 64)
    dump_rollouts: bool = _help("Keep finished episodes as text in run.sqlite.", True)

    def check(self) -> None:
        _require(
            self.max_head_offpolicyness >= 0,
            f"max_head_offpolicyness is {self.max_head_offpolicyness}; use 0 or more",
        )
        _require(
            self.max_concurrent_rollouts is None or self.max_concurrent_rollouts > 0,
            f"max_concurrent_rollouts must be positive or null, got {self.max_concurrent_rollouts}",
        )
        _require(
            self.pause_mode in ("abort", "in_place"),
            f"pause_mode is {self.pause_mode!r}; use abort or in_place",
        )
        ways = ("disk", "shm", "broadcast")
        _require(
            self.weight_update in ways,
            f"weight_update is {self.weight_update!r}; use one of {ways}",
        )


@dataclass
class ServerConfig:
    """The embedded inference server."""

    model_path: str = _help("Hugging Face folder or hub name of the model.", "")
    dtype: str = _help(
        "float32, bfloat16, float16, or auto (bfloat16 on cuda, float32 on cpu).", "auto"
    )
    device: str = _help("cpu, cuda, or auto (cuda where there is one).", "auto")
    host: str = _help("Address to listen on; anything but loopback needs `api_key`.", "127.0.0.1")
    port: int = _help("Port to listen on; 0 takes a free one.", 0)
    api_key: str | None = _help("Token that requests must carry as a bearer token.", None)
    max_running_requests: int = _help("Sequences decoded at once.", 256)
    max_total_tokens: int | None = _help(
        "KV cache size in tokens; null: from the memory that is free.", None
    )
    context_length: int | None = _help(
        "Longest prompt plus continuation; null: the model's own.", None
    )
    block_size: int = _help("Tokens per KV cache block.", 16)
    max_prefill_tokens: int = _help("Prompt tokens processed in one step.", 4096)
    mem_fraction: float = _help(
        "Share of free memory taken for the KV cache when its size is not given.", 0.8
    )
    deterministic: bool = _help(
        "Same seed, same tokens, whatever else is in the batch (slower).", False
    )
    seed: int = _help("Seed of requests that bring none.", 0)

    def check(self) -> None:
        loopback = self.host in ("127.0.0.1", "localhost", "::1")
        _require(
            loopback or self.api_key,
            f"server.host={self.host} is not loopback: set server.api_key too",
        )
        _require(
            self.block_size >= 1, f"server.block_size must be at least 1, got {self.block_size}"
        )
        _require(self.max_running_requests >= 1, "server.max_running_requests must be at least 1")
        _require(
            0 < self.mem_fraction <= 1,
            f"server.mem_fraction must be in (0, 1], got {self.mem_fraction}",
        )


# ---------------------------------------------------------------------------------------- data, saving, run


@dataclass
class DatasetConfig:
    """A dataset and how it is batched."""

    path: str = _help("Local .jsonl/.json/.parquet file or folder, or a hub name.")
    name: str | None = _help("Configuration of a hub dataset, such as gsm8k's `main`.", None)
    split: str | None = _help("Split of a hub dataset or of a local folder.", None)
    batch_size: int = _help("Rows per step, over all ranks.", 8)
    shuffle: bool = _help("Shuffle anew each epoch, from the seed.", True)
    max_length: int | None = _help("Longer rows (in tokens) are left out.", None)

    def check(self) -> None:
        _require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")


@dataclass
class FreqConfig:
    """When something recurs. All null: never, except where its user says otherwise."""

    freq_epochs: int | None = _help("Every so many epochs.", None)
    freq_steps: int | None = _help("Every so many steps.", None)
    freq_secs: int | None = _help("Every so many seconds.", None)


@dataclass
class RecoverConfig(FreqConfig):
    """Resuming after a failure."""

    mode: str = _help(
        "disabled; auto (resume if there is a checkpoint); resume (there must be one).", "disabled"
    )
    retries: int = _help("Restarts by the launcher after a failure.", 0)

    def check(self) -> None:
        modes = ("disabled", "auto", "resume")
        _require(self.mode in modes, f"recover.mode is {self.mode!r}; use one of {modes}")
        _require(
            self.retries == 0 or self.mode != "disabled",
            f"recover.retries={self.retries} needs a checkpoint to restart from: set recover.mode=auto",
        )


@dataclass
class StatsLoggerConfig:
    """Where statistics go besides stats.jsonl."""

    tensorboard: bool = _help("Also write TensorBoard files.", False)
    console: bool = _help("Show the live table.", True)


@dataclass
class ClusterConfig:
    """The machines."""

    n_nodes: int = _help("Number of machines.", 1)
    n_gpus_per_node: int = _help("Accelerators per machine; on CPU, processes per machine.", 8)
    fileroot: str = _help("Folder of all run directories; shared by all machines.", "runs")

    def check(self) -> None:
        _require(self.n_nodes >= 1, f"cluster.n_nodes must be at least 1, got {self.n_nodes}")
        _require(
            self.n_gpus_per_node >= 1,
            f"cluster.n_gpus_per_node must be at least 1, got {self.n_gpus_per_node}",
        )


@dataclass
class LauncherConfig:
    """How processes are started."""

    threads_per_process: int | None = _help(
        "OMP threads of each process; null: cores shared equally.", None
    )
    trainer_port: int = _help("Rendezvous port of the trainer ranks; 0 takes a free one.", 0)
    stop_timeout_s: float = _help("Grace between asking processes to end and killing them.", 10.0)
    server_restarts: int = _help(
        "Times that servers which died are started again before the run fails.", 2
    )
    slurm: dict[str, Any] = _help(
        "Flags of sbatch as they are; container_* go to srun, `wrap` stands before the command.",
        dict,
    )


# ------------------------------------------------------------------------------------------- experiments


@dataclass
class BaseExperimentConfig:
    """What every run has."""

    experiment_name: str = _help("First part of the run directory's name.")
    trial_name: str = _help("Second part of the run directory's name.")
    allocation_mode: str = _help("Devices and parallelism, such as sglang.d4p1t1+d4p1t1.", "d1")
    seed: int = _help("Seed of data order, sampling and initial weights.", 1)
    total_train_epochs: int = _help("Passes over the training set.", 1)
    total_train_steps: int | None = _help("Stop after so many steps, if earlier.", None)
    tokenizer_path: str = _help("Tokenizer; empty: the model's.", "")
    train_dataset: DatasetConfig = _help("Training data.", DatasetConfig)
    valid_dataset: DatasetConfig | None = _help("Validation data.", None)
    cluster: ClusterConfig = _help("Machines.", ClusterConfig)
    launcher: LauncherConfig = _help("Processes.", LauncherConfig)
    saver: FreqConfig = _help("When Hugging Face checkpoints are written.", FreqConfig)
    evaluator: FreqConfig = _help("When the validation set is run.", FreqConfig)
    recover: RecoverConfig = _help(
        "When and whether recover checkpoints are written.", RecoverConfig
    )
    stats_logger: StatsLoggerConfig = _help("Where statistics go.", StatsLoggerConfig)

    def check(self) -> None:
        for part in vars(self).values():
            if hasattr(part, "check"):
                part.check()


@dataclass
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning."""

    model: TrainEngineConfig = _help("The trained model.", TrainEngineConfig)


@dataclass
class GRPOConfig(BaseExperimentConfig):
    """Reinforcement learning with verifiable rewards (the whole GRPO/PPO family)."""

    gconfig: GenerationHyperparameters = _help("Sampling.", GenerationHyperparameters)
    rollout: InferenceEngineConfig = _help("Asynchronous rollout.", InferenceEngineConfig)
    actor: PPOActorConfig = _help("The trained policy.", PPOActorConfig)
    ref: TrainEngineConfig | None = _help("The reference policy; null without KL.", None)
    server: ServerConfig = _help("The embedded server.", ServerConfig)
    sglang: dict[str, Any] = _help("Flags passed to SGLang as they are.", dict)
    vllm: dict[str, Any] = _help("Flags passed to vLLM as they are.", dict)

    def check(self) -> None:
        super().check()
        _require(
            self.actor.kl_ctl == 0 or self.ref is not None,
            f"actor.kl_ctl={self.actor.kl_ctl} needs a reference policy: set ref.path",
        )
        _require(
            self.gconfig.n_samples > 1 or self.actor.reward_norm.mean_level != "group",
            "gconfig.n_samples=1 makes every group advantage zero: raise it, or set actor.reward_norm.mean_level=batch",
        )
        _require(
            self.gconfig.temperature == 0 or self.actor.temperature == self.gconfig.temperature,
            f"actor.temperature={self.actor.temperature} differs from gconfig.temperature={self.gconfig.temperature}: "
            "log-probs of the two sides would not be of the same distribution",
        )


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ConfigError(message)
