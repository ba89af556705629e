"""What a person reads while the trainer waits for a batch."""

import threading

import pytest

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.workflow_api import RolloutWorkflow
from arealite.engine.remote import collecting
from arealite.utils.status.writer import status


class Engine(collecting.CollectingEngine):
    """A real executor without servers."""

    def ask(self, progress, count): ...
    def initialize(self, addrs=None, train_batch_size=None): ...
    def update_weights(self, meta): ...


class Blocks(RolloutWorkflow):
    """Does not await, as a coroutine reward that calls a service with a blocking client."""

    def __init__(self):
        self.began, self.release = threading.Event(), threading.Event()

    async def arun_episode(self, engine, data):
        self.began.set()
        self.release.wait(60)


@pytest.fixture
def engine():
    made = Engine(InferenceEngineConfig(batch_timeout_s=20))
    made.start_executor(2)
    yield made
    made.destroy()
    status.remove("rollout", "executor")


def test_code_that_blocks_all_episodes_is_named_while_the_trainer_waits(engine, monkeypatch):
    monkeypatch.setattr(collecting, "_BLOCKED_S", 0.0)
    workflow = Blocks()
    engine.submit({"x": 1}, workflow)
    try:
        assert workflow.began.wait(60)
        text = engine._describe_batch()
    finally:
        workflow.release.set()
    assert text.startswith("waiting for the batch: 0 of 2 episodes, 1 running, 0 queued; episode ")
    assert "blocks all other episodes in Blocks.arun_episode (" in text and text.endswith("which does not await")
    monkeypatch.setattr(collecting, "_BLOCKED_S", 60.0)
    assert ";" not in engine._describe_batch()


def test_the_lag_of_a_loop_that_nobody_watches_is_0():
    assert status.loop_lag_s("nobody") == 0.0
