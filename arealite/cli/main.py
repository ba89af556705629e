"""Train or evaluate from a config alone.

    python -m arealite.cli.main trainer.type=grpo trainer.grpo.actor.path=Qwen/Qwen2-0.5B
    python -m arealite.cli.main trainer.type=null valid_dataset.path=…/gsm8k/test.jsonl        (evaluate)
    python -m arealite.cli.main mode=ray allocation_mode=sglang.d16p1m1+d32p2m1 trainer.type=grpo

Turns the tree below into the flat config that scripts use, and hands the matching loop of `arealite/trainer/` to the
launcher that `mode` names. Run `--help` for all keys; `--dry-run` prints what would be started where.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import tempfile
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import (
    BaseExperimentConfig,
    DatasetConfig,
    DPOConfig,
    EvalConfig,
    FreqConfig,
    GenerationHyperparameters,
    GRPOConfig,
    PPOActorConfig,
    PreferenceConfig,
    RWConfig,
    SFTConfig,
    TrainEngineConfig,
)
from arealite.api.config_field import help_field
from arealite.api.errors import ConfigError
from arealite.trainer import dpo, evaluate, ppo, rw, sft
from arealite.trainer.tasks import find_task
from arealite.utils.config import load_config, run_main, to_yaml
from arealite.utils.rundir import RunDir

# What `trainer.type` and `mode` may name: a loop and its config.
TRAINERS = {
    "grpo": (ppo, GRPOConfig),
    "sft": (sft, SFTConfig),
    "rw": (rw, RWConfig),
    "dpo": (dpo, DPOConfig),
    None: (evaluate, EvalConfig),
}
MODES = ("local", "torchrun", "ray", "slurm")
DEFAULT_MODEL = "Qwen/Qwen2-0.5B"


def _own_fields(config_class: type, **defaults: Callable[[], Any]) -> Any:
    """A dataclass of what `config_class` has beyond every run's fields, for `trainer.<type>`."""
    common = {f.name for f in dataclasses.fields(BaseExperimentConfig)}
    types = typing.get_type_hints(config_class)
    own = {f.name: f for f in dataclasses.fields(config_class) if f.name not in common}
    own |= {k: help_field(own[k].metadata["help"], default) for k, default in defaults.items()}
    fields = [(name, types[name], each) for name, each in own.items()]
    return dataclasses.make_dataclass(config_class.__name__, fields)


GRPOTree = _own_fields(
    GRPOConfig, actor=lambda: PPOActorConfig(path=DEFAULT_MODEL), gconfig=lambda: GenerationHyperparameters(n_samples=4)
)
SFTTree = _own_fields(SFTConfig, model=lambda: TrainEngineConfig(path=DEFAULT_MODEL))
RWTree = _own_fields(RWConfig, model=lambda: TrainEngineConfig(path=DEFAULT_MODEL))
DPOTree = _own_fields(DPOConfig, model=lambda: PreferenceConfig(path=DEFAULT_MODEL))


def _default_dataset() -> DatasetConfig:
    return DatasetConfig(path="openai/gsm8k", name="main", split="train", batch_size=256)


@dataclass
class TrainerTree:
    """trainer: which loop, and its own settings."""

    type: str | None = help_field("grpo, sft, rw, dpo, or null to evaluate only.", "grpo")
    grpo: GRPOTree = help_field("Reinforcement learning: the whole GRPO/PPO family.", GRPOTree)
    sft: SFTTree = help_field("Supervised fine-tuning.", SFTTree)
    rw: RWTree = help_field("Reward model.", RWTree)
    dpo: DPOTree = help_field("Preference learning.", DPOTree)


@dataclass
class MainConfig(BaseExperimentConfig):
    """The tree of this command line."""

    experiment_name: str = help_field("First part of the run directory's name.", "arealite")
    trial_name: str = help_field("Second part; by default trainer.type, or eval.", "")
    mode: str = help_field("Launcher: local, torchrun, ray or slurm.", "local")
    allocation_mode: str = help_field(
        "Devices and parallelism; by default one trainer, and one embedded server where one is needed.", ""
    )
    train_dataset: DatasetConfig = help_field("Training data.", _default_dataset)
    saver: FreqConfig = help_field("When models are written, besides the last.", lambda: FreqConfig(freq_epochs=1))
    trainer: TrainerTree = help_field("Which loop, and its settings.", TrainerTree)

    def check(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}; use one of {', '.join(MODES)}")
        if self.trainer.type not in TRAINERS:
            known = ", ".join(str(name or "null") for name in TRAINERS)
            raise ConfigError(f"trainer.type is {self.trainer.type!r}; use one of {known}")
        if self.trainer.type is None and self.valid_dataset is None:
            raise ConfigError("evaluation needs a dataset: set valid_dataset.path")
        if self.allocation_mode:
            AllocationMode.from_str(self.allocation_mode)


def flatten(config: MainConfig) -> BaseExperimentConfig:
    """The config of the script that will run: common keys, and those of the chosen trainer."""
    _, script_config = TRAINERS[config.trainer.type]
    tree = getattr(config.trainer, config.trainer.type or "grpo")
    common = {f.name: getattr(config, f.name) for f in dataclasses.fields(BaseExperimentConfig)}
    common["trial_name"] = config.trial_name or config.trainer.type or "eval"
    alone = "embedded.d1p1t1+d1p1t1" if issubclass(script_config, GRPOConfig) else "d1"
    common["allocation_mode"] = config.allocation_mode or alone
    flat = script_config(**common, **vars(tree))
    flat.check()
    return flat


def _written(flat: BaseExperimentConfig, folder: Path) -> Path:
    """The file that ranks read, named by its content: config.yaml is written by the launcher once no other run goes on there."""
    text = to_yaml(flat)
    path = folder / f"config-{hashlib.sha256(text.encode()).hexdigest()[:12]}.yaml"
    aside = path.with_suffix(f".{os.getpid()}")  # a rank may be reading it
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside.write_text(text)
        aside.replace(path)
    except OSError as error:
        raise RunDir(folder).unwritable(error) from error
    return path


def main(argv: list[str]) -> int:
    dry_run = "--dry-run" in argv
    config = load_config([argument for argument in argv if argument != "--dry-run"], MainConfig)
    loop, _ = TRAINERS[config.trainer.type]
    flat = flatten(config)
    if loop in (ppo, sft, evaluate) and not dry_run:  # the others read pairs of any origin
        for dataset in (flat.train_dataset if config.trainer.type else None, flat.valid_dataset):
            if dataset is not None:
                find_task(dataset)  # refused now, not when the servers are up
    with tempfile.TemporaryDirectory() as nowhere:
        path = _written(flat, Path(nowhere) if dry_run else RunDir(flat).path)
        # One launcher is imported, not all: Ray and Slurm are optional.
        launcher = importlib.import_module(f"arealite.launcher.{config.mode}")
        return launcher.launch(Path(loop.__file__), ["--config", str(path)], dry_run)


if __name__ == "__main__":
    run_main(main)
