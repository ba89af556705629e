"""Misbehaving workflows fail their own episode only; otherwise one message says what they did."""

import asyncio
import sys
import threading

import pytest
import torch

from arealite.api.errors import TrainingError, WaitTimeout
from arealite.core.diagnosis import FailureStreak, describe
from arealite.core.episode import EpisodeId
from arealite.core.ledger.store import Ledger
from arealite.reward.pool import RewardPool
from tests.core.conftest import Echo, make_batch


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


async def exits(**row):
    sys.exit("out of a task of its own")


async def interrupts(**row):
    raise KeyboardInterrupt


class Unruly(Echo):
    """Row 1 calls the method named `does`; the others behave."""

    def __init__(self, does):
        super().__init__()
        self.does = does
        self.pool = RewardPool()

    async def arun_episode(self, engine, data):
        if data["x"] == 1:
            await getattr(self, self.does)(data)
        return await super().arun_episode(engine, data)

    async def exits_in_a_task(self, data):
        await asyncio.gather(exits(), exits())

    async def exits_in_a_coroutine_reward(self, data):
        await self.pool.run(exits, [{}, {}])

    async def interrupts_in_a_task(self, data):
        await asyncio.create_task(interrupts())

    async def raises_what_cannot_be_printed(self, data):
        raise Unprintable

    async def raises_text_that_no_terminal_should_get(self, data):
        raise ValueError("\x1b]0;owned\x07 \udc80")

    async def awaits_what_is_cancelled(self, data):
        task = asyncio.create_task(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(task.cancel)
        await task

    async def takes_no_notice_of_its_deadline(self, data):
        while True:
            try:
                await data["release"].wait()
                return
            except asyncio.CancelledError:
                continue


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("exits_in_a_task", "SystemExit: out of a task of its own"),
        ("exits_in_a_coroutine_reward", "SystemExit: out of a task of its own"),
        ("interrupts_in_a_task", "KeyboardInterrupt: "),
        ("raises_what_cannot_be_printed", "Unprintable, which raises RuntimeError when it is printed"),
        ("raises_text_that_no_terminal_should_get", r"ValueError: \x1b]0;owned\x07 \udc80"),
        ("awaits_what_is_cancelled", "RuntimeError: the workflow awaited something that was cancelled"),
        ("takes_no_notice_of_its_deadline", "TimeoutError: no result within rollout.episode_timeout_s=0.5"),
    ],
)
def test_only_its_own_episode_fails_with_the_reason(tmp_path, executors, does, reason):
    ledger, release = Ledger(tmp_path / "run.sqlite"), asyncio.Event()
    executor = executors(ledger=ledger, episode_timeout_s=0.5)
    rows = [{"x": i, "release": release} for i in range(8)]
    batch = executor.prepare_batch([rows[:4], rows[4:]], Unruly(does))
    assert batch["input_ids"][::2, 0].tolist() == [0, 2, 3, 4]
    counts = executor.staleness.counts
    counts.check()
    assert (counts.failed, counts.running, counts.trained) == (1, 0, 4)
    found: list = []
    ledger.flush()
    query = "SELECT id, reason FROM episodes WHERE state = 'failed'"
    ledger._run_now(lambda db: found.extend(db.execute(query)))
    assert found == [(1, reason)]
    executor.runner.loop.call_soon_threadsafe(release.set)


def test_very_long_errors_are_cut():
    assert len(describe(ValueError("x" * 10**7))) < 20_000
    assert describe(ValueError("x" * 10**7)).startswith("ValueError: xxx")


def test_failures_in_a_row_are_shown_as_clean_text(capsys):
    streak = FailureStreak(limit=4)
    for number in range(3):
        assert streak.add(EpisodeId("stream", number), ValueError("\x1b[2J\udc80")) is None
    assert r"ValueError: \x1b[2J\udc80 (more in the log)" in capsys.readouterr().out
    assert "\x1b" not in str(streak.add(EpisodeId("stream", 3), ValueError("last")))


class StopsTheLoop(Echo):
    async def arun_episode(self, engine, data):
        asyncio.get_running_loop().stop()
        return await super().arun_episode(engine, data)


def test_a_stopped_loop_is_started_again(executors):
    executor = executors()
    rows = [{"x": i, "yields": 3} for i in range(4)]
    assert len(executor.rollout_batch(rows, StopsTheLoop())["rewards"]) == 8


def test_an_error_of_the_ledger_ends_the_wait_at_once(executors, monkeypatch):
    executor = executors()
    monkeypatch.setattr(executor.accounts, "record", lambda *_: 1 / 0)
    with pytest.raises(TrainingError, match="ZeroDivisionError"):
        executor.prepare_batch([[{"x": i} for i in range(4)]], Echo())


class Changes(Echo):
    async def arun_episode(self, engine, data):
        assert data["messages"] == [{"role": "user"}], data
        data["messages"][0]["content"] = "more"
        data["messages"].append({"role": "assistant"})
        data.pop("x", None)
        return make_batch(1, version=engine.version)


def test_a_workflow_that_changes_its_row_does_not_change_the_dataset(executors):
    executor = executors()
    rows = [{"x": i, "seed": i, "messages": [{"role": "user"}]} for i in range(4)]
    for _ in range(2):
        executor.rollout_batch(rows, Changes())
    assert rows == [{"x": i, "seed": i, "messages": [{"role": "user"}]} for i in range(4)]


class BlocksLater(Echo):
    """Row 2, not the oldest, blocks the loop; with `in_task` in a task of its own."""

    def __init__(self, in_task, release):
        super().__init__()
        self.in_task, self.release = in_task, release

    async def blocks(self):
        self.release.wait(60)

    async def arun_episode(self, engine, data):
        await asyncio.sleep(0)
        if data["x"] == 2:
            await (asyncio.create_task(self.blocks()) if self.in_task else self.blocks())
        await asyncio.sleep(60)


@pytest.mark.parametrize(("in_task", "who"), [(False, "episode 2, "), (True, "a task that a workflow")])
def test_code_that_blocks_the_loop_is_named_with_its_line(executors, in_task, who):
    executor, release = executors(batch_timeout_s=0.5), threading.Event()
    try:
        message = f"{who}.*blocks all other episodes in BlocksLater.blocks .*test_unruly"
        with pytest.raises(WaitTimeout, match=message):
            executor.prepare_batch([[{"x": i} for i in range(4)]], BlocksLater(in_task, release))
    finally:
        release.set()


def masked(*values):
    batch = make_batch(1)
    return {**batch, "attention_mask": torch.tensor([values, values])}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (masked(0, 0, 1, 1), "`attention_mask` has a token after padding"),
        (masked(1, 0, 1, 0), "`attention_mask` has a token after padding"),
        ({**make_batch(1), 3: torch.ones(2)}, "`3` must be a tensor"),
    ],
)
def test_unusable_results_fail_the_episode(executors, result, words):
    executor = executors(batch_size=1, max_failed_episodes=1)
    executor.submit({"x": 0, "returns": result}, Echo())
    with pytest.raises(TrainingError, match=words):
        executor.wait(1)


@pytest.mark.parametrize("width", [None, 3])
def test_results_that_cannot_be_joined_give_one_message(executors, width):
    odd = {**make_batch(1), "scores": torch.ones(2, 2)}
    other = make_batch(2) if width is None else {**make_batch(2), "scores": torch.ones(2, width)}
    executor = executors(batch_size=2)
    for result in (odd, other):
        executor.submit({"x": 0, "returns": result}, Echo())
    with pytest.raises(TrainingError, match=r"cannot be joined to one batch.*same keys"):
        executor.wait(2)
