"""Recovery after a crash: every row once, counters restored, the same batches with η = 0."""

import random
import time
from contextlib import closing

import pytest
import torch

from arealite.api.cli_args import DatasetConfig, InferenceEngineConfig
from arealite.core.ledger.reading import open_ledger
from arealite.core.ledger.store import Ledger
from arealite.core.workflow_executor import WorkflowExecutor
from arealite.dataset import StatefulDataLoader
from tests.core.conftest import StubEngine, read_counts
from tests.core.test_workflow_executor import Random


class RandomResults(Random):
    """Like `Random`, but some rows are rejected and some raise, always the same ones."""

    async def arun_episode(self, engine, data):
        fate = random.Random(data["seed"]).random()
        if fate < 0.15:
            return None
        if fate < 0.3:
            raise ValueError("this row always fails")
        return await super().arun_episode(engine, data)


class Job:
    """Dataloader, executor and ledger of a training process; after `crash` only the disk is left."""

    def __init__(self, folder, eta, state=None):
        rows = [{"x": i} for i in range(24)]
        config = DatasetConfig(path="rows", batch_size=4, shuffle=True)
        self.loader = StatefulDataLoader(rows, config)
        self.engine = StubEngine()
        options = InferenceEngineConfig(max_head_offpolicyness=eta, batch_timeout_s=20)
        self.executor = WorkflowExecutor(options, self.engine, 4, ledger=Ledger(folder / "run.sqlite"))
        self.executor.start()
        self.workflow = RandomResults()
        self.step = 0
        if state is not None:
            self.loader.load_state_dict(state["loader"])
            self.executor.load_state_dict(state["executor"])
            self.step = self.engine.version = state["executor"]["version"]

    def train(self):
        batch = self.executor.prepare_batch(self.loader, self.workflow)
        assert self.executor.stats()["lag_max"] <= self.executor.config.max_head_offpolicyness
        self.step += 1
        self.engine.version = self.step
        self.executor.set_version(self.step)
        self.executor.staleness.counts.check()
        return batch

    def checkpoint(self):
        return {"loader": self.loader.state_dict(), "executor": self.executor.state_dict()}

    def crash(self):
        self.executor.runner.stop()
        self.executor.accounts.finish()


def ids(batch):
    return batch["group_ids"].unique(sorted=False).tolist()


@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_row_is_handled_once_over_crashes(tmp_path, eta, seed):
    rng = random.Random(seed)
    job, state, trained, kept = Job(tmp_path, eta), None, [], 0
    # Lives of the process.
    for _ in range(5):
        for _ in range(rng.randint(1, 4)):
            trained.append(job.train())
            if rng.random() < 0.5:
                state, kept = job.checkpoint(), len(trained)
        job.crash()
        if state is None:
            trained = []
        # What came after the checkpoint is lost with the weights.
        trained = trained[:kept]
        job = Job(tmp_path, eta, state)
    trained += [job.train() for _ in range(3)]
    # From here on nothing moves.
    job.executor.runner.stop()
    final = job.executor.state_dict()
    job.executor.stop()
    seen = [i for batch in trained for i in ids(batch)]
    assert len(seen) == len(set(seen)) == 4 * len(trained)
    counts, booked = job.executor.staleness.counts, read_counts(tmp_path / "run.sqlite")
    assert booked["trained"] == counts.trained == len(seen)
    assert booked.get("rejected", 0) == counts.rejected and booked.get("failed", 0) == counts.failed
    # every row before the position ended, in one way only, and none is missing
    ended = booked["trained"] + booked.get("rejected", 0) + booked.get("failed", 0) + booked.get("stale", 0)
    assert ended == final["position"] + len(final["done"])


def test_without_staleness_a_crashed_run_equals_one_that_never_crashed(tmp_path):
    undisturbed = Job(tmp_path / "a", 0)
    expected = [undisturbed.train() for _ in range(9)]
    undisturbed.crash()
    job = Job(tmp_path / "b", 0)
    got = [job.train() for _ in range(4)]
    state = job.checkpoint()
    job.train()
    job.crash()
    job = Job(tmp_path / "b", 0, state)
    got += [job.train() for _ in range(5)]
    job.crash()
    for a, b in zip(expected, got, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_buffered_episodes_are_kept_and_do_not_run_again(tmp_path):
    job = Job(tmp_path, 2)
    job.train()
    while job.executor.stats()["running"]:
        pass
    buffered = [episode.id for episode in job.executor._finished.in_order()]
    state = job.checkpoint()
    job.crash()
    job = Job(tmp_path, 2, state)
    assert [episode.id for episode in job.executor._finished.in_order()] == buffered != []
    assert not {i.number for i in buffered} - set(ids(job.train())) or len(buffered) > 4
    job.crash()


def test_a_restored_episode_has_no_time_at_which_it_began(tmp_path):
    """It was that of the last boot of the machine: a report said that the episode had run since then."""
    job = Job(tmp_path, 2)
    job.train()
    while job.executor.stats()["running"]:
        pass
    state = job.checkpoint()
    job.crash()
    job = Job(tmp_path, 2, state)
    restored = {episode.id.number for episode in job.executor._finished.in_order()}
    job.train()
    job.crash()
    with closing(open_ledger(tmp_path / "run.sqlite")) as db:
        found = dict(db.execute("SELECT id, started_at FROM episodes").fetchall())
    assert restored and {number for number, began in found.items() if began is None} == restored
    assert all(time.time() - began < 3600 for began in found.values() if began is not None)


def test_a_new_run_of_the_same_name_starts_a_new_ledger(tmp_path):
    for _ in range(2):
        job = Job(tmp_path, 0)
        job.train()
        job.crash()
    assert read_counts(tmp_path / "run.sqlite")["trained"] == 4
