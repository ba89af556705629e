"""Dynamic sampling: groups with equal rewards are rejected, and a curriculum still learns from them."""

import asyncio

import pytest
import torch

from arealite.api.cli_args import DatasetConfig, InferenceEngineConfig
from arealite.api.dataset_args import CurriculumConfig
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.episode import Episode, EpisodeId, TrajectoryError
from arealite.core.workflow_executor import WorkflowExecutor
from arealite.dataset import StatefulDataLoader
from arealite.workflow.dynamic_sampling import DynamicSampling
from tests.core.conftest import StubEngine, make_batch

REWARDS = {"hard": (0.0, 0.0), "mixed": (0.0, 1.0), "easy": (1.0, 1.0), "almost": (0.5, 0.5), "filtered": None}


class Scripted(RolloutWorkflow):
    """Gives the answers to a row the rewards of its kind; None rejects them."""

    async def arun_episode(self, engine, data):
        rewards = REWARDS[data["kind"]]
        return None if rewards is None else {**make_batch(1), "rewards": torch.tensor(rewards)}


def test_groups_with_equal_rewards_return_their_rewards_only():
    async def play(kind):
        return await DynamicSampling(Scripted()).arun_episode(None, {"kind": kind})

    assert asyncio.run(play("filtered")) is None
    assert asyncio.run(play("easy")).keys() == {"rewards"}
    assert asyncio.run(play("mixed")).keys() == make_batch(1).keys()


class Returns(RolloutWorkflow):
    def __init__(self, batch):
        self.batch = batch

    async def arun_episode(self, engine, data):
        return self.batch


@pytest.mark.parametrize("wrap", [lambda workflow: workflow, DynamicSampling], ids=["accepted", "rejected"])
def test_the_pass_rate_counts_samples_of_several_rows_once(wrap):
    """One solved sample of three rows and two unsolved ones of a row each: a third is solved, not three fifths."""
    ones = torch.ones(5, 2, dtype=torch.long)
    batch = {key: ones for key in ("input_ids", "attention_mask", "loss_mask", "versions")}
    batch |= {"logprobs": torch.zeros(5, 2), "token_rewards": torch.zeros(5, 2)}
    batch |= {"rewards": torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]), "sample_ids": torch.tensor([0, 0, 0, 1, 2])}
    episode = Episode(EpisodeId("stream", 0), {}, None)
    episode.set_result(asyncio.run(wrap(Returns(batch)).arun_episode(None, {})))
    assert (episode.result is None) == (wrap is DynamicSampling)
    assert episode.pass_rate == pytest.approx(1 / 3)


def test_a_curriculum_learns_the_pass_rate_of_rejected_groups():
    kinds = list(REWARDS)
    config = DatasetConfig(path="x", batch_size=len(kinds), shuffle=False, curriculum=CurriculumConfig())
    loader = StatefulDataLoader([{"kind": kind} for kind in kinds], config, seed=1)
    limits = InferenceEngineConfig(batch_timeout_s=60.0, max_head_offpolicyness=1000)
    executor, workflow = WorkflowExecutor(limits, StubEngine(), 1), DynamicSampling(Scripted())
    executor.start()
    try:
        # Results arrive when the next rows are drawn.
        for version in range(1, 500):
            assert executor.prepare_batch(loader, workflow)["rewards"].tolist() == [0.0, 1.0]
            executor.set_version(version)
            if len(loader.curriculum.rates) == 4:
                break
    finally:
        executor.stop()
    assert loader.curriculum.rates == {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.0}
    # All but the one whose answers differ.
    assert executor.stats()["rejected"] >= 3


@pytest.mark.parametrize("rewards", [[1.0], torch.tensor(1.0), torch.tensor([])])
def test_rewards_of_rejected_groups_are_checked(rewards):
    with pytest.raises(TrajectoryError, match="of a rejected episode"):
        Episode(EpisodeId("stream", 0), {}, None).set_result({"rewards": rewards})
