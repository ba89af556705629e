"""`EasyTrainer`: what the trainers of a script or notebook have in common.

The constructor checks everything and starts nothing. `train` makes a run directory, starts the servers in a child
process, and runs the trainer of `arealite.trainer` in this process, so that functions and closures of the caller work.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.dataset import load_tokenizer
from arealite.easy.data import Row, read_data, read_eval_data
from arealite.easy.options import Given, fit_to_rows, make_config
from arealite.easy.process import borrowed_process, check_process, only_run, variables
from arealite.easy.servers import ServersBeside
from arealite.launcher.checks import check_job
from arealite.launcher.job import Job
from arealite.launcher.launch_config import launch_config_of
from arealite.launcher.placement import local_slots
from arealite.trainer.stats_logger import read_stats
from arealite.utils.decoders import check_head
from arealite.utils.model_config import check_model
from arealite.utils.process import RESUME_ENV
from arealite.utils.rundir import RunDir, make_new_folder, run_path

logger = logging.getLogger("arealite.easy")


@dataclass(frozen=True)
class TrainResult:
    """What a run has made: `path` is the trained model, a Hugging Face folder with its tokenizer."""

    path: Path
    run_dir: Path
    # Statistics of each step; step -1 is an evaluation before the first one.
    history: list[dict[str, Any]]
    has_scalar_head: bool = False

    @cached_property
    def model(self) -> PreTrainedModel:
        """The trained model, loaded at the first use."""
        if self.has_scalar_head:
            # An adapter does not say how many outputs there are.
            return AutoModelForSequenceClassification.from_pretrained(self.path, num_labels=1)
        return AutoModelForCausalLM.from_pretrained(self.path)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""
        return AutoTokenizer.from_pretrained(self.path)

    def __repr__(self) -> str:
        rewards = [step["reward"] for step in self.history if step.get("reward") is not None]
        reward = f", reward {rewards[0]:.3f} -> {rewards[-1]:.3f}" if rewards else ""
        # An evaluation has a line of its own, which belongs to a step or is before the first one.
        steps = len({step["step"] for step in self.history if step["step"] >= 0})
        return f"TrainResult(path={str(self.path)!r}, {steps} steps{reward})"


class EasyTrainer(abc.ABC):
    """Model, data and configuration of one kind of training."""

    config_class: ClassVar[type[BaseExperimentConfig]]
    # The section of the configuration with the trained model.
    section: ClassVar[str] = "model"
    has_scalar_head: ClassVar[bool] = False

    def __init__(
        self,
        model: str | Path | PreTrainedModel | None,
        train_dataset: Any,
        eval_dataset: Any,
        processing_class: Any,
        given: Given,
    ):
        check_process()
        for text in given.warnings:
            warnings.warn(text, stacklevel=3)
        self.given = given
        if model is None:
            model = given.get(f"{self.section}.path")
        self._model = _check_trained_model(model, self.has_scalar_head)
        if train_dataset is None:
            train_dataset = given.get("train_dataset.path")
        if train_dataset is None and given.get("train_datasets"):
            raise ConfigError(
                "train_datasets is not read here: pass the rows of all sets as train_dataset, or use `arealite train`"
            )
        if train_dataset is None:
            raise ConfigError("there is no train_dataset: give a list of dicts, a datasets.Dataset, a path or a name")
        if processing_class is not None and not hasattr(processing_class, "apply_chat_template"):
            raise ConfigError(
                f"processing_class is {type(processing_class).__name__}: give a tokenizer object, or a folder or hub "
                "name as tokenizer_path"
            )
        data, sets = read_data(train_dataset, "train_dataset"), read_eval_data(eval_dataset)
        self.config = make_config(self.config_class, given, self._model_name(), _data_keys(data, sets))
        self.tokenizer: PreTrainedTokenizerBase = processing_class or load_tokenizer(
            self.config.tokenizer_path or self._model_name()
        )
        self.rows = self.load(data, self.config.train_dataset)
        names = self.config.validation_sets
        self.valid_rows = {name: self.load(sets.get(name, own.path), own) for name, own in names.items()}
        self.config = fit_to_rows(self.config, given, len(self.rows))
        self.result: TrainResult | None = None

    @abc.abstractmethod
    def load(self, data: list[Row] | str, config: Any) -> Any:
        """Return the rows of a dataset in the form that the trainer reads."""

    @abc.abstractmethod
    def run(self, config: Any, resume_from_checkpoint: str | bool | None) -> int:
        """Train with servers that are starting; returns the number of steps."""

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainResult:
        """Train to the end and return the trained model with its history. Every call is a new run.

        `resume_from_checkpoint`: True continues the newest recover checkpoint of the run that `trial_name` names; a
        path continues that recover checkpoint.
        """
        check_process()
        with only_run():
            return self._train(resume_from_checkpoint)

    def _train(self, resume_from_checkpoint: str | bool | None) -> TrainResult:
        config = self._start_config(resume_from_checkpoint)
        launch_config = launch_config_of(config)
        job = Job(launch_config, "", [], *local_slots(launch_config))
        check_job(job, servers_run_here=True)
        job.announce()
        job.save()
        folders = job.run_dir
        threads = job.placement().threads
        call = f'{type(self).__name__}(…, trial_name="{config.trial_name}").train(resume_from_checkpoint=True)'
        with (
            variables({RESUME_ENV: call}),
            borrowed_process(folders.logs / "rank0.log", threads),
            ServersBeside(job) as servers,
            variables(servers.environment()),
        ):
            steps = self.run(config, resume_from_checkpoint)
        history = read_stats(folders)
        # A resumed run may have done more steps before than it is to do now.
        steps = max([steps, *(row["step"] + 1 for row in history)])
        path = folders.checkpoints / f"step{steps:06d}"
        self.result = TrainResult(path, folders.path, history, self.has_scalar_head)
        return self.result

    def _start_config(self, resume_from_checkpoint: str | bool | None = None) -> Any:
        """Return the configuration of a new run, with a run directory and a model that servers can read."""
        config = self.config
        if resume_from_checkpoint is True and self.given.get("trial_name") is None:
            raise ConfigError(
                "resume_from_checkpoint=True continues a run by its name: pass its trial_name (the folder's name, such "
                "as run1), or the path of a recover checkpoint instead of True"
            )
        if resume_from_checkpoint and config.recover.mode == "disabled":
            # Otherwise the earlier run of this name, with its checkpoint, is moved aside.
            config = dataclasses.replace(config, recover=dataclasses.replace(config.recover, mode="auto"))
        if self.given.get("trial_name") is None:
            folder = run_path(config.cluster.fileroot, config.experiment_name, "run").parent
            try:
                name = make_new_folder(folder / f"run{number}" for number in itertools.count(1)).name
            except OSError as error:
                raise ConfigError(
                    f"cannot make a run directory in {folder}: {error.strerror}; free space there, or set output_dir "
                    "to a folder you can write"
                ) from error
            config = dataclasses.replace(config, trial_name=name)
        if isinstance(self._model, PreTrainedModel):
            path = RunDir(config).path / "model"
            self._model.save_pretrained(path)
            self.tokenizer.save_pretrained(path)
            own = {name: dataclasses.replace(getattr(config, name), path=str(path)) for name in self._model_sections()}
            config = dataclasses.replace(config, **own)
        return config

    def _model_sections(self) -> list[str]:
        """Return the sections whose model is the one that was given."""
        sections = [self.section, *(["ref"] if getattr(self.config, "ref", None) is not None else [])]
        return [name for name in sections if getattr(self.config, name).path == self._model_name()]

    def _model_name(self) -> str:
        if isinstance(self._model, PreTrainedModel):
            return str(self._model.config._name_or_path)
        return str(self._model)

    def save_model(self, path: str | Path | None = None) -> None:
        """Copy the trained model to a folder of its own: `path`, or `output_dir`."""
        path = self.config.cluster.fileroot if path is None else path
        if self.result is None:
            raise ConfigError("there is no trained model yet: call train() first")
        self.result.model.save_pretrained(path)
        self.result.tokenizer.save_pretrained(path)


def _check_trained_model(model: Any, has_scalar_head: bool) -> str | Path | PreTrainedModel:
    if isinstance(model, PreTrainedModel):
        config: Any = model.config
        check_head("the model", [type(model).__name__], config.num_labels, has_scalar_head)
        return model
    if hasattr(model, "peft_config"):
        raise ConfigError("the model has adapters: pass the base model and peft_config, or merge them first")
    if not isinstance(model, str | Path):
        wrong = "there is no model" if model is None else f"model is {type(model).__name__}"
        raise ConfigError(f"{wrong}: give the path of a Hugging Face folder, a hub name, or a PreTrainedModel")
    check_model(model)
    return model


def _data_keys(data: list[Row] | str, sets: Mapping[str, list[Row] | str]) -> dict[str, Any]:
    """Return the keys of the datasets; rows in memory have a word as their path."""
    keys: dict[str, Any] = {"train_dataset.path": data if isinstance(data, str) else "train_dataset"}
    for name, own in sets.items():
        path = own if isinstance(own, str) else "eval_dataset"
        # A name may have dots, which divide keys.
        named = keys.get("valid_datasets", {}) | {name: {"path": path}}
        keys |= {"valid_dataset.path": path} if name == "valid" else {"valid_datasets": named}
    return keys
