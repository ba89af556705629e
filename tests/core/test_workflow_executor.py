"""The executor: order, conservation, staleness, failures, deadlines, equality with a plain loop."""

import asyncio
import random
import threading
import time
import weakref

import pytest
import torch

from arealite.api.errors import DatasetError, TrainingError, WaitTimeout
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.waits import NamedWait
from arealite.utils.data import concat_padded
from arealite.utils.seeds import derive_seed
from arealite.utils.trace import tracing
from tests.core.conftest import Echo, StubEngine, make_batch


def rows(count, **extra):
    return [{"x": i, **extra} for i in range(count)]


def loader(data, size=4):
    return [data[i : i + size] for i in range(0, len(data), size)]


def xs(batch):
    return batch["input_ids"][::2, 0].tolist()


def check_conserved(executor):
    executor.staleness.counts.check()


def test_results_are_returned_oldest_first_each_as_its_own_group(executors):
    executor = executors(max_head_offpolicyness=3)
    workflow = Echo()
    for row in rows(4):
        executor.submit({**row, "yields": 10 - row["x"]}, workflow)
    batch = executor.wait(4)
    assert xs(batch) == [0, 1, 2, 3]
    ids = batch["group_ids"][0] - batch["group_ids"]
    assert ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    check_conserved(executor)


def test_joined_episodes_are_freed_by_the_loops_thread(executors):
    executor, freed_by = executors(batch_size=2), []

    class Watched(Echo):
        async def arun_episode(self, engine, data):
            batch = await super().arun_episode(engine, data)
            weakref.finalize(batch["input_ids"], lambda: freed_by.append(threading.current_thread().name))
            return batch

    for row in rows(2):
        executor.submit(row, Watched())
    assert xs(executor.wait(2)) == [0, 1]
    executor.run_coroutine(asyncio.sleep(0), NamedWait("the test", "the loop", 10.0))
    assert freed_by == ["rollout", "rollout"]


class Random(RolloutWorkflow):
    """Draws from the row's seed and finishes in a random order."""

    async def arun_episode(self, engine, data):
        rng = random.Random(data["seed"])
        n, length = 3, rng.randint(3, 9)
        for _ in range(rng.randint(0, 20)):
            await asyncio.sleep(0)
        batch = make_batch(data["x"], n=n, length=length, version=engine.version)
        generator = torch.Generator().manual_seed(data["seed"])
        batch["logprobs"] = torch.randn(n, length, generator=generator)
        batch["rewards"] = torch.rand(n, generator=generator)
        return batch


def test_no_staleness_equals_a_plain_loop_bit_for_bit(executors):
    data = rows(20)
    executor = executors(batch_size=4, max_head_offpolicyness=0)
    engine, workflow, batches = StubEngine(), Random(), loader(data)
    # Over two epochs.
    for version in range(12):
        executor.engine.version = engine.version = version
        batch = executor.prepare_batch(batches, workflow)
        expected = []
        for position in range(4 * version, 4 * version + 4):
            row = {**data[position % 20], "seed": derive_seed(executor.runner.seed, position)}
            expected.append(asyncio.run(workflow.arun_episode(engine, row)))
        plain = concat_padded(expected)
        for key in plain:
            # Padding is marked as not generated.
            if key == "versions":
                plain[key] = plain[key].masked_fill(plain["attention_mask"] == 0, -1)
            assert torch.equal(batch[key], plain[key]), key
        assert executor.stats()["lag_max"] == 0
        executor.engine.version = version + 1
        executor.set_version(version + 1)
        check_conserved(executor)


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_admission_never_exceeds_the_rule(executors, eta):
    executor = executors(batch_size=4, max_head_offpolicyness=eta, max_concurrent_rollouts=100)
    workflow, data = Echo(), loader(rows(40))
    for version in range(8):
        executor.engine.version = version
        batch = executor.prepare_batch(data, workflow)
        allowed = (eta + version + 1) * 4
        assert len(workflow.started) <= allowed
        assert batch["group_ids"].unique().numel() == 4
        executor.engine.version = version + 1
        executor.set_version(version + 1)
        check_conserved(executor)
    stats = executor.stats()
    assert stats["trained"] == 32 and stats["failed"] == stats["rejected"] == stats["stale"] == 0


def test_generation_goes_on_while_the_trainer_trains(executors):
    executor = executors(batch_size=4, max_head_offpolicyness=1)
    workflow, data = Echo(), loader(rows(40))
    executor.prepare_batch(data, workflow)
    deadline = time.monotonic() + 10
    while executor.stats()["buffered"] < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    # Made without another call.
    assert executor.stats()["buffered"] == 4


def test_episodes_run_before_what_the_trainer_does_meanwhile(executors):
    executor, workflow = executors(batch_size=2), Echo()
    num_accepted = []

    def meanwhile() -> None:
        deadline = time.monotonic() + 10
        while executor.stats()["accepted"] < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        num_accepted.append(executor.stats()["accepted"])

    executor.prepare_batch(loader(rows(8)), workflow, meanwhile)
    assert num_accepted == [2]


def test_a_server_that_missed_an_update_is_an_error(executors):
    executor = executors(batch_size=2, max_head_offpolicyness=1, max_failed_episodes=3)
    executor.set_version(5)
    with pytest.raises(TrainingError, match="under version 5 but has tokens of version 3: a server missed"):
        executor.prepare_batch(loader(rows(8, version=3)), Echo())


def test_a_sample_fresh_when_finished_may_be_stale_when_consumed(executors):
    executor = executors(batch_size=2, max_head_offpolicyness=1, max_concurrent_rollouts=64)
    workflow = Echo()
    for row in rows(2):
        executor.submit({**row, "version": 0}, workflow)
    executor.submit({"x": 9, "hang": True}, workflow)
    with pytest.raises(WaitTimeout, match="2 finished, 1 running"):
        executor.wait(3, timeout_s=0.3)
    executor.set_version(2)
    executor.engine.version = 2
    for row in rows(2):
        executor.submit({"x": 100 + row["x"]}, workflow)
    assert xs(executor.wait(2)) == [100, 101]
    assert executor.stats()["stale"] == 2
    check_conserved(executor)


def test_rejected_and_failed_episodes_are_replaced(executors):
    executor = executors(batch_size=4, max_head_offpolicyness=0)
    data = rows(40)
    for row in data:
        if row["x"] % 3 == 1:
            row["reject"] = True
        if row["x"] % 3 == 2:
            row["raises"] = ValueError("bad row")
    batch = executor.prepare_batch(loader(data), Echo())
    assert xs(batch) == [0, 3, 6, 9]
    stats = executor.stats()
    assert stats["rejected"] == 3 and stats["failed"] >= 2
    check_conserved(executor)


def test_when_everything_fails_the_first_cause_is_raised(executors):
    executor = executors(batch_size=4, max_failed_episodes=10)
    with pytest.raises(TrainingError, match=r"10 episodes in a row failed.*ZeroDivisionError: first") as info:
        executor.prepare_batch(loader(rows(8, raises=ZeroDivisionError("first"))), Echo())
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    with pytest.raises(TrainingError):
        executor.submit({"x": 1}, Echo())


@pytest.mark.parametrize(
    "result, words",
    [
        (torch.ones(2), "expected a dict of tensors"),
        ({"input_ids": torch.ones(2, 3)}, "lacks"),
        ({**make_batch(1), "input_ids": torch.ones(2, 4)}, "whole numbers, got torch.float32"),
        ({**make_batch(1), "logprobs": torch.zeros(2, 3)}, r"`logprobs` is \[2, 3\], but `input_ids` is \[2, 4\]"),
        ({**make_batch(1), "rewards": torch.tensor([1.0, float("nan")])}, "not finite"),
        ({**make_batch(1), "rewards": torch.ones(3)}, r"shape \[2\]"),
        ({**make_batch(1), "extra": torch.ones(5)}, "first dimension is 2"),
        ({**make_batch(1), "logprobs": torch.full((2, 4), float("-inf"))}, "`logprobs` are not finite"),
        ({**make_batch(1), "sample_ids": torch.tensor([0, -1])}, "whole numbers from 0"),
        ({**make_batch(1), "token_rewards": torch.ones(2, 3)}, r"expected floats \[n, T\]"),
        ({**make_batch(1), "token_rewards": torch.full((2, 4), float("nan"))}, "`token_rewards` are not finite"),
    ],
)
def test_wrong_results_are_described(executors, result, words):
    executor = executors(batch_size=1, max_failed_episodes=1)
    executor.submit({"x": 0, "returns": result}, Echo())
    with pytest.raises(TrainingError, match=words):
        executor.wait(1)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), BaseException("odd")])
def test_any_exception_in_a_workflow_fails_its_own_episode_only(executors, error):
    executor = executors(batch_size=1)
    executor.submit({"x": 0, "raises": error}, Echo())
    executor.submit({"x": 1}, Echo())
    assert xs(executor.wait(1)) == [1]
    assert executor.stats()["failed"] == 1 and executor.stats()["running"] == 0


def test_a_workflow_that_rejects_every_row_stops_the_run(executors):
    executor = executors(batch_size=2, max_failed_episodes=3)
    data = [rows(30, reject=True)[i : i + 2] for i in range(0, 30, 2)]
    with pytest.raises(TrainingError, match=r"\d+ episodes in a row were rejected"):
        executor.prepare_batch(data, Echo())


class Blocks(Echo):
    async def arun_episode(self, engine, data):
        # Does not await: nothing else runs on the loop meanwhile.
        data["release"].wait(60)


def test_a_workflow_that_blocks_the_loop_is_named_with_its_line(executors):
    executor, release = executors(batch_size=1, batch_timeout_s=0.3), threading.Event()
    try:
        with pytest.raises(WaitTimeout, match=r"blocks all other episodes in .*, which does not await"):
            executor.prepare_batch(loader(rows(4, release=release)), Blocks())
    finally:
        release.set()


def test_episode_past_its_deadline_fails(executors):
    executor = executors(batch_size=4, episode_timeout_s=0.2)
    data = rows(12)
    data[1]["hang"] = True
    batch = executor.prepare_batch(loader(data), Echo())
    assert xs(batch) == [0, 2, 3, 4]
    assert executor.stats()["failed"] == 1
    check_conserved(executor)


def test_expired_wait_says_what_hangs_where(executors):
    executor = executors(batch_size=2, batch_timeout_s=0.3)
    data = rows(4)
    data[1]["hang"] = True
    with pytest.raises(WaitTimeout) as info:
        executor.prepare_batch(loader(data), Echo())
    text = str(info.value)
    for words in (
        "prepare_batch has waited",
        "rollout.batch_timeout_s",
        "1 finished, 1 running",
        "episode 1",
        "conftest.py",
    ):
        assert words in text, text


def test_forgotten_version_is_an_error_not_a_hang(executors):
    executor = executors(batch_size=4)
    data = loader(rows(16))
    executor.prepare_batch(data, Echo())
    with pytest.raises(TrainingError, match="set_version forgotten"):
        executor.prepare_batch(data, Echo())


def test_wait_for_more_than_was_submitted_is_an_error(executors):
    executor = executors(batch_size=4)
    executor.submit({"x": 0}, Echo())
    with pytest.raises(TrainingError, match="can never return: 1 of 2"):
        executor.wait(2)


def test_small_and_empty_datasets_are_errors(executors):
    with pytest.raises(DatasetError, match="3 rows, but a batch needs 4"):
        executors(batch_size=4).prepare_batch(loader(rows(3)), Echo())
    with pytest.raises(DatasetError, match="gives no rows"):
        executors(batch_size=4).prepare_batch([], Echo())


def test_batch_size_comes_from_the_dataloader_if_not_given(executors):
    executor = executors(batch_size=None)
    assert xs(executor.prepare_batch(loader(rows(9), size=3), Echo())) == [0, 1, 2]


def test_direct_episodes_beside_training_are_limited_and_do_not_count(executors):
    """They neither take the place of training episodes nor appear in the counts, and a waiting caller gets all."""
    executor, workflow, gate = executors(batch_size=4, max_head_offpolicyness=1), Echo(), asyncio.Event()
    background = Echo()
    call, data = executor.start_direct(rows(9, gate=gate), background, max_running=2), loader(rows(64))
    for version in range(1, 4):
        batch = executor.prepare_batch(data, workflow)
        assert len(batch["rewards"]) == 8
        executor.engine.version = version
        executor.set_version(version)
    assert len(background.started) == 2 and call.remaining == 9
    check_conserved(executor)
    assert executor.staleness.counts.trained == 12
    state = executor.state_dict()
    assert state["counts"]["trained"] == 12 and state["num_direct"] == 9
    executor.runner.loop.call_soon_threadsafe(gate.set)
    executor.wait_direct(call, "test")
    assert call.remaining == 0 and xs(call.join()) == list(range(9))
    assert executor.staleness.counts.trained == 12


def test_the_span_of_an_episode_begins_when_it_gets_its_lane(executors, monkeypatch):
    """Its task begins after its admission, and the lane may have had another episode until then."""
    executor = executors()
    spawn = executor.runner.spawn

    def spawn_late(episode):
        episode.started_at -= 100.0
        spawn(episode)

    monkeypatch.setattr(executor.runner, "spawn", spawn_late)
    tracing.start()
    try:
        executor.submit({"x": 1}, Echo())
        executor.wait(1)
        (span,) = (span for span in tracing.take() if span.name.startswith("episode"))
    finally:
        tracing.stop()
    assert span.seconds < 100.0


def test_rollout_batch_keeps_order_and_ignores_admission(executors):
    executor = executors(batch_size=2, max_head_offpolicyness=0)
    data = rows(50)
    for row in data:
        row["yields"] = 50 - row["x"]
    data[7]["reject"] = True
    data[8]["raises"] = ValueError("no")
    assert xs(executor.rollout_batch(data, Echo())) == [x for x in range(50) if x not in (7, 8)]
    assert executor.stats()["admitted"] == 0
    with pytest.raises(TrainingError, match="first cause: ValueError: boom"):
        executor.rollout_batch(rows(3, raises=ValueError("boom")), Echo())


def test_pause_admits_nothing_new(executors):
    executor = executors(batch_size=2)
    executor.pause()
    executor.submit({"x": 0}, Echo())
    with pytest.raises(WaitTimeout, match="paused"):
        executor.wait(1, timeout_s=0.2)
    executor.resume()
    assert xs(executor.wait(1)) == [0]


def test_counts_add_up_with_random_results(executors):
    rng = random.Random(7)
    executor = executors(batch_size=8, max_head_offpolicyness=2, max_failed_episodes=1000)
    data = []
    for x in range(400):
        fate = rng.choice(["ok"] * 4 + ["reject", "raise", "slow"])
        row = {"x": x, "yields": rng.randint(0, 5)}
        row |= {"ok": {}, "reject": {"reject": True}, "raise": {"raises": KeyError("k")}, "slow": {"yields": 200}}[fate]
        data.append(row)
    seen = []
    batches = loader(data, size=8)
    for version in range(20):
        executor.engine.version = version
        batch = executor.prepare_batch(batches, Echo())
        lag = version - batch["versions"][batch["versions"] >= 0].min().item()
        assert lag <= 2
        seen += batch["group_ids"][::2].tolist()
        check_conserved(executor)
        executor.engine.version = version + 1
        executor.set_version(version + 1)
    assert len(seen) == len(set(seen)) == 160


def test_many_waiting_episodes_are_all_returned_even_if_the_clock_jumps(executors, monkeypatch):
    count, real_time, jump_s = 5000, time.time, [0.0]
    # Deadlines must not depend on the wall clock.
    monkeypatch.setattr(time, "time", lambda: real_time() + jump_s[0])
    executor = executors(batch_size=count)
    gate = asyncio.Event()
    workflow = Echo()
    for row in rows(count, gate=gate):
        executor.submit(row, workflow)
    jump_s[0] = 86400.0
    executor.runner.loop.call_soon_threadsafe(gate.set)
    assert xs(executor.wait(count)) == list(range(count))


def test_a_batch_waits_for_a_straggler(executors):
    """With η = 1 the slow first episode belongs to the batch of version 1 at the latest."""
    executor = executors(batch_size=4, max_head_offpolicyness=1)
    workflow, gate = Echo(), asyncio.Event()
    data = loader([{"x": 0, "gate": gate}, *rows(40)[1:]])
    assert 0 not in xs(executor.prepare_batch(data, workflow))
    executor.engine.version = 1
    executor.set_version(1)
    # As if the step had taken a minute.
    executor._last_batch_at -= 60
    executor.runner.loop.call_soon_threadsafe(executor.runner.loop.call_later, 0.2, gate.set)
    assert 0 in xs(executor.prepare_batch(data, workflow))
    assert executor.stats()["stale"] == 0


def test_a_straggler_delays_a_batch_no_longer_than_a_step(executors):
    executor = executors(batch_size=4, max_head_offpolicyness=1)
    workflow = Echo()
    data = loader([{"x": 0, "hang": True}, *rows(40)[1:]])
    executor.prepare_batch(data, workflow)
    executor.engine.version = 1
    executor.set_version(1)
    executor._last_batch_at = time.monotonic() - 0.3
    began = time.monotonic()
    assert 0 not in xs(executor.prepare_batch(data, workflow))
    assert 0.2 < time.monotonic() - began < 5


def test_an_episode_that_hangs_does_not_delay_every_batch(executors):
    """Once it is too old for the present batch too, nothing is gained by waiting for it."""
    executor = executors(batch_size=4, max_head_offpolicyness=1, batch_timeout_s=5.0)
    workflow = Echo()
    data = loader([{"x": 0, "hang": True}, *rows(80)[1:]])
    for version in range(1, 6):
        assert 0 not in xs(executor.prepare_batch(data, workflow))
        executor.engine.version = version
        executor.set_version(version)
    # As if the step had taken a minute: a batch that waits for so long passes its deadline.
    executor._last_batch_at -= 60
    assert 0 not in xs(executor.prepare_batch(data, workflow))
    assert executor.stats()["running"] >= 1


def test_the_same_result_returned_again_and_again_is_counted_once_per_episode(executors):
    """A workflow that returns one result for every row (a broken cache) does not break the counts."""

    class Cached(Echo):
        kept = None

        async def arun_episode(self, engine, data):
            self.kept = self.kept or await super().arun_episode(engine, data)
            return self.kept

    executor, workflow = executors(max_head_offpolicyness=3), Cached()
    for _ in range(6):
        executor.submit({"x": 1}, workflow)
    batch = executor.wait(6)
    assert len(batch["group_ids"].unique()) == 6 and len(batch["rewards"]) == 12
    assert executor.stats()["trained"] == 6 and executor.stats()["buffered"] == 0
    executor.staleness.counts.check()


def test_samples_of_several_rows_join_with_plain_ones(executors):
    """A batch without `sample_ids` and `token_rewards` gets its row numbers, and the rewards of its rows."""
    executor = executors(batch_size=2)
    agent = make_batch(1, n=3) | {"sample_ids": torch.tensor([0, 2, 2]), "token_rewards": torch.full((3, 4), 0.25)}
    agent["rewards"] = torch.tensor([1.0, 0.0, 0.0])
    executor.submit({"x": 1, "returns": agent}, Echo())
    executor.submit({"x": 2, "length": 6}, Echo())
    batch = executor.wait(2)
    assert batch["sample_ids"].tolist() == [0, 2, 2, 0, 1]
    assert batch["token_rewards"][:, 3].tolist() == [0.25] * 3 + [1.0] * 2
    assert batch["token_rewards"].shape == (5, 6) and not batch["token_rewards"][:3, 4:].any()
    # A sample counts once: (1 + 0) / 2 for the first episode, 1 for the second.
    assert executor.stats()["reward_mean"] == 0.75
