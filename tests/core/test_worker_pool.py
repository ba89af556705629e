"""Rollout workers: the same workflow code in other processes; no episode is lost with a worker."""

import asyncio
import gc
import os
import signal
import sys
import time

import pytest
import torch

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.dataset_args import SOURCE_COLUMN
from arealite.api.errors import ConfigError, ServerError
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core import worker_pool
from arealite.core.waits import NamedWait
from arealite.core.worker_pool import WorkerError, WorkerPool
from arealite.core.workflow_executor import WorkflowExecutor
from arealite.utils.trace import tracing
from arealite.workflow.by_source import BySource
from tests.core.conftest import make_batch

# NaNs, -0.0, …
ALL_BITS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(2, -1)


class StateEngine:
    """An engine that stores the state of the servers."""

    def __init__(self, config):
        self.state = {}

    async def apply_server_state(self, state):
        self.state = state


class FragileEngine(StateEngine):
    """Cannot be created while the file `broken` exists."""

    def __init__(self, broken):
        super().__init__(broken)
        if broken.exists():
            raise OSError("broken")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


async def exit_now():
    sys.exit("out of a task")


class Pids(RolloutWorkflow):
    """Returns the process id; rows may set a delay, a rejection or an error."""

    async def arun_episode(self, engine, data):
        if data.get("raises"):
            raise KeyError("in the worker")
        if data.get("cancels"):
            raise asyncio.CancelledError
        if data.get("exits"):
            await asyncio.gather(exit_now(), exit_now())
        if data.get("unprintable"):
            raise Unprintable
        if data.get("reject"):
            return None
        if data.get("blocks"):
            time.sleep(1000)
        if "wait_s" in data:
            with tracing.part_of_episode("wait"):
                await asyncio.sleep(data["wait_s"])
        batch = make_batch(data["x"], version=engine.state["version"])
        for name, dtype in data.get("columns", {}).items():
            batch[name] = ALL_BITS.view(dtype).clone()
        batch["pid"] = torch.full((2,), os.getpid())
        return batch


class Reward:
    """Something in a workflow that a worker has a copy of."""

    def __init__(self):
        self.value = 0.0


class Changing(RolloutWorkflow):
    """Returns what a script sets between steps, and how many workflows its process has."""

    def __init__(self):
        self.factor, self.gconfig, self.reward = 1.0, GenerationHyperparameters(temperature=1.0), Reward()

    async def arun_episode(self, engine, data):
        reward = self.factor * self.gconfig.temperature + self.reward.value
        gc.collect()
        number = sum(type(found) is Changing for found in gc.get_objects())
        return make_batch(number, reward=reward)


@pytest.fixture
def executor():
    config = InferenceEngineConfig(batch_timeout_s=60, max_head_offpolicyness=8)
    executor = WorkflowExecutor(config, None, 8)
    executor.start()
    pool = WorkerPool(2, StateEngine, config, lambda: {"version": executor.staleness.version})
    executor.run_coroutine(pool.start(), NamedWait("the test", "workers", 60))
    executor.runner.pool = pool
    yield executor
    executor.abandon()
    executor.runner.loop.call_soon_threadsafe(pool.close)
    executor.stop()


def test_episodes_run_in_other_processes_with_the_same_results(executor):
    workflow = Pids()
    for x in range(16):
        executor.submit({"x": x, "raises": x == 3, "reject": x == 4}, workflow)
    batch = executor.wait(14)
    assert batch["input_ids"][::2, 0].tolist() == [x for x in range(16) if x not in (3, 4)]
    pids = set(batch["pid"].tolist())
    assert len(pids) == 2 and os.getpid() not in pids
    counts = executor.staleness.counts
    assert (counts.failed, counts.rejected) == (1, 1)
    counts.check()


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_workflow_that_a_script_changes_is_changed_in_workers(executor, is_inner):
    inner = Changing()
    workflow = BySource({"set": inner}) if is_inner else inner
    expected = [1.0, 2.0, 1.0, 8.0]
    for step in range(4):
        if step == 1:
            inner.factor = 2.0
        if step == 2:
            inner.gconfig.temperature = 0.5
        if step == 3:
            inner.reward = Reward()
            inner.reward.value = 7.0
        row = {"x": step, SOURCE_COLUMN: "set"}
        batch = executor.rollout_batch([row, row], workflow)
        assert batch["rewards"][::2].tolist() == [expected[step]] * 2


def test_workflows_may_refer_to_each_other(executor):
    first, second = Changing(), Changing()
    first.other, second.other = second, first
    for factor in (1.0, 3.0):
        second.factor = factor
        batch = executor.rollout_batch([{"x": 0}], second)
        assert batch["rewards"][0] == factor


def test_workers_drop_workflows_that_are_not_used_any_more(executor, monkeypatch):
    monkeypatch.setattr(worker_pool, "MAX_WORKFLOWS", 2)
    for _ in range(6):
        numbers = executor.rollout_batch([{"x": 0}] * 4, Changing())["input_ids"][:, 0]
    # Those that are kept, and that of the next episode, which came before its order to forget the oldest.
    assert int(numbers.max()) <= 3


def test_parts_of_traced_episodes_come_back_from_workers(executor):
    tracing.start()
    try:
        for x in range(4):
            executor.submit({"x": x, "wait_s": 0.01}, Pids())
        executor.wait(4)
        spans = tracing.take()
    finally:
        tracing.stop()
    waits = {span.lane: span for span in spans if span.name == "wait"}
    episodes = {span.lane: span for span in spans if span.name.startswith("episode")}
    assert len(waits) == 4 and waits.keys() == episodes.keys()
    for lane, episode in episodes.items():
        assert episode.began <= waits[lane].began and waits[lane].is_part and episode.args["samples"] == 2


def test_a_killed_worker_loses_no_episode(executor):
    workflow = Pids()
    for x in range(40):
        executor.submit({"x": x, "wait_s": 1.0}, workflow)
    pool = executor.runner.pool
    deadline = time.monotonic() + 20
    while not pool._workers[0].waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(pool._workers[0].process.pid, signal.SIGKILL)
    batch = executor.wait(40)
    assert batch["input_ids"][::2, 0].tolist() == list(range(40))
    assert pool.num_replaced == 1 and executor.staleness.counts.failed == 0


def test_a_workflow_that_cannot_be_pickled_is_an_error(executor):
    class Local(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return None

    episode = executor.runner.pool.run_episode(Local(), {"x": 1})
    with pytest.raises(ConfigError, match="Local cannot be sent to a worker process"):
        executor.run_coroutine(episode, NamedWait("the test", "an answer", 20))


def test_a_workflow_that_cancels_itself_fails_at_once(executor):
    episode = executor.runner.pool.run_episode(Pids(), {"x": 1, "cancels": True})
    with pytest.raises(WorkerError, match="CancelledError"):
        executor.run_coroutine(episode, NamedWait("the test", "an answer", 20))


@pytest.mark.parametrize(
    ("does", "words"), [("exits", "SystemExit: out of a task"), ("unprintable", "Unprintable, which")]
)
def test_unusual_failures_fail_their_own_episode_only(executor, does, words):
    pool, workflow = executor.runner.pool, Pids()
    for x in range(8):
        executor.submit({"x": x, "wait_s": 1.0}, workflow)
    with pytest.raises(WorkerError, match=words):
        episode = pool.run_episode(workflow, {"x": 8, does: True})
        executor.run_coroutine(episode, NamedWait("the test", "an answer", 20))
    assert executor.wait(8)["input_ids"][::2, 0].tolist() == list(range(8))
    assert pool.num_replaced == 0 and executor.staleness.counts.failed == 0


def test_all_tensor_types_are_returned_bit_for_bit(executor):
    columns = {"a": torch.bfloat16, "b": torch.float8_e5m2, "c": torch.float16}
    episode = executor.runner.pool.run_episode(Pids(), {"x": 1, "columns": columns})
    batch = executor.run_coroutine(episode, NamedWait("the test", "an answer", 20))
    assert {name: batch[name].dtype for name in columns} == columns
    for name in columns:
        assert batch[name].view(torch.int16).equal(ALL_BITS)


async def run_for(seconds, pool, data):
    async with asyncio.timeout(seconds):
        await pool.run_episode(Pids(), data)


async def run_beside_a_blocked_one(pool):
    """Block the first worker, and give the second an episode that only waits too long."""
    rows = [{"x": 0, "blocks": True}, {"x": 0, "wait_s": 1000}]
    bad = (run_for(1.0, pool, row) for row in rows)
    good = (pool.run_episode(Pids(), {"x": x}) for x in range(1, 9))
    return await asyncio.gather(*bad, *good, return_exceptions=True)


def test_a_worker_that_blocks_is_replaced_and_only_its_blocking_episode_fails(executor, monkeypatch):
    monkeypatch.setattr(worker_pool, "MAX_SILENCE_S", 1)
    pool = executor.runner.pool
    blocked, waits = [worker.process for worker in pool._workers]
    wait = NamedWait("the test", "episodes", 40)
    results = executor.run_coroutine(run_beside_a_blocked_one(pool), wait)
    assert [type(result) for result in results[:2]] == [TimeoutError, TimeoutError]
    assert [int(batch["input_ids"][0, 0]) for batch in results[2:]] == list(range(1, 9))
    blocked.join(10)
    assert pool.num_replaced == 1 and waits.is_alive() and not blocked.is_alive()


def test_episodes_fail_while_no_worker_can_start(tmp_path):
    async def scenario(broken):
        pool = WorkerPool(2, FragileEngine, broken, lambda: {"version": 0})
        await pool.start()
        broken.touch()
        for worker in pool._workers:
            worker.process.kill()
        for _ in range(2):
            with pytest.raises(ServerError, match=r"not start: it ended with exit code 1.*num_workers=0"):
                await pool.run_episode(Pids(), {"x": 1})
        broken.unlink()
        assert await pool.run_episode(Pids(), {"x": 1}) is not None
        pool.close()
        with pytest.raises(ServerError, match="closed"):
            await pool.run_episode(Pids(), {"x": 1})

    asyncio.run(asyncio.wait_for(scenario(tmp_path / "broken"), 110))


def test_a_pool_that_loses_a_worker_warns_and_starts_another(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(worker_pool, "RETRY_S", 0.1)

    async def scenario(broken):
        pool = WorkerPool(2, FragileEngine, broken, lambda: {"version": 0})
        await pool.start()
        broken.touch()
        pool._workers[0].process.kill()
        assert await pool.run_episode(Pids(), {"x": 1}) is not None
        await asyncio.wait(pool._starting)
        assert "1 of 2 rollout workers are left" in caplog.text and len(pool._workers) == 1
        broken.unlink()
        while len(pool._workers) < 2:
            await asyncio.sleep(0.01)
        pool.close()

    asyncio.run(asyncio.wait_for(scenario(tmp_path / "broken"), 110))
