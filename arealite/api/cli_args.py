"""The configuration tree: dataclasses with one line of help per field, and what cannot work together.

Scripts load one of the experiment classes at the bottom with `arealite.utils.config.load_config`: YAML files first,
then `key=value` overrides. A configuration does not change after loading. Flags of inference servers are not repeated
here: they pass through the dicts `sglang` and `vllm`. `train_args` configures training engines.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from arealite.api.algorithms import resolve_objective
from arealite.api.alloc_mode import AllocationMode
from arealite.api.config_field import AT_LEAST_1, NOT_NEGATIVE, SHARE, Range, Section
from arealite.api.config_field import choice_field as _choice
from arealite.api.config_field import help_field as _help
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

    def problems(self) -> Iterator[str]:
        for address in self.server_addrs:
            if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):[0-9]{1,5}", address):
                yield f"server_addrs has {address!r}: write host:port, without http://"
            if self.server_addrs.count(address) > 1:
                yield f"server_addrs has {address} more than once"


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

    def problems(self) -> Iterator[str]:
        if self.host not in ("127.0.0.1", "localhost", "::1") and not self.api_key:
            yield f"server.host={self.host} is not loopback: set server.api_key too"


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

    def problems(self) -> Iterator[str]:
        if self.retries and self.mode == "disabled":
            yield f"recover.retries={self.retries} needs a checkpoint to restart from: set recover.mode=auto"


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

    def problems(self) -> Iterator[str]:
        most = self.n_nodes or 1
        if self.min_nodes is not None and not 1 <= self.min_nodes <= most:
            yield f"cluster.min_nodes={self.min_nodes} must be between 1 and cluster.n_nodes={most}"


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

    def problems(self) -> Iterator[str]:
        if self.total_train_steps is not None and self.total_train_steps < 1:
            yield f"total_train_steps={self.total_train_steps} trains nothing: give 1 or more, or leave it out"
        if self.valid_dataset is None and any(vars(self.evaluator).values()):
            yield (
                "evaluator is set, but there is no validation set: set valid_dataset.path "
                "(any word if the script makes its own rows)"
            )
        size, num_shares = self.train_dataset.batch_size, self.num_shares
        if size % num_shares:
            yield (
                f"train_dataset.batch_size={size} is not divisible by the {num_shares} data-parallel ranks of "
                f"allocation_mode={self.allocation_mode}: use a multiple of {num_shares}"
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

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.model.needs_reference and self.ref is None:
            yield f"model.loss={self.model.loss} compares with a reference policy: set ref.path"
        if not self.model.needs_reference and self.ref is not None:
            yield f"model.loss={self.model.loss} has no reference policy: leave ref out (ref=null)"


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

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        actor, gconfig = self.actor, self.gconfig
        objective = resolve_objective(actor)
        kl = actor.kl_ctl or actor.kl_loss_coef
        if kl and self.ref is None:
            key = "kl_ctl" if actor.kl_ctl else "kl_loss_coef"
            yield f"actor.{key}={kl} needs a reference policy: set ref.path"
        if bool(actor.distill_coef) != (self.teacher is not None):
            yield "distillation needs both: set teacher.path and actor.distill_coef, or neither"
        if objective.needs_critic and self.critic is None:
            yield "actor.algorithm=ppo needs critic.path"
        if self.critic is not None and not objective.needs_critic:
            wrong = f"critic is set, but actor.algorithm={actor.algorithm} has none"
            yield f"{wrong}: leave critic out, or set algorithm=ppo"
        if gconfig.n_samples == 1 and objective.norm.mean_level == "group":
            yield "gconfig.n_samples=1 makes every group advantage zero: raise it, or set actor.algorithm=reinforce_pp"
        yield from self._minibatch_problems()
        yield from self._length_problems()
        answer, new = actor.max_answer_length, gconfig.max_new_tokens
        if answer not in (None, new):
            yield f"actor.max_answer_length={answer} differs from gconfig.max_new_tokens={new}"
        if gconfig.temperature not in (0, actor.temperature):
            yield (
                f"actor.temperature={actor.temperature} differs from gconfig.temperature={gconfig.temperature}: "
                "log-probs of the two sides would belong to different distributions"
            )

    def _length_problems(self) -> Iterator[str]:
        limit, new = self.server.context_length, self.gconfig.max_new_tokens
        if limit is not None and limit <= new:
            wrong = f"server.context_length={limit} leaves no room for a prompt"
            yield f"{wrong}: it must be more than gconfig.max_new_tokens={new}"

    def _minibatch_problems(self) -> Iterator[str]:
        ranks, prompts, n_samples = self.num_shares, self.train_dataset.batch_size, self.gconfig.n_samples
        sequences = prompts * n_samples // ranks
        for name, part in (("actor", self.actor), ("critic", self.critic)):
            if part is not None and part.ppo_n_minibatches > sequences:
                yield (
                    f"{name}.ppo_n_minibatches={part.ppo_n_minibatches} is more than the {sequences} sequences of a "
                    f"rank and step (train_dataset.batch_size={prompts} times gconfig.n_samples={n_samples} over "
                    f"{ranks} data-parallel ranks): lower it"
                )


@dataclass
class EvalConfig(GRPOConfig):
    """Evaluation without training: the same keys, without the conditions that only training has."""

    def problems(self) -> Iterator[str]:
        if self.valid_dataset is None:
            yield "evaluation needs a dataset: set valid_dataset.path"
        yield from self._length_problems()
