"""The configuration tree: dataclasses with one line of help per field, and `check()` methods.

Scripts load one of the experiment classes at the bottom with `arealite.utils.config.load_config`: YAML files first,
then `key=value` overrides. A configuration does not change after loading. Flags of inference servers are not repeated
here: they pass through the dicts `sglang` and `vllm`. `train_args` configures training engines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

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

# Re-exported, so that scripts import all configuration classes from here.
__all__ = [
    "FrozenEngineConfig", "NormConfig", "OptimizerConfig", "PPOActorConfig", "PPOCriticConfig", "PreferenceConfig",
    "TrainEngineConfig",
]  # fmt: skip


@dataclass
class GenerationHyperparameters(Section):
    """Sampling parameters of one request."""

    n_samples: int = _help("Samples per prompt (the group size of GRPO).", 1, AT_LEAST_1)
    max_new_tokens: int = _help("Longest continuation, in tokens.", 512, AT_LEAST_1)
    min_new_tokens: int = _help("No stop token is sampled before this many tokens.", 0)
    temperature: float = _help("Sampling temperature; 0 is greedy.", 1.0, NOT_NEGATIVE)
    top_p: float = _help("Sample from the smallest set of tokens with this probability.", 1.0, Range(0, 1, True))
    top_k: int = _help("Sample from the k most likely tokens; 0: from all.", 0, NOT_NEGATIVE)
    min_p: float = _help("Drop tokens less likely than this share of the likeliest.", 0.0, SHARE)
    stop_token_ids: list[int] = _help("Extra token ids that end a continuation.", list)
    stop: list[str] = _help("Strings that end a continuation.", list, any_text=True)
    ignore_eos: bool = _help("Go on after the end-of-text token.", False)
    frequency_penalty: float = _help("Subtracted per earlier occurrence of a token.", 0.0)
    presence_penalty: float = _help("Subtracted once a token has occurred.", 0.0)
    repetition_penalty: float = _help("Divides (negative: multiplies) logits of seen tokens.", 1.0)


@dataclass
class InferenceEngineConfig(Section):
    """Asynchronous rollout: the client of the inference servers."""

    max_concurrent_rollouts: int | None = _help(
        "Most episodes in flight; null: one batch per allowed version.", None, AT_LEAST_1
    )
    max_head_offpolicyness: int = _help(
        "Largest staleness of a trained sample, in versions (eta); 0 is synchronous.", 0, NOT_NEGATIVE
    )
    adaptive_lead: bool = _help("Limit the lead to what keeps the trainer busy.", True)
    num_workers: int = _help("Rollout workers (processes that run episodes); 0: run them in the trainer's process.", 0)
    pause_mode: str = _choice("What a weight update does to open requests.", "abort", "in_place")
    server_addrs: list[str] = _help("Servers that already run, as [host:port, ...]; then launchers start none.", list)
    weight_update: str = _choice(
        "How weights reach the servers; auto: shm if all servers can read it, else disk.",
        *("auto", "disk", "shm", "broadcast"),
    )
    setup_timeout_s: float = _help("Deadline for servers to pass their health check.", 300.0)
    request_timeout_s: float = _help("Deadline of one generation request.", 3600.0)
    request_retries: int = _help("Attempts at one request before its episode fails.", 3)
    health_timeout_s: float = _help(
        "A server without an answer for so long is evicted; its requests continue elsewhere.", 30.0
    )
    segment_tokens: int = _help("Tokens requested at a time: a killed server loses at most so many of an answer.", 4096)
    episode_timeout_s: float = _help("Deadline of one episode; after it the episode has failed.", 7200.0)
    batch_timeout_s: float = _help("Deadline of one prepare_batch.", 7200.0)
    max_failed_episodes: int = _help("Stop the run after this many failed episodes in a row.", 64)
    dump_rollouts: bool = _help("Keep finished episodes as text in run.sqlite.", True)

    def check(self) -> None:
        super().check()
        for address in self.server_addrs:
            _require(
                re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):[0-9]{1,5}", address),
                f"server_addrs has {address!r}: write host:port, without http://",
            )
        repeated = {a for a in self.server_addrs if self.server_addrs.count(a) > 1}
        _require(not repeated, f"server_addrs has {', '.join(sorted(repeated))} more than once")


@dataclass
class ServerConfig(Section):
    """The embedded inference server."""

    model_path: str = _help("Hugging Face folder or hub name of the model.", "")
    dtype: str = _help("float32, bfloat16, float16; auto: bfloat16 on CUDA, else float32.", "auto")
    device: str = _help("cpu, cuda, or auto (cuda if there is one).", "auto")
    tensor_parallel: int = _help("Devices (on CPU, processes) of one model.", 1, AT_LEAST_1)
    host: str = _help("Address to listen on; anything but loopback needs `api_key`.", "127.0.0.1")
    port: int = _help("Port to listen on; 0 takes a free one.", 0, Range(0, 65535))
    api_key: str | None = _help("Bearer token that requests must carry.", None)
    max_running_requests: int = _help("Sequences decoded at once.", 256, AT_LEAST_1)
    max_total_tokens: int | None = _help("KV cache size in tokens; null: what fits.", None)
    context_length: int | None = _help("Longest prompt plus continuation, in tokens; null: the model's.", None)
    block_size: int = _help("Tokens per KV cache block.", 16, AT_LEAST_1)
    max_prefill_tokens: int = _help("Prompt tokens processed in one step.", 4096, AT_LEAST_1)
    mem_fraction: float = _help(
        "Share of free memory for the KV cache; halved if a trainer shares the GPU.", 0.8, Range(0, 1, True)
    )
    deterministic: bool = _help("The same seed gives the same tokens in any batch (slower).", False)
    seed: int = _help("Seed of requests that have none.", 0)
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
    name: str | None = _help("Configuration of a hub dataset, such as `main` of gsm8k.", None)
    split: str | None = _help("Split of a hub dataset or local folder; default: by role (train, test).", None)
    batch_size: int = _help("Rows per step, over all ranks.", 8, AT_LEAST_1)
    shuffle: bool = _help("Shuffle in each epoch, by the seed.", True)
    max_length: int | None = _help("Leave out rows with more tokens.", None)

    # Which split is read if `split` is not set.
    is_validation: ClassVar[bool] = False


@dataclass
class ValidationDatasetConfig(DatasetConfig):
    """A dataset that is evaluated on."""

    is_validation: ClassVar[bool] = True


@dataclass
class FreqConfig(Section):
    """How often something happens; all null: never, unless the field that uses it says otherwise."""

    freq_epochs: int | None = _help("Every n epochs.", None)
    freq_steps: int | None = _help("Every n steps.", None)
    freq_secs: int | None = _help("Every n seconds.", None)


@dataclass
class RecoverConfig(FreqConfig):
    """Recovery after a failure."""

    mode: str = _choice(
        "auto: recover if there is a checkpoint; resume: require one.",
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
    """Outputs of statistics besides stats.jsonl."""

    tensorboard: bool = _help("Also write TensorBoard files.", False)
    console: bool = _help("Show the live table on the console.", True)


@dataclass
class ClusterConfig(Section):
    """The machines."""

    n_nodes: int | None = _help(
        "Machines; null: one, and on Ray and Slurm as many as allocation_mode needs.", None, AT_LEAST_1
    )
    min_nodes: int | None = _help(
        "torchrun only: machines may leave and join, down to this many; null: all must stay.", None
    )
    n_gpus_per_node: int = _help("GPUs (on CPU, processes) of each machine.", 8, AT_LEAST_1)
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
    """How launchers start and end processes."""

    threads_per_process: int | None = _help(
        "Threads of each process; null: OMP_NUM_THREADS, or an equal share of the cores.", None
    )
    trainer_port: int = _help("Rendezvous port of the trainer ranks; 0 takes a free one.", 0)
    stop_timeout_s: float = _help("Grace period between SIGTERM and SIGKILL.", 10.0)
    server_restarts: int = _help("How often dead servers are restarted before the run fails.", 2)
    max_servers: int | None = _help("Ray only: add servers up to this many while requests wait; idle ones end.", None)
    slurm: dict[str, Any] = _help("Flags of sbatch; container_* go to srun, `wrap` is put before the command.", dict)


@dataclass
class BaseExperimentConfig(Section):
    """Settings of every run."""

    experiment_name: str = _help("First part of the run directory's name.")
    trial_name: str = _help("Second part of the run directory's name.")
    allocation_mode: str = _help("Devices and parallelism, such as sglang.d4p1t1+d4p1t1.", "d1")
    controller: bool = _help("Ray only: one driver runs the script, engines run in actors.", False)
    seed: int = _help("Seed of data order and sampling (initial weights: `actor.seed`).", 1)
    total_train_epochs: int = _help("Passes over the training data.", 1, AT_LEAST_1)
    total_train_steps: int | None = _help("Stop after n steps, if that is earlier.", None)
    tokenizer_path: str = _help("Tokenizer; empty: the model's.", "")
    train_dataset: DatasetConfig = _help("Training data.", DatasetConfig)
    valid_dataset: ValidationDatasetConfig | None = _help("Validation data.", None)
    cluster: ClusterConfig = _help("Machines.", ClusterConfig)
    launcher: LauncherConfig = _help("Processes.", LauncherConfig)
    saver: FreqConfig = _help("When models are saved, besides the last.", FreqConfig)
    evaluator: FreqConfig = _help("When the validation set is run.", FreqConfig)
    recover: RecoverConfig = _help("Whether and when recover checkpoints are written.", RecoverConfig)
    stats_logger: StatsLoggerConfig = _help("Outputs of statistics.", StatsLoggerConfig)

    def check(self) -> None:
        super().check()
        _require(
            self.total_train_steps is None or self.total_train_steps >= 1,
            f"total_train_steps={self.total_train_steps} trains nothing: give 1 or more, or leave it out",
        )
        _require(
            self.valid_dataset is not None or not any(vars(self.evaluator).values()),
            "evaluator is set, but there is no validation set: set valid_dataset.path "
            "(any word if the script makes its own rows)",
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
        """Number of data-parallel ranks, which share a training batch."""
        train = AllocationMode.from_str(self.allocation_mode).train
        return train.data * train.pipeline if train else 1


@dataclass
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning."""

    model: TrainEngineConfig = _help("The trained model.", TrainEngineConfig)


@dataclass
class RWConfig(BaseExperimentConfig):
    """Reward model training from chosen and rejected answers."""

    model: TrainEngineConfig = _help("The trained model.", TrainEngineConfig)


@dataclass
class DPOConfig(BaseExperimentConfig):
    """Preference learning without a reward model (DPO family)."""

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
    teacher: FrozenEngineConfig | None = _help("The policy to distil from; null without distillation.", None)
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
            else f"critic is set, but actor.algorithm={actor.algorithm} has none: "
            "leave critic out, or set algorithm=ppo",
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
            "log-probs of the two sides would belong to different distributions",
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
                f"{name}.ppo_n_minibatches={getattr(part, 'ppo_n_minibatches', 0)} is more than the {sequences} "
                f"sequences of a rank and step (train_dataset.batch_size={prompts} times "
                f"gconfig.n_samples={self.gconfig.n_samples} over {ranks} data-parallel ranks): lower it",
            )


@dataclass
class EvalConfig(GRPOConfig):
    """Evaluation without training: the same keys, without the conditions that only training has."""

    def check(self) -> None:
        Section.check(self)
        _require(self.valid_dataset is not None, "evaluation needs a dataset: set valid_dataset.path")
        self._check_room()
