"""The configuration tree: dataclasses with one line of help per field. No logic beyond `check()`.

Scripts load one of the experiment classes at the bottom with `arealite.utils.config.load_config`; YAML first, then
`key=value` overrides. A config is read at the edge and never changed after loading. A backend's own flags are not
repeated here: they pass through the dicts `sglang` and `vllm`. What is trained is configured in `train_args`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arealite.api.algorithms import resolve_objective
from arealite.api.alloc_mode import AllocationMode
from arealite.api.config_field import AT_LEAST_1, NOT_NEGATIVE, SHARE, Range, Section
from arealite.api.config_field import choice_field as _choice
from arealite.api.config_field import help_field as _help
from arealite.api.config_field import require as _require
from arealite.api.train_args import (
    FrozenEngineConfig,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOCriticConfig,
    PreferenceConfig,
    TrainEngineConfig,
)

__all__ = [  # the parts that live in other files of this room are imported from here too
    "FrozenEngineConfig", "NormConfig", "OptimizerConfig", "PPOActorConfig", "PPOCriticConfig", "PreferenceConfig", "TrainEngineConfig",
]  # fmt: skip


@dataclass
class GenerationHyperparameters(Section):
    """How one prompt is continued."""

    n_samples: int = _help("Samples per prompt (the group size of GRPO).", 1, AT_LEAST_1)
    max_new_tokens: int = _help("Longest continuation in tokens.", 512, AT_LEAST_1)
    min_new_tokens: int = _help("No stop token is sampled before this many tokens.", 0)
    temperature: float = _help("Sampling temperature; 0 is greedy.", 1.0, NOT_NEGATIVE)
    top_p: float = _help("Keep the smallest set with this probability.", 1.0, Range(0, 1, True))
    top_k: int = _help("Keep the k most likely tokens; 0 keeps all.", 0, NOT_NEGATIVE)
    min_p: float = _help("Drop what is less likely than this share of the likeliest.", 0.0, SHARE)
    stop_token_ids: list[int] = _help("Extra token ids that end a continuation.", list)
    stop: list[str] = _help("Strings that end a continuation.", list)
    ignore_eos: bool = _help("Go on after the end-of-text token.", False)
    frequency_penalty: float = _help("Subtracted per earlier occurrence of a token.", 0.0)
    presence_penalty: float = _help("Subtracted once a token has occurred.", 0.0)
    repetition_penalty: float = _help("Divides (negative: multiplies) logits of seen tokens.", 1.0)


@dataclass
class InferenceEngineConfig(Section):
    """The client side of generation: how many episodes run, how old their data may be."""

    max_concurrent_rollouts: int | None = _help(
        "Episodes in flight at most; null: one batch per allowed version.", None, AT_LEAST_1
    )
    max_head_offpolicyness: int = _help(
        "Largest version lag of a trained sample (eta); 0 is synchronous.", 0, NOT_NEGATIVE
    )
    adaptive_lead: bool = _help("Run ahead only as far as keeps the trainer busy.", True)
    num_workers: int = _help("Processes that run episodes; 0: in the trainer's, for light ones.", 0)
    pause_mode: str = _choice("What a weight update does to open requests.", "abort", "in_place")
    weight_update: str = _choice(
        "How weights reach the servers; auto: shm where it works for all, else disk.",
        *("auto", "disk", "shm", "broadcast"),
    )
    setup_timeout_s: float = _help("Deadline for servers to become healthy.", 300.0)
    request_timeout_s: float = _help("Deadline of one generation request.", 3600.0)
    request_retries: int = _help("Attempts at one request before its episode fails.", 3)
    health_timeout_s: float = _help("A server silent for so long is given up; its requests go on elsewhere.", 30.0)
    segment_tokens: int = _help(
        "Tokens asked of a server at a time: what a killed one can lose of a long answer.", 4096
    )
    episode_timeout_s: float = _help("Deadline of one episode; past it, it has failed.", 7200.0)
    batch_timeout_s: float = _help("Deadline of one prepare_batch.", 7200.0)
    max_failed_episodes: int = _help("Stop the run after this many failed episodes in a row.", 64)
    dump_rollouts: bool = _help("Keep finished episodes as text in run.sqlite.", True)


@dataclass
class ServerConfig(Section):
    """The embedded inference server."""

    model_path: str = _help("Hugging Face folder or hub name of the model.", "")
    dtype: str = _help("float32, bfloat16, float16; auto: bfloat16 on cuda, else float32.", "auto")
    device: str = _help("cpu, cuda, or auto (cuda where there is one).", "auto")
    tensor_parallel: int = _help("Devices (on CPU, processes) of one model.", 1, AT_LEAST_1)
    host: str = _help("Address to listen on; anything but loopback needs `api_key`.", "127.0.0.1")
    port: int = _help("Port to listen on; 0 takes a free one.", 0, Range(0, 65535))
    api_key: str | None = _help("Token that requests must carry as a bearer token.", None)
    max_running_requests: int = _help("Sequences decoded at once.", 256, AT_LEAST_1)
    max_total_tokens: int | None = _help("KV cache size in tokens; null: what fits.", None)
    context_length: int | None = _help("Of prompt and continuation; null: the model's.", None)
    block_size: int = _help("Tokens per KV cache block.", 16, AT_LEAST_1)
    max_prefill_tokens: int = _help("Prompt tokens processed in one step.", 4096, AT_LEAST_1)
    mem_fraction: float = _help(
        "Share of free memory for the KV cache; half of it where a trainer shares the GPU.", 0.8, Range(0, 1, True)
    )
    deterministic: bool = _help("Same seed, same tokens, whatever the batch (slower).", False)
    seed: int = _help("Seed of requests that bring none.", 0)
    join: str = _help("Run directory of a running job that this server joins.", "")

    def check(self) -> None:
        super().check()
        _require(
            self.host in ("127.0.0.1", "localhost", "::1") or self.api_key,
            f"server.host={self.host} is not loopback: set server.api_key too",
        )


@dataclass
class DatasetConfig(Section):
    """A dataset and how it is batched."""

    path: str = _help("Local .jsonl/.json/.csv/.parquet file or folder, or a hub name.")
    name: str | None = _help("Configuration of a hub dataset, such as gsm8k's `main`.", None)
    split: str | None = _help("Split of a hub dataset or of a local folder.", None)
    batch_size: int = _help("Rows per step, over all ranks.", 8, AT_LEAST_1)
    shuffle: bool = _help("Shuffle anew each epoch, from the seed.", True)
    max_length: int | None = _help("Longer rows (in tokens) are left out.", None)


@dataclass
class FreqConfig(Section):
    """When something recurs. All null: never, except where its user says otherwise."""

    freq_epochs: int | None = _help("Every so many epochs.", None)
    freq_steps: int | None = _help("Every so many steps.", None)
    freq_secs: int | None = _help("Every so many seconds.", None)


@dataclass
class RecoverConfig(FreqConfig):
    """Resuming after a failure."""

    mode: str = _choice(
        "auto: resume if there is a checkpoint; resume: there must be one.",
        "disabled", "auto", "resume",
    )  # fmt: skip
    retries: int = _help("Restarts by the launcher after a failure.", 0)

    def check(self) -> None:
        super().check()
        _require(
            self.retries == 0 or self.mode != "disabled",
            f"recover.retries={self.retries} needs a checkpoint to restart from: set recover.mode=auto",
        )


@dataclass
class StatsLoggerConfig(Section):
    """Where statistics go besides stats.jsonl."""

    tensorboard: bool = _help("Also write TensorBoard files.", False)
    console: bool = _help("Show the live table.", True)


@dataclass
class ClusterConfig(Section):
    """The machines."""

    n_nodes: int | None = _help("Machines; null: one; on Ray and Slurm what allocation_mode needs.", None, AT_LEAST_1)
    min_nodes: int | None = _help(
        "torchrun only: machines may come and go, down to this many; null: all must stay.", None
    )
    n_gpus_per_node: int = _help("Accelerators (on CPU, processes) of each.", 8, AT_LEAST_1)
    fileroot: str = _help("Folder of all run directories; shared by all machines.", "runs")

    def check(self) -> None:
        super().check()
        most = self.n_nodes or 1
        _require(
            self.min_nodes is None or 1 <= self.min_nodes <= most,
            f"cluster.min_nodes={self.min_nodes} must be between 1 and cluster.n_nodes={most}",
        )


@dataclass
class LauncherConfig(Section):
    """How processes are started."""

    threads_per_process: int | None = _help("Null: OMP_NUM_THREADS, or cores shared equally.", None)
    trainer_port: int = _help("Rendezvous port of the trainer ranks; 0 takes a free one.", 0)
    stop_timeout_s: float = _help("Grace between asking processes to end and killing them.", 10.0)
    server_restarts: int = _help("Times that dead servers start again before the run fails.", 2)
    max_servers: int | None = _help(
        "Ray only: while requests wait, servers are added up to this many; idle ones end.", None
    )
    slurm: dict[str, Any] = _help("Flags of sbatch; container_* go to srun, `wrap` stands before the command.", dict)


# ------------------------------------------------------------------------------------------- experiments


@dataclass
class BaseExperimentConfig(Section):
    """What every run has."""

    experiment_name: str = _help("First part of the run directory's name.")
    trial_name: str = _help("Second part of the run directory's name.")
    allocation_mode: str = _help("Devices and parallelism, such as sglang.d4p1t1+d4p1t1.", "d1")
    controller: bool = _help("Ray only: one driver runs the script, each engine has devices.", False)
    seed: int = _help("Seed of data order and sampling (initial weights: `actor.seed`).", 1)
    total_train_epochs: int = _help("Passes over the training set.", 1, AT_LEAST_1)
    total_train_steps: int | None = _help("Stop after so many steps, if earlier.", None)
    tokenizer_path: str = _help("Tokenizer; empty: the model's.", "")
    train_dataset: DatasetConfig = _help("Training data.", DatasetConfig)
    valid_dataset: DatasetConfig | None = _help("Validation data.", None)
    cluster: ClusterConfig = _help("Machines.", ClusterConfig)
    launcher: LauncherConfig = _help("Processes.", LauncherConfig)
    saver: FreqConfig = _help("When models are written, besides the last.", FreqConfig)
    evaluator: FreqConfig = _help("When the validation set is run.", FreqConfig)
    recover: RecoverConfig = _help("Whether and when recover checkpoints are.", RecoverConfig)
    stats_logger: StatsLoggerConfig = _help("Where statistics go.", StatsLoggerConfig)

    def check(self) -> None:
        super().check()
        _require(
            self.total_train_steps is None or self.total_train_steps >= 1,
            f"total_train_steps={self.total_train_steps} trains nothing: give 1 or more, or leave it out",
        )
        _require(
            self.valid_dataset is not None or not any(vars(self.evaluator).values()),
            "evaluator says when to run the validation set, but there is none: set valid_dataset.path "
            "(any word where the script makes its own rows)",
        )
        size, num_shares = self.train_dataset.batch_size, self.num_shares
        _require(
            size % num_shares == 0,
            f"train_dataset.batch_size={size} is not divisible by the {num_shares} data-parallel ranks of "
            f"allocation_mode={self.allocation_mode}: use a multiple of {num_shares}",
        )
        train = AllocationMode.from_str(self.allocation_mode).train
        for part in vars(self).values():
            if isinstance(part, TrainEngineConfig) and train is not None:
                part.check_tensor_parallel(train.tensor)

    @property
    def num_shares(self) -> int:
        """Into how many parts a training batch is cut: the data-parallel ranks."""
        train = AllocationMode.from_str(self.allocation_mode).train
        return train.data * train.pipeline if train else 1


@dataclass
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning."""

    model: TrainEngineConfig = _help("The trained model.", TrainEngineConfig)


@dataclass
class RWConfig(BaseExperimentConfig):
    """A reward model from chosen and rejected answers."""

    model: TrainEngineConfig = _help("The trained model.", TrainEngineConfig)


@dataclass
class DPOConfig(BaseExperimentConfig):
    """Preference learning without a reward model: DPO and its relatives."""

    model: PreferenceConfig = _help("The trained model.", PreferenceConfig)
    ref: FrozenEngineConfig | None = _help("The reference; null for orpo and simpo.", None)

    def check(self) -> None:
        super().check()
        _require(
            not self.model.needs_reference or self.ref is not None,
            f"model.loss={self.model.loss} compares with a reference policy: set ref.path",
        )
        _require(
            self.model.needs_reference or self.ref is None,
            f"model.loss={self.model.loss} has no reference policy: leave ref out (ref=null)",
        )


@dataclass
class GRPOConfig(BaseExperimentConfig):
    """Reinforcement learning with verifiable rewards (the whole GRPO/PPO family)."""

    gconfig: GenerationHyperparameters = _help("Sampling.", GenerationHyperparameters)
    rollout: InferenceEngineConfig = _help("Asynchronous rollout.", InferenceEngineConfig)
    actor: PPOActorConfig = _help("The trained policy.", PPOActorConfig)
    critic: PPOCriticConfig | None = _help("The value function of algorithm=ppo.", None)
    ref: FrozenEngineConfig | None = _help("The reference policy; null without KL.", None)
    teacher: FrozenEngineConfig | None = _help("The policy to distil from; null without.", None)
    dynamic_sampling: bool = _help("Reject groups whose rewards are all equal (DAPO).", False)
    server: ServerConfig = _help("The embedded server.", ServerConfig)
    sglang: dict[str, Any] = _help("Flags passed to SGLang as they are.", dict)
    vllm: dict[str, Any] = _help("Flags passed to vLLM as they are.", dict)

    def check(self) -> None:
        super().check()
        actor = self.actor
        objective = resolve_objective(actor)
        kl = actor.kl_ctl or actor.kl_loss_coef
        _require(
            not kl or self.ref is not None,
            f"actor.{'kl_ctl' if actor.kl_ctl else 'kl_loss_coef'}={kl} needs a reference policy: set ref.path",
        )
        _require(
            bool(actor.distill_coef) == (self.teacher is not None),
            "distillation needs both: set teacher.path and actor.distill_coef, or neither",
        )
        _require(
            objective.needs_critic == (self.critic is not None),
            "actor.algorithm=ppo needs critic.path"
            if objective.needs_critic
            else f"critic is set, but actor.algorithm={actor.algorithm} has none: leave critic out, or set algorithm=ppo",
        )
        _require(
            self.gconfig.n_samples > 1 or objective.norm.mean_level != "group",
            "gconfig.n_samples=1 makes every group advantage zero: raise it, or set actor.algorithm=reinforce_pp",
        )
        self._check_minibatches()
        self._check_room()
        _require(
            actor.max_answer_length in (None, self.gconfig.max_new_tokens),
            f"actor.max_answer_length={actor.max_answer_length} differs from gconfig.max_new_tokens="
            f"{self.gconfig.max_new_tokens}",
        )
        _require(
            self.gconfig.temperature == 0 or actor.temperature == self.gconfig.temperature,
            f"actor.temperature={actor.temperature} differs from gconfig.temperature={self.gconfig.temperature}: "
            "log-probs of the two sides would not be of the same distribution",
        )

    def _check_room(self) -> None:
        limit = self.server.context_length
        _require(
            limit is None or limit > self.gconfig.max_new_tokens,
            f"server.context_length={limit} leaves no room for a prompt: it must be more than gconfig.max_new_tokens="
            f"{self.gconfig.max_new_tokens}",
        )

    def _check_minibatches(self) -> None:
        ranks, prompts = self.num_shares, self.train_dataset.batch_size
        sequences = prompts * self.gconfig.n_samples // ranks
        for name, part in (("actor", self.actor), ("critic", self.critic)):
            _require(
                part is None or part.ppo_n_minibatches <= sequences,
                f"{name}.ppo_n_minibatches={getattr(part, 'ppo_n_minibatches', 0)} is more than the {sequences} sequences of a rank and "
                f"step (train_dataset.batch_size={prompts} times gconfig.n_samples={self.gconfig.n_samples} over {ranks} data-parallel ranks): "
                "lower it",
            )


@dataclass
class EvalConfig(GRPOConfig):
    """Evaluation without training: the same tree, without what only training demands (greedy, one sample, any temperature)."""

    def check(self) -> None:
        Section.check(self)
        _require(self.valid_dataset is not None, "evaluation needs a dataset: set valid_dataset.path")
        self._check_room()
