"""What a process writes about itself."""

import asyncio
import contextlib
import json
import os
import threading
import time

from arealite.doctor import collect
from arealite.utils.status import waits
from arealite.utils.status.memory import make_memory, replace_content
from arealite.utils.status.writer import NAME_ENV, RUN_ENV, Status, clear_status


def read(tmp_path, name="rank0"):
    return json.loads((tmp_path / "status" / f"{name}.json").read_text())


def test_status_has_waits_sources_and_an_end(tmp_path):
    status = Status()
    status.add("executor", lambda: {"running": 3})
    status.add("broken", lambda: 1 / 0)
    with waits.waiting("reward", "mine", ("server0",)), waits.waiting("reward", "mine", ("server0",)):
        status.begin(tmp_path, "rank0", "trainer", has_thread=False)
    written = read(tmp_path)
    assert written["pid"] == os.getpid() and written["executor"] == {"running": 3}
    assert "ZeroDivisionError" in written["broken"]["unreadable"]
    (wait,) = [wait for wait in written["waits"] if wait["what"] == "mine"]
    assert wait["count"] == 2 and wait["whom"] == ["server0"]
    status.end("done")
    status.end("twice")
    assert read(tmp_path)["ended"] == "done"
    clear_status(tmp_path)
    assert not list((tmp_path / "status").iterdir())


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path, caplog):
    (tmp_path / "status").write_text("in the way")
    status = Status()
    for _ in range(3):
        status.begin(tmp_path, "rank0", "trainer", has_thread=False)
        status._file_due = 0.0
        status.tick()
    assert "cannot write" in status.snapshot()["problem"]
    assert len([record for record in caplog.records if record.name == "arealite.status"]) == 1


def test_a_write_that_does_not_return_leaves_the_memory_new(tmp_path, monkeypatch):
    monkeypatch.setattr("arealite.utils.status.writer.INTERVAL_S", 0.02)
    monkeypatch.setattr("arealite.utils.status.writer.FILE_INTERVAL_S", 0.02)
    status = Status()
    status.begin(tmp_path, "rank0", "trainer")
    # Opening a pipe that nobody reads does not return.
    pipe = tmp_path / "status" / f".rank0.json.{os.getpid()}"
    while not pipe.exists():
        with contextlib.suppress(FileExistsError):
            os.mkfifo(pipe)
    written = read(tmp_path)["clock"]
    deadline = time.monotonic() + 30
    while True:
        content = {}
        # It may be read while it is being replaced.
        with contextlib.suppress(ValueError):
            content = json.loads(os.pread(status._memory, 1 << 20, 0))
        if "has not returned" in content.get("problem", "") and content["clock"] > written + 0.1:
            break
        assert time.monotonic() < deadline, content
    status.end()
    # Let the thread go on.
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
    for thread in status._threads:
        thread.join(10)
        assert not thread.is_alive()


def test_event_loop_that_does_not_answer(tmp_path):
    loop, status = asyncio.new_event_loop(), Status()
    status.watch_loop("rollout", loop)
    assert status.snapshot()["loops"] == {"rollout": 0.0}
    assert status._loops["rollout"].lag_s() > 0
    loop.run_until_complete(asyncio.sleep(0))
    assert status.snapshot()["loops"]["rollout"] == 0.0
    loop.close()


def test_only_named_processes_of_a_launcher_begin(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_ENV, str(tmp_path))
    for name in ("dashboard", "mps"):
        monkeypatch.setenv(NAME_ENV, name)
        Status().begin_from_environment()
    assert not (tmp_path / "status").exists() and NAME_ENV not in os.environ
    monkeypatch.setenv(NAME_ENV, "server1")
    status = Status()
    status.begin_from_environment()
    status.end()
    assert read(tmp_path, "server1")["role"] == "server"
    assert not [thread for thread in threading.enumerate() if thread in status._threads]


def test_collectives_are_numbered():
    with waits.collective("barrier"):
        (first,) = [wait["what"] for wait in waits.describe() if wait["kind"] == "collective"]
    with waits.collective("barrier"):
        (second,) = [wait["what"] for wait in waits.describe() if wait["kind"] == "collective"]
    assert int(second.split("#")[1]) == int(first.split("#")[1]) + 1


def test_a_run_leaves_no_variable_behind(tmp_path, monkeypatch):
    monkeypatch.delenv(RUN_ENV, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    own = Status()
    for name in ("first", "second"):
        own.begin_rank(tmp_path / name)
        assert os.environ[RUN_ENV] == str(tmp_path / name)
    own.end()
    assert RUN_ENV not in os.environ


def test_the_pace_of_steps_is_known_while_they_run():
    status = Status()
    for step in status.count_steps(range(3)):
        pace = status.snapshot()["pace"]
        assert pace["age_s"] >= 0 and (pace["longest_s"] is None) == (step == 0)
    assert "pace" not in status.snapshot()
    for _ in status.count_steps(range(3)):
        break
    assert "pace" not in status.snapshot(), "what follows a loop that ends early is no step"


def test_a_status_that_is_being_replaced_is_not_read(monkeypatch):
    monkeypatch.setattr(collect, "STATUS_NAME", "replaced-status")
    descriptor = make_memory("replaced-status")
    try:
        # Two writes at once, or a new text with the end of the old one.
        replace_content(descriptor, b'{"pid": 1}{"pid": 2}')
        assert collect._memory_of(os.getpid()) == b""
        replace_content(descriptor, b'{"pid": 3}')
        assert collect._memory_of(os.getpid()) == b'{"pid": 3}'
    finally:
        os.close(descriptor)
