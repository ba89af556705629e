"""The configuration tree: dataclasses with one line of help per field, and what cannot work together.

Scripts load one of the experiment classes at the bottom with `arealite.utils.config.load_config`: YAML files first,
then `key=value` overrides. A configuration does not change after loading. Flags of inference servers are not repeated
here: they pass through the dicts `sglang` and `vllm`. `generation_args` configures inference, `train_args` training
engines.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from arealite.api.algorithms import resolve_objective
from arealite.api.alloc_mode import AllocationMode
from arealite.api.config_field import AT_LEAST_1, NOT_NEGATIVE, PORT, POSITIVE, SECONDS, SEED, Range, Section
from arealite.api.config_field import choice_field as _choice
from arealite.api.config_field import help_field as _help
from arealite.api.dataset_args import (
    CurriculumConfig,
    DatasetConfig,
    DataSourceConfig,
    MixtureSourceConfig,
    ValidationDatasetConfig,
)
from arealite.api.generation_args import (
    EvalGenerationConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    ServerConfig,
)
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
    "CurriculumConfig", "DataSourceConfig", "DatasetConfig", "EvalGenerationConfig", "FrozenEngineConfig",
    "GenerationHyperparameters", "InferenceEngineConfig", "MixtureSourceConfig", "NormConfig", "OptimizerConfig",
    "PPOActorConfig", "PPOCriticConfig", "PreferenceConfig", "ServerConfig", "TrainEngineConfig",
    "ValidationDatasetConfig",
]  # fmt: skip


@dataclass
class FreqConfig(Section):
    """How often something happens; all null: never, unless the field that uses it says otherwise."""

    freq_epochs: int | None = _help("Every n epochs.", None, NOT_NEGATIVE)
    freq_steps: int | None = _help("Every n steps.", None, NOT_NEGATIVE)
    freq_secs: int | None = _help("Every n seconds.", None, NOT_NEGATIVE)

    @property
    def is_set(self) -> bool:
        """Whether it happens at all."""
        return any((self.freq_epochs, self.freq_steps, self.freq_secs))


@dataclass
class SaverConfig(FreqConfig):
    """When models are saved, besides the last."""

    keep_best: bool = _help("Also keep the model with the best validation result, as checkpoints/best.", True)
    best_metric: str | None = _help(
        "Statistic that decides, such as eval/valid/pass@1 (the lowest, if it is a loss or nll); null: pass@1, "
        "reward or loss of the first validation set.",
        None,
    )


@dataclass
class EvaluatorConfig(FreqConfig):
    """When validation sets are run."""

    at_start_and_end: bool = _help("Also before the first and after the last step, if there is a validation set.", True)


@dataclass
class RecoverConfig(FreqConfig):
    """Recovery after a failure."""

    mode: str = _choice(
        "disabled: always start anew; auto: continue from the recover checkpoint if there is one; resume: require one.",
        "disabled", "auto", "resume",
    )  # fmt: skip
    retries: int = _help("Restarts by the launcher after a failure.", 0, Range(0, 1000))

    def problems(self) -> Iterator[str]:
        if self.retries and self.mode == "disabled":
            yield f"recover.retries={self.retries} needs a checkpoint to restart from: set recover.mode=auto"


# Keys of `stats_logger` that are services; each needs the package of its name.
SERVICES = ("wandb", "swanlab", "trackio")


@dataclass
class StatsLoggerConfig(Section):
    """Outputs of statistics besides stats.jsonl."""

    tensorboard: bool = _help("Also write TensorBoard files.", False)
    wandb: str = _choice(
        "Also log to Weights & Biases, or write its files for `wandb sync`.", "off", "online", "offline"
    )
    swanlab: str = _choice("Also log to SwanLab, or write its files for `swanlab sync`.", "off", "online", "offline")
    trackio: str = _help("Also log with trackio: local, or a Hugging Face Space as user/name.", "off")
    console: bool = _help("Show the live table on the console.", True)

    def problems(self) -> Iterator[str]:
        if not re.fullmatch(r"off|local|[\w.-]+/[\w.-]+", self.trackio):
            yield f"stats_logger.trackio={self.trackio} is none of off, local, or a Hugging Face Space as user/name"


@dataclass
class ClusterConfig(Section):
    """The machines."""

    n_nodes: int | None = _help(
        "Machines; null: one, and on Ray and Slurm as many as allocation_mode needs.", None, Range(1, 100_000)
    )
    min_nodes: int | None = _help(
        "torchrun only: machines may leave and join, down to this many; null: all must stay.", None, AT_LEAST_1
    )
    n_gpus_per_node: int = _help("GPUs (on CPU, processes) of each machine.", 8, Range(1, 1024))
    gpu_memory_gib: float | None = _help(
        "Memory of one GPU, for --dry-run on a machine without them; null: asked from nvidia-smi.", None, POSITIVE
    )
    fileroot: str = _help("Folder of all run directories; shared by all machines.", "runs")

    def problems(self) -> Iterator[str]:
        most = self.n_nodes or 1
        if self.min_nodes is not None and self.min_nodes > most:
            yield f"cluster.min_nodes={self.min_nodes} is more than cluster.n_nodes={most}"


@dataclass
class LauncherConfig(Section):
    """How launchers start and end processes."""

    threads_per_process: int | None = _help(
        "Threads of each process; null: OMP_NUM_THREADS, or an equal share of the cores.", None, Range(0, 4096)
    )
    trainer_port: int = _help("Rendezvous port of the trainer ranks; 0 takes a free one.", 0, PORT)
    stop_timeout_s: float = _help("Grace period between SIGTERM and SIGKILL.", 10.0, SECONDS)
    save_timeout_s: float = _help("Limit for a checkpoint after the first Ctrl+C or SIGTERM.", 600.0, SECONDS)
    server_restarts: int = _help("How often dead servers are restarted before the run fails.", 2, NOT_NEGATIVE)
    max_servers: int | None = _help(
        "Ray only: add servers up to this many while requests wait; idle ones end.", None, Range(0, 100_000)
    )
    slurm: dict[str, Any] = _help(
        "Flags of sbatch; container_* go to srun, `wrap` is put before the command.", dict, secret=True
    )


@dataclass
class BaseExperimentConfig(Section):
    """Settings of every run."""

    experiment_name: str = _help("First part of the run directory's name.")
    trial_name: str = _help("Second part of the run directory's name.")
    allocation_mode: str = _help("Devices and parallelism, such as sglang.d4p1t1+d4p1t1.", "d1")
    controller: bool = _help("Ray only: one driver runs the script, engines run in actors.", False)
    seed: int = _help("Seed of data order and sampling (initial weights: `actor.seed`).", 1, SEED)
    total_train_epochs: int | None = _help(
        "Passes over the training data; null: one, or as many as total_train_steps needs.", None, AT_LEAST_1
    )
    total_train_steps: int | None = _help(
        "Training steps; with total_train_epochs too, the run ends at whichever comes first.", None, AT_LEAST_1
    )
    tokenizer_path: str = _help("Tokenizer; empty: the model's.", "")
    train_dataset: DatasetConfig = _help("Training data.", DatasetConfig)
    train_datasets: dict[str, MixtureSourceConfig] = _help(
        "Several training sets by name, instead of train_dataset.path; train_dataset batches them.", dict
    )
    valid_dataset: ValidationDatasetConfig | None = _help("Validation data; statistics call it `valid`.", None)
    valid_datasets: dict[str, ValidationDatasetConfig] = _help("Several validation sets, by name.", dict)
    reward: str | None = _help("RL: built-in name, folder of a reward model, module:function; null: the task's.", None)
    reward_timeout_s: float | None = _help("Deadline of a reward; null: 15 s, of a coroutine 1800 s.", None, SECONDS)
    workflow: str | None = _help(
        "RL: package.module:Class of your own workflow; null: one answer to each prompt (RLVRWorkflow).", None
    )
    workflow_args: dict[str, Any] = _help("Arguments of the workflow's constructor, by name.", dict, secret=True)
    trainer_class: str | None = _help("Set by trainer.type=package.module:Class of arealite.cli.main.", None)
    cluster: ClusterConfig = _help("Machines.", ClusterConfig)
    launcher: LauncherConfig = _help("Processes.", LauncherConfig)
    saver: SaverConfig = _help("When models are saved, besides the last.", SaverConfig)
    evaluator: EvaluatorConfig = _help("When validation sets are run.", EvaluatorConfig)
    recover: RecoverConfig = _help("Whether and when recover checkpoints are written.", RecoverConfig)
    on_collapse: str = _choice(
        "What a collapse alarm does besides its message: stop ends the run with exit code 3, rollback goes back to the "
        "last good recover checkpoint with half the learning rate.",
        "warn", "stop", "rollback",
    )  # fmt: skip
    stats_logger: StatsLoggerConfig = _help("Outputs of statistics.", StatsLoggerConfig)
    record: int = _help(
        "MiB of disk for the record that `arealite replay` reads; the oldest steps make room. 0: no record.",
        256,
        NOT_NEGATIVE,
    )
    dashboard: bool | int = _help(
        "Show the run in a browser while it goes on: true, or the port to listen on (0: a free one).", False, PORT
    )

    def problems(self) -> Iterator[str]:
        yield from self._data_problems()
        if not self.validation_sets and self.evaluator.is_set:
            yield (
                "evaluator is set, but there is no validation set: set valid_dataset.path "
                "(any word if the script makes its own rows)"
            )
        if self.on_collapse == "rollback" and (self.recover.mode == "disabled" or not self.recover.is_set):
            yield "on_collapse=rollback goes back to a recover checkpoint: set recover.mode=auto recover.freq_steps=20"
        size, num_shares = self.train_dataset.batch_size, self.num_shares
        if size % num_shares:
            yield (
                f"train_dataset.batch_size={size} is not divisible by the {num_shares} data-parallel ranks of "
                f"allocation_mode={self.allocation_mode}: use a multiple of {num_shares}"
            )
        train = AllocationMode.from_str(self.allocation_mode).train
        for part in vars(self).values():
            if isinstance(part, TrainEngineConfig) and train is not None:
                part.check_parallel(train)

    def _data_problems(self) -> Iterator[str]:
        if self.train_datasets and self.train_dataset.path:
            yield f"train_datasets is set, and train_dataset.path={self.train_dataset.path} too: set only one"
        if not self.train_datasets and not self.train_dataset.path:
            yield "train_dataset.path is missing: set it in a file or as train_dataset.path=…"
        if len({source.weight is None for source in self.train_datasets.values()}) > 1:
            yield "some of train_datasets have a weight and others none: set it for all or for none"
        if self.train_dataset.curriculum is not None and not isinstance(self, GRPOConfig):
            yield "train_dataset.curriculum needs rewards: it is for reinforcement learning only"
        sets = (self.train_dataset, *self.train_datasets.values(), *self.validation_sets.values())
        if any(data.few_shot for data in sets) and not isinstance(self, GRPOConfig):
            yield "few_shot is for prompts that a model answers, not for supervised training: leave it out"
        yield from self._named_set_problems("train_datasets", self.train_datasets)
        yield from self._validation_problems()

    def _named_set_problems(self, key: str, sets: Mapping[str, DataSourceConfig]) -> Iterator[str]:
        for name, data in sets.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                yield f"{key} has {name!r}, which becomes a file name: use letters, digits, '.', '_' and '-'"
            if not data.path:
                yield f"{key}.{name}.path is missing: set it in a file or as {key}.{name}.path=…"

    def _validation_problems(self) -> Iterator[str]:
        yield from self._named_set_problems("valid_datasets", self.valid_datasets)
        if self.valid_dataset is not None and not self.valid_dataset.path:
            yield "valid_dataset.path is missing: set it in a file or as valid_dataset.path=…"
        for name in self.valid_datasets:
            if name == "valid" and self.valid_dataset is not None:
                yield "valid_dataset is the set `valid`, and valid_datasets has another one: rename that"

    @property
    def validation_sets(self) -> dict[str, ValidationDatasetConfig]:
        """All validation sets by name."""
        single = {} if self.valid_dataset is None else {"valid": self.valid_dataset}
        return {**single, **self.valid_datasets}

    @property
    def num_shares(self) -> int:
        """Number of data-parallel ranks, which share a training batch."""
        train = AllocationMode.from_str(self.allocation_mode).train
        return train.data if train else 1


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
    ref: FrozenEngineConfig | None = _help("The reference; null: the model before training; orpo, simpo: none.", None)

    def __post_init__(self) -> None:
        if self.ref is None and self.model.needs_reference:
            self.ref = FrozenEngineConfig.start_of(self.model)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.model.needs_reference and self.ref is not None:
            yield f"model.loss={self.model.loss} has no reference policy: leave ref out (ref=null)"
        if self.model.loss == "kto" and (size := self.train_dataset.batch_size) < 2 * self.num_shares:
            wrong = f"train_dataset.batch_size={size} is one row for each data-parallel rank"
            yield f"{wrong}, and model.loss=kto compares rows: set it to {2 * size} or more"


@dataclass
class GRPOConfig(BaseExperimentConfig):
    """Reinforcement learning with verifiable rewards (the whole GRPO/PPO family)."""

    gconfig: GenerationHyperparameters = _help("Sampling of training.", GenerationHyperparameters)
    eval_gconfig: EvalGenerationConfig = _help("Sampling of evaluations.", EvalGenerationConfig)
    rollout: InferenceEngineConfig = _help("Asynchronous rollout.", InferenceEngineConfig)
    actor: PPOActorConfig = _help("The trained policy.", PPOActorConfig)
    critic: PPOCriticConfig | None = _help("The value function of algorithm=ppo.", None)
    ref: FrozenEngineConfig | None = _help("The reference policy; null: with KL, the actor before training.", None)
    teacher: FrozenEngineConfig | None = _help("The policy to distil from; null without distillation.", None)
    dynamic_sampling: bool = _help("Reject groups whose rewards are all equal (DAPO).", False)
    server: ServerConfig = _help("The embedded server.", ServerConfig)
    sglang: dict[str, Any] = _help("Flags passed to SGLang as they are.", dict, secret=True)
    vllm: dict[str, Any] = _help("Flags passed to vLLM as they are.", dict, secret=True)

    def __post_init__(self) -> None:
        if self.ref is None and (self.actor.kl_ctl or self.actor.kl_loss_coef):
            self.ref = FrozenEngineConfig.start_of(self.actor)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        actor, gconfig = self.actor, self.gconfig
        objective = resolve_objective(actor)
        if bool(actor.distill_coef) != (self.teacher is not None):
            yield "distillation needs both: set teacher.path and actor.distill_coef, or neither"
        if objective.needs_critic and self.critic is None:
            yield "actor.algorithm=ppo needs critic.path"
        if self.critic is not None and not objective.needs_critic:
            wrong = f"critic is set, but actor.algorithm={actor.algorithm} has none"
            yield f"{wrong}: leave critic out, or set algorithm=ppo"
        if gconfig.n_samples == 1 and objective.norm.mean_level == "group":
            yield "gconfig.n_samples=1 makes every group advantage zero: raise it, or set actor.algorithm=reinforce_pp"
        elif gconfig.n_samples == 1 and self.dynamic_sampling:
            yield "dynamic_sampling rejects every group of one answer: raise gconfig.n_samples, or set it to false"
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
        cannot_merge = self.server.weight_dtype == "fp8" and actor.sends_adapters
        if cannot_merge and self.rollout.weight_update in ("auto", "disk"):
            yield (
                f"rollout.weight_update={self.rollout.weight_update} sends adapters alone, and "
                "server.weight_dtype=fp8 cannot merge them: set rollout.weight_update=shm, which sends merged weights"
            )

    def _length_problems(self) -> Iterator[str]:
        limit, lengths = self.server.context_length, {"gconfig": self.gconfig.max_new_tokens}
        if self.validation_sets:
            lengths["eval_gconfig"] = self.evaluation_gconfig.max_new_tokens
        for name, new in lengths.items():
            if limit is not None and limit <= new:
                wrong = f"server.context_length={limit} leaves no room for a prompt"
                yield f"{wrong}: it must be more than {name}.max_new_tokens={new}"

    @property
    def evaluation_gconfig(self) -> GenerationHyperparameters:
        """Sampling of evaluations: `gconfig` with what `eval_gconfig` sets."""
        return self.eval_gconfig.apply(self.gconfig)

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

    version: int = _help("Weight version of the evaluated model: the steps that it was trained.", 0, NOT_NEGATIVE)
    results_dir: str = _help("Run directory that gets statistics and answers; empty: the evaluation's own.", "")
    adapter: str = _help("PEFT folder of a LoRA adapter that servers apply to actor.path.", "")

    def __post_init__(self) -> None:
        """An evaluation needs no reference policy."""

    def problems(self) -> Iterator[str]:
        yield from self._validation_problems()
        if not self.validation_sets:
            yield "evaluation needs a dataset: set valid_dataset.path"
        yield from self._length_problems()
