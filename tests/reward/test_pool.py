"""The reward pool: bad rewards fail their own job only, and no process is left over."""

import asyncio
import contextlib
import functools
import os
import pickle
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from arealite.api.errors import RewardError
from arealite.api.trajectory import Trajectory
from arealite.reward.combined import AsyncCombinedReward
from arealite.reward.pool import RewardPool
from arealite.utils.pools import process_pool
from arealite.utils.process import is_computing
from tests.reward import sample_rewards

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pool():
    pool = RewardPool(num_workers=2, timeout_s=20.0)
    yield pool
    pool.close()


def rows(*texts):
    return [{"completion": text} for text in texts]


def test_a_group_is_one_job(pool):
    assert asyncio.run(pool.run(sample_rewards.length, rows("a", "bb", ""))) == [1.0, 2.0, 0.0]
    first, second = asyncio.run(pool.run(sample_rewards.own_pid, rows("a", "b")))
    assert first == second != os.getpid()


@pytest.mark.parametrize(
    "fn, words",
    [
        (sample_rewards.raises, "no such column"),
        (sample_rewards.crashes, "its worker process was killed by signal 6"),
        (sample_rewards.exits, "its worker process ended with exit code 7"),
        (sample_rewards.raises_odd, "not even an Exception"),
        (sample_rewards.leaves, "SystemExit: enough"),
        (sample_rewards.closes_everything, "its worker process ended with exit code 1"),
        (sample_rewards.closes_and_runs_on, "its worker process closed its connection and did not end"),
        (sample_rewards.returns_text, "must return a number"),
        (sample_rewards.returns_nan, "must be finite"),
        (sample_rewards.without_total, "without `reward`"),
        (sample_rewards.with_a_bad_part, "'length'.*must return a number"),
        (lambda completion: 1.0, "top level"),
    ],
)
def test_a_bad_reward_fails_with_its_reason_and_the_pool_continues(pool, fn, words):
    async def both():
        with pytest.raises(RewardError, match=words):
            await pool.run(fn, rows("x"))
        return await pool.run(sample_rewards.length, rows("xyz"))

    assert asyncio.run(both()) == [3.0]


@pytest.mark.parametrize("fn", [sample_rewards.in_parts, sample_rewards.Judge()], ids=["function", "coroutine object"])
def test_a_reward_of_several_parts_is_a_number_that_has_them(pool, fn):
    first, second = asyncio.run(pool.run(fn, rows("a", "bc")))
    if fn is sample_rewards.in_parts:
        assert (first, first.parts, second.parts["length"]) == (1.5, {"length": 1.0, "format": 1.0}, 2.0)
    else:
        assert (first, second, second.parts) == (1.0, 2.0, {"asked": 1.0})
    assert Trajectory().observe([1]).reward(second).stats == second.parts


def test_an_error_shows_the_lines_of_the_reward_and_not_of_the_pool(pool):
    with pytest.raises(RewardError) as info:
        asyncio.run(pool.run(sample_rewards.raises, rows("x")))
    text = str(info.value)
    assert "sample_rewards.py" in text and "pool.py" not in text and not text.endswith("\n")


@pytest.mark.parametrize(
    "fn, name",
    [
        (sample_rewards.Judge(), "Judge"),
        (sample_rewards.Judge().__call__, "Judge.__call__"),
        (functools.partial(sample_rewards.raises, level=3), "raises"),
    ],
)
def test_errors_name_a_reward_without_its_address(pool, fn, name):
    with pytest.raises(RewardError, match=f"^reward {name} raised"):
        asyncio.run(pool.run(fn, rows(None)))


def test_very_long_errors_are_cut(pool):
    with pytest.raises(RewardError, match="ValueError: a whole page") as info:
        asyncio.run(pool.run(sample_rewards.raises_a_page, rows("x")))
    assert len(str(info.value)) < 20_000


def test_a_reward_that_forks_answers_once(pool):
    async def main():
        return [await pool.run(fn, rows("xyz")) for fn in (sample_rewards.forks, sample_rewards.length)]

    assert asyncio.run(main()) == [[1.0], [3.0]]


LOGS_ITS_IMPORTS = """
import asyncio, os, sys
with open(sys.argv[1] if __name__ == "__main__" else os.environ["IMPORTS"], "a") as file:
    print(os.getpid(), file=file)
from arealite.reward.pool import RewardPool
from arealite.utils.pools.process_pool import prepare_workers

def log_preparation():
    with open(os.environ["IMPORTS"] + ".prepared", "a") as file:
        print(os.getpid(), file=file)

prepare_workers(log_preparation)

def crashes(**row):
    os.abort()

async def main():
    pool = RewardPool(num_workers=1)
    starting = asyncio.create_task(pool.run(crashes, [{}]))
    done, _ = await asyncio.wait([starting], timeout=0)
    starting.cancel()  # an episode whose deadline passes while its worker starts
    outcomes = await asyncio.gather(*(pool.run(crashes, [{}]) for _ in range(3)), return_exceptions=True)
    print(pool.num_replaced, {type(outcome).__name__ for outcome in outcomes})
    pool.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_workers_are_forked_from_one_that_has_imported_the_script_once(tmp_path):
    script, imports = tmp_path / "script.py", tmp_path / "imports"
    script.write_text(LOGS_ITS_IMPORTS)
    done = subprocess.run(
        [sys.executable, script, imports], cwd=tmp_path, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "IMPORTS": str(imports)},
    )  # fmt: skip
    assert done.stdout.split(None, 1) == ["3", "{'RewardError'}\n"], done.stderr
    # The script itself, and the fork server.
    _, fork_server = imports.read_text().split()
    assert (tmp_path / "imports.prepared").read_text().split() == [fork_server]


def test_a_reward_that_never_returns_is_killed_and_others_are_not_delayed():
    async def main():
        pool = RewardPool(num_workers=2, timeout_s=1.0)
        await pool.run(sample_rewards.length, rows("warm"))
        began = time.monotonic()
        hanging = [asyncio.ensure_future(pool.run(sample_rewards.never_returns, rows("x")))]
        await asyncio.sleep(0)
        quick = await asyncio.gather(*(pool.run(sample_rewards.length, rows("a" * i)) for i in range(20)))
        with pytest.raises(RewardError, match=r"did not return within 1 s \(reward_timeout_s\) and was killed"):
            await hanging[0]
        assert time.monotonic() - began < 10
        assert [value for [value] in quick] == [float(i) for i in range(20)]
        assert pool.num_replaced == 1
        pool.close()

    asyncio.run(main())


def test_cancelled_job_frees_its_place():
    async def main():
        pool = RewardPool(num_workers=1, timeout_s=30.0)
        await pool.run(sample_rewards.length, rows("warm"))
        job = asyncio.ensure_future(pool.run(sample_rewards.never_returns, rows("x")))
        await asyncio.sleep(0.05)
        job.cancel()
        assert await pool.run(sample_rewards.length, rows("ab")) == [2.0]
        pool.close()

    asyncio.run(main())


async def keep_busy(pool: RewardPool, fn, num_workers: int) -> None:
    """Have 16 jobs in the pool, one after another, until it has as many workers."""

    async def repeat() -> None:
        while len(pool._workers) < num_workers:
            await pool.run(fn, rows("x"))

    async with asyncio.timeout(60):
        await asyncio.gather(*(repeat() for _ in range(16)))


def test_more_workers_start_while_workers_wait_but_not_while_they_compute():
    async def main():
        pool = RewardPool(num_workers=1, timeout_s=60.0, max_workers=8)
        await keep_busy(pool, sample_rewards.naps, 8)
        pool.close()
        pool = RewardPool(num_workers=1, timeout_s=60.0, max_workers=8)
        await asyncio.gather(*(pool.run(sample_rewards.computes, rows("x")) for _ in range(3)))
        assert len(pool._workers) == 1
        pool.close()

    asyncio.run(main())


def test_a_job_that_computed_for_long_and_has_just_ended_does_not_count_as_blocked():
    """Its answer may be unread when workers are checked: the event loop runs timers first."""

    async def main():
        pool = RewardPool(num_workers=1, timeout_s=60.0, max_workers=8)
        jobs = [asyncio.create_task(pool.run(sample_rewards.computes, rows("x"))) for _ in range(2)]
        while not (pool._busy and is_computing(next(iter(pool._busy)).process.pid)):
            await asyncio.sleep(0.01)
        (worker,) = pool._busy
        for _ in range(10):
            pool._grow_if_workers_are_blocked()
        while is_computing(worker.process.pid):
            time.sleep(0.001)
        pool._grow_if_workers_are_blocked()
        assert pool._limit == 1
        await asyncio.gather(*jobs)
        pool.close()

    asyncio.run(main())


def test_more_workers_start_while_jobs_that_have_not_ended_are_blocked():
    async def main():
        pool = RewardPool(num_workers=1, timeout_s=3600.0, max_workers=4)
        jobs = [asyncio.create_task(pool.run(sample_rewards.never_returns, rows("x"))) for _ in range(8)]
        async with asyncio.timeout(60):
            while len(pool._workers) < 4:
                await asyncio.sleep(0.05)
        pool.close()
        for job in jobs:
            job.cancel()
        await asyncio.wait(jobs)

    asyncio.run(main())


def test_very_short_jobs_do_not_start_more_workers(pool):
    async def main():
        await asyncio.gather(*(pool.run(sample_rewards.length, rows("x")) for _ in range(1500)))
        return len(pool._workers)

    assert asyncio.run(main()) == 2


def test_workers_share_no_descriptor_with_their_owner(pool, tmp_path):
    with (
        open(tmp_path / "ledger", "w") as file,
        socket.create_server(("127.0.0.1", 0)) as server,
        contextlib.closing(sqlite3.connect(tmp_path / "run.sqlite")),
    ):
        # As a lock that a launcher passes on.
        os.set_inheritable(file.fileno(), True)
        os.set_inheritable(server.fileno(), True)
        asyncio.run(pool.run(sample_rewards.descriptors, [{"path": str(tmp_path / "fds")}]))
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        mine = {os.readlink(link) for link in links if os.path.islink(link)}
        standard = {os.readlink(f"/proc/self/fd/{number}") for number in range(3)}
    shared = (mine & set((tmp_path / "fds").read_text().splitlines())) - standard
    # Libraries open the same files of /sys in each process.
    shared = {link for link in shared if link.startswith(("socket:", "pipe:", "anon_inode:", str(tmp_path)))}
    # The pipe by which the worker notices that its owner has ended: each side has its own end.
    assert len(shared) == 1 and shared.pop().startswith("pipe:")


HEADER = (1000).to_bytes(4, "big").hex()


def test_half_a_message_blocks_nothing_but_its_own_job():
    async def main():
        pool = RewardPool(num_workers=5, timeout_s=4.0)
        parts = ["0000", HEADER, HEADER + "80" * 10, "7fffffff"]
        stuck = [asyncio.create_task(pool.run(sample_rewards.writes, rows(part))) for part in parts]
        assert await pool.run(sample_rewards.length, rows("abc")) == [3.0]
        outcomes = await asyncio.gather(*stuck, return_exceptions=True)
        text = "reward writes did not return within 4 s (reward_timeout_s) and was killed"
        assert {str(outcome) for outcome in outcomes} == {text}
        pool.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("ffffff00", "sent a message of -256 bytes"),
        ("00000003616263", "sent a message that cannot be read: UnpicklingError"),
        (f"00000004{pickle.dumps(5, protocol=1).hex()[:8].ljust(8, '0')}", "sent a message that"),
    ],
)
def test_a_worker_that_sends_nonsense_is_replaced(pool, message, words):
    async def main():
        with pytest.raises(RewardError, match=f"its worker process {words}"):
            await pool.run(sample_rewards.writes, [{"completion": message, "stops": False}])
        assert pool.num_replaced == 1
        return await pool.run(sample_rewards.length, rows("abc"))

    assert asyncio.run(main()) == [3.0]


def test_a_fork_server_that_does_not_answer_is_replaced(monkeypatch):
    process_pool.start_fork_server(sample_rewards.__name__)
    stopped = forkserver._forkserver._forkserver_pid

    async def main():
        pool = RewardPool(num_workers=1, timeout_s=20.0)
        assert await pool.run(sample_rewards.length, rows("xyz")) == [3.0]
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(RewardError, match="its worker process closed its connection"):
            await pool.run(sample_rewards.crashes, rows("x"))
        monkeypatch.setattr(process_pool, "START_TIMEOUT_S", 0.5)
        with pytest.raises(RewardError, match=r"had no answer from its fork server within 0.5 s"):
            await pool.run(sample_rewards.length, rows("xyz"))
        monkeypatch.undo()
        outcomes = []
        # Whoever is the first to notice that it is gone may fail.
        for _ in range(3):
            with contextlib.suppress(RewardError):
                outcomes += await pool.run(sample_rewards.length, rows("xyz"))
        pool.close()
        return outcomes

    try:
        assert 3.0 in asyncio.run(main())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)


def test_the_deadline_is_that_of_one_sample(pool):
    pool.timeout_s = 2.0
    slow = [{"completion": "x", "nap_s": 0.6} for _ in range(5)]
    assert len(asyncio.run(pool.run(sample_rewards.naps, slow))) == 5


def test_a_reward_that_always_hangs_fails_no_jobs_of_others():
    async def main():
        pool = RewardPool(num_workers=1, timeout_s=0.5, max_workers=1)
        await pool.run(sample_rewards.length, rows("warm"))
        hanging = [pool.run(sample_rewards.never_returns, rows("x")) for _ in range(10)]
        others = [pool.run(sample_rewards.length, rows("abc")) for _ in range(5)]
        outcomes = await asyncio.gather(*hanging, *others, return_exceptions=True)
        assert all("never_returns" in str(error) for error in outcomes[:10]) and outcomes[10:] == [[3.0]] * 5
        pool.close()

    asyncio.run(main())


def test_a_reward_that_always_hangs_fails_all_waiting_jobs_at_once():
    async def main():
        pool = RewardPool(num_workers=1, timeout_s=0.3, max_workers=1)
        jobs = [pool.run(sample_rewards.never_returns, rows("x")) for _ in range(50)]
        errors = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(error, RewardError) for error in errors)
        assert sum("was not tried" in str(error) for error in errors) == 47
        assert pool.num_replaced == 3
        # It still works.
        assert await pool.run(sample_rewards.length, rows("ab")) == [2.0]
        pool.close()

    asyncio.run(main())


def test_a_coroutine_is_awaited_on_the_loop(pool):
    async def main():
        assert await pool.run(sample_rewards.remote_judge, rows("a", "bb")) == [1.0, 2.0]
        with pytest.raises(RewardError, match="no such judge"):
            await pool.run(sample_rewards.remote_judge, rows("a", "bad"))
        with pytest.raises(RewardError, match=r"raised TimeoutError\('no answer of the judge'\)"):
            await pool.run(sample_rewards.remote_judge, rows("a", "own timeout"))
        pool.await_timeout_s = 0.1
        with pytest.raises(RewardError, match=r"did not return within 0\.1 s \(reward_timeout_s\)"):
            await pool.run(sample_rewards.remote_judge, rows("hang"))
        assert not pool._workers

    asyncio.run(main())


def test_a_coroutine_that_fails_ends_those_of_the_other_answers(pool):
    ended = []

    async def judge(completion, **data):
        if completion == "bad":
            raise KeyError("no such judge")
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(completion)

    async def main():
        for fn in (judge, AsyncCombinedReward({"judge": (1.0, judge), "length": (1.0, sample_rewards.length)})):
            with pytest.raises(RewardError, match="no such judge"):
                await pool.run(fn, rows("a", "bad", "b"))
            async with asyncio.timeout(60):
                while len(ended) < 2:
                    await asyncio.sleep(0)
            assert sorted(ended) == ["a", "b"]
            ended.clear()

    asyncio.run(main())


def test_a_fork_server_that_dies_is_replaced():
    async def main():
        pool = RewardPool(num_workers=1, timeout_s=20.0)
        outcomes = []
        # Whoever is the first to notice that it is gone may fail.
        for _ in range(3):
            with contextlib.suppress(RewardError):
                await pool.run(sample_rewards.ends_the_fork_server, rows("x"))
            with contextlib.suppress(RewardError):
                outcomes += await pool.run(sample_rewards.length, rows("xyz"))
        # The last one may have died after its answer.
        with contextlib.suppress(RewardError):
            await pool.run(sample_rewards.length, rows("xyz"))
        outcomes += await pool.run(sample_rewards.length, rows("xyz"))
        pool.close()
        return outcomes

    assert 3.0 in asyncio.run(main())


SCRIPT = """
import asyncio, os, sys, time
from arealite.reward.pool import RewardPool

def reward(completion, **data):
    return float(os.getpid()) if completion == "pid" else 2.0 * len(completion)

def hang(completion, **data):
    print(os.getpid(), flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    pool = RewardPool(num_workers=1, timeout_s=3600)
    if sys.argv[1] == "ok":
        print(asyncio.run(pool.run(reward, [{"completion": "abc"}])))
    else:
        asyncio.run(pool.run(hang, [{"completion": "abc"}]))
"""


def test_a_reward_of_the_users_own_script_works(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, "ok"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.strip() == "[6.0]", done.stderr


def test_workers_die_with_a_killed_parent(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, script, "hang"], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    worker = int(process.stdout.readline())
    descriptor = os.pidfd_open(worker)
    process.send_signal(signal.SIGKILL)
    process.wait()
    readable, _, _ = select.select([descriptor], [], [], 10)
    os.close(descriptor)
    assert readable, "the worker outlived its parent"
