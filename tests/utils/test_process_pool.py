"""Worker processes: what they start ends with them, and a fork server that is lost is replaced."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arealite.reward.pool import RewardPool
from arealite.utils.pools import process_pool
from arealite.utils.pools.call_pool import CallError, CallPool, CallTimeout
from arealite.utils.pools.job_pool import serve_jobs
from arealite.utils.pools.process_pool import WorkerProcess

ROOT = Path(__file__).parents[2]


def start_child() -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def start_child_and_hang(path: str) -> None:
    Path(path).write_text(str(start_child()))
    time.sleep(1000)


def start_child_and_exit(path: str) -> None:
    Path(path).write_text(str(start_child()))
    os._exit(3)


def answer_at_once(owner, job):
    return b"answer"


def ends(pid: int) -> bool:
    """Whether a process ends within a minute."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(60_000))
    finally:
        os.close(descriptor)


def test_workers_end_with_a_pool_that_nobody_closes():
    """A script that makes a workflow for each step would collect processes until its end."""

    async def scenario():
        pool = CallPool(1)
        return await pool.run(os.getpid, timeout_s=60)

    assert ends(asyncio.run(scenario()))


def test_a_worker_whose_owner_has_not_read_its_answer_ends_without_an_error(capfd):
    async def scenario():
        worker = WorkerProcess(serve_jobs, (answer_at_once,), __name__, "test")
        await worker.start()
        worker.channel.send(b"job")
        readable = asyncio.Event()
        asyncio.get_running_loop().add_reader(worker.channel._socket, readable.set)
        try:
            async with asyncio.timeout(60):
                await readable.wait()
        finally:
            asyncio.get_running_loop().remove_reader(worker.channel._socket)
            worker.channel._socket.close()
        worker.process.join(60)
        return worker.process.exitcode

    assert asyncio.run(scenario()) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_forked_process_does_not_end_the_workers_of_a_pool():
    async def scenario():
        pool = CallPool(1)
        try:
            worker = await pool.run(os.getpid, timeout_s=60)
            if (child := os.fork()) == 0:
                pool.__del__()
                os._exit(0)
            os.waitpid(child, 0)
            assert await pool.run(os.getpid, timeout_s=60) == worker
        finally:
            pool.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("fn", "error"), [(start_child_and_hang, CallTimeout), (start_child_and_exit, CallError)])
def test_children_of_a_call_that_fails_end_with_it(fn, error, tmp_path):
    async def scenario():
        pool = CallPool(1)
        try:
            # A worker that runs, so that the deadline is that of the call alone.
            assert await pool.run(os.getpid, timeout_s=60)
            with pytest.raises(error):
                await pool.run(fn, str(tmp_path / "pid"), timeout_s=3 if error is CallTimeout else 60)
        finally:
            pool.close()

    asyncio.run(asyncio.wait_for(scenario(), 110))
    assert ends(int((tmp_path / "pid").read_text()))


def test_children_of_a_call_that_returned_end_with_the_pool():
    async def scenario() -> int:
        pool = CallPool(1)
        try:
            return await pool.run(start_child, timeout_s=60)
        finally:
            pool.close()

    assert ends(asyncio.run(asyncio.wait_for(scenario(), 110)))


OWNER = """
import asyncio
from test_process_pool import start_child
from arealite.utils.pools.call_pool import CallPool

async def main():
    print(await CallPool(1).run(start_child, timeout_s=60), flush=True)
    await asyncio.sleep(1000)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_children_end_with_the_owner_of_the_pool(tmp_path):
    (tmp_path / "owner.py").write_text(OWNER)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    with subprocess.Popen([sys.executable, tmp_path / "owner.py"], env=env, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            child = int(owner.stdout.readline())
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    assert ends(child)


def test_a_worker_starts_at_once_after_a_fork_server_was_killed():
    """As after the end of another pool whose workers were starting."""

    async def scenario():
        for _ in range(5):
            pool = CallPool(1)
            try:
                assert await pool.run(os.getpid, timeout_s=60)
            finally:
                pool.close()
            process_pool._kill_fork_server()

    asyncio.run(asyncio.wait_for(scenario(), 110))


def test_a_start_that_loses_its_fork_server_is_tried_again(monkeypatch):
    start = process_pool.ForkServerContext.Process.start
    attempts = []

    def lose_first(process):
        attempts.append(process)
        if len(attempts) == 1:
            raise EOFError
        start(process)

    monkeypatch.setattr(process_pool.ForkServerContext.Process, "start", lose_first)

    async def scenario():
        pool = CallPool(1)
        try:
            assert await pool.run(os.getpid, timeout_s=60)
        finally:
            pool.close()

    asyncio.run(asyncio.wait_for(scenario(), 110))
    assert len(attempts) == 2


def test_a_killed_worker_is_not_started_again(monkeypatch):
    worker = WorkerProcess(start_child, (), __name__, "never")  # type: ignore[arg-type]
    worker.kill()

    def lose(process):
        raise EOFError

    monkeypatch.setattr(process_pool.ForkServerContext.Process, "start", lose)
    with pytest.raises(EOFError):
        worker._start_process()
    worker._theirs.close()


@pytest.mark.parametrize("make_pool", [lambda: CallPool(1), lambda: RewardPool(1, max_workers=1)])
def test_a_job_that_is_cancelled_as_its_turn_comes_passes_it_on(make_pool):
    async def scenario():
        pool = make_pool()
        # Stands for a worker that is busy; no process is needed.
        worker = object()
        pool._workers.append(worker)
        first, second = (asyncio.create_task(pool._acquire(__name__)) for _ in range(2))
        await asyncio.sleep(0)
        pool._on_ready(worker)
        first.cancel()
        assert await second is worker
        pool._workers.clear()
        pool.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_workers_have_the_environment_of_their_owner_and_not_that_of_the_fork_server(monkeypatch):
    """A second run in the same process has other keys and log files."""

    async def look() -> list[str | None]:
        pool = CallPool(1)
        try:
            return [await pool.run(os.getenv, name, timeout_s=60) for name in ("KEY_OF_A_RUN", "KEY_BEFORE")]
        finally:
            pool.close()

    monkeypatch.setenv("KEY_BEFORE", "first")
    assert asyncio.run(asyncio.wait_for(look(), 110)) == [None, "first"]
    monkeypatch.setenv("KEY_OF_A_RUN", "second")
    monkeypatch.delenv("KEY_BEFORE")
    assert asyncio.run(asyncio.wait_for(look(), 110)) == ["second", None]
