"""Train or evaluate from a config alone.

    python -m arealite.cli.main trainer.type=grpo trainer.grpo.actor.path=Qwen/Qwen2-0.5B
    python -m arealite.cli.main trainer.type=null valid_dataset.path=...        (evaluate)
    python -m arealite.cli.main mode=ray allocation_mode=sglang.d16p1m1+d32p2m1 trainer.type=grpo

Turns the tree below into the flat config that scripts use, and hands the matching loop of `arealite/trainer/` to the
launcher that `mode` names. Run `--help` for all keys.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import (
    BaseExperimentConfig,
    DatasetConfig,
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    PPOActorConfig,
    ServerConfig,
    SFTConfig,
    TrainEngineConfig,
)
from arealite.api.errors import ConfigError
from arealite.trainer import evaluate, ppo, sft
from arealite.utils.config import load_config, run_main, to_yaml
from arealite.utils.rundir import RunDir

# What `trainer.type` and `mode` may name.
TRAINERS = {"grpo": (ppo, GRPOConfig), "sft": (sft, SFTConfig), None: (evaluate, GRPOConfig)}
MODES = ("local", "torchrun", "ray", "slurm")


def _field(text: str, default: Any) -> Any:
    if callable(default):
        return field(default_factory=default, metadata={"help": text})
    return field(default=default, metadata={"help": text})


def _default_actor() -> PPOActorConfig:
    return PPOActorConfig(path="Qwen/Qwen2-0.5B")


def _default_dataset() -> DatasetConfig:
    return DatasetConfig(path="openai/gsm8k", name="main", split="train")


@dataclass
class GRPOTree:
    """trainer.grpo: what only reinforcement learning needs."""

    gconfig: GenerationHyperparameters = _field(
        "Sampling.", lambda: GenerationHyperparameters(n_samples=4)
    )
    rollout: InferenceEngineConfig = _field("Asynchronous rollout.", InferenceEngineConfig)
    actor: PPOActorConfig = _field("The trained policy.", _default_actor)
    ref: TrainEngineConfig | None = _field("The reference policy; null without KL.", None)
    server: ServerConfig = _field("The embedded server.", ServerConfig)
    sglang: dict[str, Any] = _field("Flags passed to SGLang as they are.", dict)
    vllm: dict[str, Any] = _field("Flags passed to vLLM as they are.", dict)


@dataclass
class SFTTree:
    """trainer.sft: what only supervised training needs."""

    model: TrainEngineConfig = _field(
        "The trained model.", lambda: TrainEngineConfig(path="Qwen/Qwen2-0.5B")
    )


@dataclass
class TrainerTree:
    """trainer: which loop, and its own settings."""

    type: str | None = _field("grpo, sft, or null to evaluate without training.", "grpo")
    grpo: GRPOTree = _field("Reinforcement learning.", GRPOTree)
    sft: SFTTree = _field("Supervised fine-tuning.", SFTTree)


@dataclass
class MainConfig(BaseExperimentConfig):
    """The tree of this command line."""

    experiment_name: str = _field("First part of the run directory's name.", "arealite")
    trial_name: str = _field("Second part of the run directory's name.", "trial")
    mode: str = _field("Launcher: local, torchrun, ray or slurm.", "local")
    allocation_mode: str = _field("Devices and parallelism.", "embedded.d1p1t1+d1p1t1")
    train_dataset: DatasetConfig = _field("Training data.", _default_dataset)
    trainer: TrainerTree = _field("Which loop, and its settings.", TrainerTree)

    def check(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}; use one of {', '.join(MODES)}")
        if self.trainer.type not in TRAINERS:
            known = ", ".join(str(name or "null") for name in TRAINERS)
            raise ConfigError(f"trainer.type is {self.trainer.type!r}; use one of {known}")
        AllocationMode.from_str(self.allocation_mode)


def flatten(config: MainConfig) -> BaseExperimentConfig:
    """The config of the script that will run: common keys, and those of the chosen trainer."""
    _, script_config = TRAINERS[config.trainer.type]
    tree = config.trainer.sft if config.trainer.type == "sft" else config.trainer.grpo
    common = {f.name: getattr(config, f.name) for f in dataclasses.fields(BaseExperimentConfig)}
    flat = script_config(**common, **vars(tree))
    flat.check()
    return flat


def main(argv: list[str]) -> int:
    config = load_config(argv, MainConfig)
    loop, _ = TRAINERS[config.trainer.type]
    flat = flatten(config)
    path = RunDir(flat).config_path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_yaml(flat))
    # One launcher is imported, not all: Ray and Slurm are optional.
    launcher = importlib.import_module(f"arealite.launcher.{config.mode}")
    return launcher.launch(Path(loop.__file__), ["--config", str(path)])


if __name__ == "__main__":
    run_main(main)
