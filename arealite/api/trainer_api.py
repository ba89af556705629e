"""The contract of trainers, and a factory for the trainer that a configuration names.

`trainer.type=package.module:Class` of `arealite.cli.main` runs a trainer of your own on every rank. Subclass one of
`arealite.trainer` to change a part of it, or `Trainer` to write all of it.
"""

import abc
import inspect
from typing import Any, ClassVar, Self

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.api.named_code import load_object


class Trainer(abc.ABC):
    """A run: everything that is made before the first step, and the loop."""

    # Its configuration. Keys that it adds to one of `arealite.api.cli_args` are set as trainer.args.KEY.
    config_class: ClassVar[type[BaseExperimentConfig]]

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Any) -> Self:
        """Make engines and data as the configuration alone says. All ranks call it."""

    @abc.abstractmethod
    def train(self, *, resume_from_checkpoint: str | bool | None = None) -> None:
        """Train to the end.

        `resume_from_checkpoint`: None does what `recover.mode` says; True continues the newest recover checkpoint of
        this run and demands that there is one; a path continues that recover checkpoint.
        """


def load_trainer(name: str) -> type[Trainer]:
    """Return the class `package.module:Class` that `trainer.type` names; raises `ConfigError`."""
    found = load_object(name, "trainer.type")
    if not inspect.isclass(found) or not issubclass(found, Trainer):
        raise ConfigError(
            f"trainer.type={name} is not a Trainer: make it a subclass of arealite.api.trainer_api.Trainer"
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"trainer.type={name} does not define {', '.join(missing)}")
    kind = getattr(found, "config_class", None)
    if not inspect.isclass(kind) or not issubclass(kind, BaseExperimentConfig):
        raise ConfigError(
            f"trainer.type={name} has no `config_class`: set it to a class of arealite.api.cli_args, such as GRPOConfig"
        )
    return found
