"""`make_engine` makes an engine in this process; the driver of controller mode refuses one made directly."""

import pickle

import pytest
import torch

from arealite.api.cli_args import InferenceEngineConfig, PPOActorConfig, TrainEngineConfig
from arealite.api.engine_api import InferenceEngine, Result, TrainEngine, result_of, returns_column
from arealite.api.errors import ConfigError, TrainingError
from arealite.controller import factory
from arealite.controller.messages import Placeholder, Request, store
from arealite.controller.rank import RankActor
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.process import CONTROLLER_ENV


def test_make_engine_constructs_the_engine_outside_of_controller_mode(tmp_path):
    config = InferenceEngineConfig()
    rollout = factory.make_engine(RemoteSGLangEngine, config, seed=3, ledger_path=tmp_path / "run.sqlite")
    assert type(rollout) is RemoteSGLangEngine and rollout.config is config and rollout.seed == 3


@pytest.mark.parametrize(
    "cls, config",
    [
        (FSDPEngine, TrainEngineConfig("model")),
        (FSDPPPOActor, PPOActorConfig("model")),
        (RemoteSGLangEngine, InferenceEngineConfig()),
    ],
)
def test_direct_construction_in_the_driver_is_refused(cls, config, monkeypatch):
    monkeypatch.setenv(CONTROLLER_ENV, "job.json")
    with pytest.raises(ConfigError, match=rf"write `make_engine\({cls.__name__}, …\)`"):
        cls(config)


def test_make_engine_in_the_driver_places_a_class(monkeypatch):
    class FakeDriver:
        def place(self, cls, args, kwargs):
            return cls, args, kwargs

    monkeypatch.setattr(factory, "current_driver", FakeDriver)
    assert factory.make_engine(FSDPEngine, 1, parallel=2) == (FSDPEngine, (1,), {"parallel": 2})
    with pytest.raises(ConfigError, match="pass the class itself"):
        factory.make_engine(lambda: None)


def test_no_driver_outside_of_controller_mode(monkeypatch):
    monkeypatch.delenv(CONTROLLER_ENV, raising=False)
    factory.current_driver.cache_clear()
    assert factory.current_driver() is None


class OwnActor(FSDPPPOActor):
    def compute_logp(self, batch):
        return super().compute_logp(batch)

    @returns_column
    def compute_margin(self, batch):
        return batch["rewards"]


@pytest.mark.parametrize(
    "cls, method, result",
    [
        (TrainEngine, "forward", Result.BATCH),
        (FSDPEngine, "forward", Result.BATCH),
        (FSDPEngine, "initialize", Result.NOTHING),
        (FSDPEngine, "update_weights", Result.VALUE),
        (FSDPPPOActor, "ppo_update", Result.STATS),
        (FSDPPPOActor, "compute_advantages", Result.ADDED_COLUMNS),
        (FSDPPPOCritic, "compute_values", Result.COLUMN),
        (OwnActor, "compute_logp", Result.COLUMN),
        (OwnActor, "compute_margin", Result.COLUMN),
        (InferenceEngine, "prepare_batch", Result.BATCH),
        (RemoteSGLangEngine, "prepare_batch", Result.BATCH),
        (RemoteSGLangEngine, "stats", Result.VALUE),
    ],
)
def test_marks_are_declared_on_methods_and_inherited(cls, method, result):
    assert result_of(cls, method) is result


class UnmarkedEngine:
    def add(self, batch):
        batch["margin"] = batch["attention_mask"] * 2

    def score(self, batch):
        return batch["attention_mask"] * 2


@pytest.mark.parametrize("method, remedy", [("add", "@adds_columns"), ("score", "@returns_column")])
def test_rank_refuses_tensors_of_a_method_without_a_mark(method, remedy):
    rank = object.__new__(RankActor)
    rank.engine, rank.objects = UnmarkedEngine(), {}
    request = pickle.dumps(Request(method, [Placeholder()], layers=[""]))
    with pytest.raises(TrainingError, match=remedy):
        rank.call(request, store({"attention_mask": torch.ones(2, 3)}))
