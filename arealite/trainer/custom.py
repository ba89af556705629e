"""Runs a trainer of the user's own, which `trainer.type=package.module:Class` names."""

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.trainer_api import load_trainer
from arealite.utils.config import load_config, load_plain, run_main


def main(argv: list[str]) -> None:
    """Train on every rank."""
    cls = load_trainer(str(load_plain(argv, BaseExperimentConfig).trainer_class))
    cls.from_config(load_config(argv, cls.config_class)).train()


if __name__ == "__main__":
    run_main(main)
