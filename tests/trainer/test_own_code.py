"""Trainers and workflows that a configuration names, and resuming a trainer."""

from __future__ import annotations

import pytest

from arealite.api.cli_args import DPOConfig, GRPOConfig, RecoverConfig, RWConfig, SFTConfig
from arealite.api.errors import CheckpointError, ConfigError
from arealite.api.trainer_api import Trainer, load_trainer
from arealite.cli.main import MainConfig, flatten, main
from arealite.trainer.dpo import DPOTrainer
from arealite.trainer.ppo import PPOTrainer
from arealite.trainer.recover import Recover
from arealite.trainer.rw import RWTrainer
from arealite.trainer.sft import SFTTrainer
from arealite.utils.config import load_config
from arealite.utils.rundir import RunDir

MODULE = """
from dataclasses import dataclass
from arealite.api.cli_args import BaseExperimentConfig, SFTConfig
from arealite.api.errors import DatasetError
from arealite.api.rollout_api import RolloutWorkflow
from arealite.api.trainer_api import Trainer
from arealite.trainer.sft import SFTTrainer

@dataclass
class MyConfig(SFTConfig):
    speed: int = 1

class MyTrainer(SFTTrainer):
    config_class = MyConfig

class Unfinished(Trainer):
    config_class = SFTConfig
    def train(self, *, resume_from_checkpoint=None): ...

class NoConfig(Trainer):
    @classmethod
    def from_config(cls, config): ...
    def train(self, *, resume_from_checkpoint=None): ...

class Game(RolloutWorkflow):
    def __init__(self, gconfig, level): ...
    async def arun_episode(self, engine, data): ...

class Picky(RolloutWorkflow):
    def __init__(self, level):
        self.level = level
    def check_row(self, data):
        if self.level == 7:
            raise DatasetError(f"the first row has no level {self.level}")
    async def arun_episode(self, engine, data): ...

class Plain:
    async def arun_episode(self, engine, data): ...

class Half(RolloutWorkflow):
    def check_row(self, data): ...
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def test_the_ready_made_trainers_keep_the_contract():
    kinds = {PPOTrainer: GRPOConfig, SFTTrainer: SFTConfig, RWTrainer: RWConfig, DPOTrainer: DPOConfig}
    for trainer, config in kinds.items():
        assert issubclass(trainer, Trainer) and trainer.config_class is config and not trainer.__abstractmethods__


def test_a_trainer_of_ones_own_has_its_own_configuration(module):
    argv = [f"trainer.type={module}:MyTrainer", "trainer.args.speed=3", "trainer.sft.model.path=m"]
    flat = flatten(load_config(argv, MainConfig))
    assert type(flat).__name__ == "MyConfig" and flat.speed == 3 and flat.model.path == "m"  # type: ignore[attr-defined]
    assert flat.trainer_class == f"{module}:MyTrainer"
    assert (flat.trial_name, flat.allocation_mode) == ("MyTrainer", "d1")
    assert load_trainer(f"{module}:MyTrainer").config_class is type(flat)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trainer.type=M:Nothing", "has no 'Nothing'"),
        ("trainer.type=missing.thing:A", "there is no module 'missing'"),
        ("trainer.type=M:MyConfig", "is not a Trainer: make it a subclass"),
        ("trainer.type=M:Unfinished", "does not define from_config"),
        ("trainer.type=M:NoConfig", "has no `config_class`"),
        ("trainer_class=M:MyTrainer", "set trainer.type to it instead"),
        ("trainer.args.speed=1", "trainer.args has 'speed', which GRPOConfig does not have"),
        ("workflow=M:Plain", r"is a class, but not a RolloutWorkflow: write `class Plain\(RolloutWorkflow\)`"),
        ("workflow=M:Half", "does not define arun_episode: write `class Half"),
        ("workflow=M:Gane", "did you mean Game"),
        ("workflow=M:Game", r"needs level: set workflow_args\.level"),
    ],
)
def test_mistakes_are_errors_before_anything_starts(module, argument, message, tmp_path, gsm8k_path):
    argv = [f"cluster.fileroot={tmp_path}", f"train_dataset.path={gsm8k_path}", "trainer.grpo.actor.path=m"]
    with pytest.raises(ConfigError, match=message):
        main([*argv, argument.replace("=M", f"={module}")])


def test_a_dry_run_asks_a_workflow_about_the_first_row(module, tmp_path, model_path, gsm8k_path):
    argv = ["trainer.type=grpo", f"trainer.grpo.actor.path={model_path}", f"train_dataset.path={gsm8k_path}"]
    argv += ["train_dataset.split=null", f"cluster.fileroot={tmp_path}", "train_dataset.batch_size=2", "--dry-run"]
    with pytest.raises(ConfigError, match="the first row has no level 7"):
        main([*argv, f"workflow={module}:Picky", "workflow_args.level=7"])


@pytest.mark.parametrize(
    ("given", "message"),
    [(True, "resume_from_checkpoint=True, but there is no complete"), ("nowhere", "no such folder")],
)
def test_a_checkpoint_to_resume_from_must_exist(given, message, tmp_path):
    recover = Recover(RecoverConfig(), RunDir(tmp_path), {})
    assert recover.load() is None
    with pytest.raises(CheckpointError, match=message):
        recover.load(given)
