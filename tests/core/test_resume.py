"""What a checkpoint stores besides the stream of rows: submitted episodes and seeds of direct ones."""

import asyncio
import json

import pytest

from arealite.core.ledger.store import Ledger
from arealite.core.waits import NamedWait
from tests.core.conftest import Echo


class Seeds(Echo):
    """Records the seed of every row."""

    def __init__(self):
        super().__init__()
        self.seeds = []

    async def arun_episode(self, engine, data):
        self.seeds.append((data["x"], data["seed"]))
        return await super().arun_episode(engine, data)


@pytest.fixture
def live(tmp_path, executors):
    """Start the run again, with only what is on disk."""
    lives = []

    def start(state=None):
        for before in lives:
            before.stop()
        executor = executors(ledger=Ledger(tmp_path / "run.sqlite"), max_head_offpolicyness=4)
        if state is not None:
            executor.load_state_dict(json.loads(json.dumps(state)))
        lives.append(executor)
        return executor

    return start


def settle(executor, running=0):
    """Run the loop until at most `running` episodes run."""
    wait = NamedWait("the test", "episodes to end", 20.0)
    while executor.stats()["running"] > running or executor.stats()["queued"]:
        assert not wait.expired
        executor.run_coroutine(asyncio.sleep(0), wait)


def ids(batch):
    return [-1 - i for i in batch["group_ids"][::2].tolist()]


def check_balance(executor):
    counts, booked = executor.staleness.counts, executor.accounts.ledger.counts()
    counts.check()
    for state in ("running", "buffered", "trained", "rejected", "failed", "stale"):
        assert booked.get(state, 0) == getattr(counts, state), (state, booked)
    assert sum(booked.values()) == counts.admitted


def test_submitted_episodes_survive_a_resume_and_their_seeds_do_not_repeat(live):
    executor, workflow = live(), Seeds()
    for x in range(10):
        executor.submit({"x": x}, workflow)
    trained = ids(executor.wait(4))
    settle(executor)
    state = executor.state_dict()
    # After the checkpoint: undone by the resume.
    executor.submit({"x": 10}, workflow)
    assert ids(executor.wait(7)) == [4, 5, 6, 7, 8, 9, 10]
    # A checkpoint of a resumed life is as good as one of the first.
    for _ in range(2):
        executor = live(state)
        assert executor.to_submit_again == []
        assert executor.accounts.ledger.counts() == {"trained": len(trained), "buffered": 10 - len(trained)}
        check_balance(executor)
        trained += ids(executor.wait(2))
        check_balance(executor)
        state = executor.state_dict()
        # Of the stream, which was not asked.
        assert state["done"] == []
    executor = live(state)
    executor.submit({"x": 10}, workflow)
    assert trained + ids(executor.wait(3)) == list(range(11))
    check_balance(executor)
    # the row submitted again has the seed it had; no other has it
    assert workflow.seeds[-1] == workflow.seeds[-2]
    assert len({seed for _, seed in workflow.seeds}) == 11


def test_submitted_episodes_that_had_not_ended_are_listed_and_deleted(live, caplog):
    executor, gate = live(), asyncio.Event()
    fates = [{"reject": True}, {"gate": gate}, {}, {"raises": KeyError("k")}, {"gate": gate}, {}]
    for x, fate in enumerate(fates):
        executor.submit({"x": x, **fate}, Echo())
    assert ids(executor.wait(1)) == [2]
    settle(executor, running=2)
    state = executor.state_dict()
    executor.runner.loop.call_soon_threadsafe(gate.set)
    settle(executor)
    # These weights are lost.
    assert ids(executor.wait(3)) == [1, 4, 5]
    executor = live(state)
    assert executor.to_submit_again == [1, 4] and "[1, 4]" in caplog.text
    assert executor.accounts.ledger.counts() == {"rejected": 1, "failed": 1, "trained": 1, "buffered": 1}
    check_balance(executor)
    for number in executor.to_submit_again:
        executor.submit({"x": number}, Echo())
    assert ids(executor.wait(3)) == [5, 6, 7]
    check_balance(executor)


def test_direct_episodes_draw_the_seeds_of_a_run_that_was_never_killed(live):
    executor, workflow = live(), Seeds()
    rows = [{"x": i} for i in range(3)]
    executor.rollout_batch(rows, workflow)
    state = executor.state_dict()
    executor.rollout_batch(rows, workflow)
    live(state).rollout_batch(rows, workflow)
    first, undisturbed, resumed = workflow.seeds[:3], workflow.seeds[3:6], workflow.seeds[6:]
    assert resumed == undisturbed != first


def test_rows_that_ended_far_ahead_of_the_stream_are_in_the_next_checkpoint(live):
    executor, data = live(), [[{"x": i} for i in range(4)]]
    executor.prepare_batch(data, Echo())
    state = executor.state_dict()
    # A straggler of before kept `position` far behind.
    state["done"] = [*state["done"], 500]
    executor = live(state)
    # Nothing was asked of it yet.
    assert executor.state_dict()["done"] == state["done"]
    executor.prepare_batch(data, Echo())
    assert 500 in executor.state_dict()["done"]
