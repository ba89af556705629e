"""Another user of the machine can neither read, steer nor stop a run. Needs root, to become that user."""

import contextlib
import encodings.idna  # noqa: F401  The other user cannot import what is in a home folder.
import http.client
import json
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from arealite.utils.names import FileNames
from arealite.utils.rundir import RunDir
from tests.chaos.job import ChaosJob

NOBODY = 65534
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
GETS = ("server_info", "server_info?probe=/etc/shadow", "model_info", "weights_checker", "v1/models")
POSTS: dict[str, dict[str, Any]] = {
    "generate": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}},
    "v1/completions": {"model": "x", "prompt": "a", "max_tokens": 1},
    "pause_generation": {},
    "abort_request": {"abort_all": True},
    "release_memory_occupation": {},
    "update_weight_version": {"weight_version": "999999999"},
    "update_weights_from_disk": {"model_path": "/etc"},
    "update_weights_from_shm": {"path": "/etc/shadow"},
    "init_weights_update_group": {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2},
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike those of pytest."""
    path = Path(tempfile.mkdtemp(prefix="hostile-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def as_nobody(attack: Callable[[], list[str]]) -> list[str]:
    """Run `attack` in a child process of another user; returns its list of what succeeded."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(write, json.dumps(attack()).encode())
            code = 0
        finally:
            if code:
                traceback.print_exc(file=sys.__stderr__)
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(answer)


def succeeds(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return False
    return True


def attack_files(run_dir: RunDir, segments: list[Path], pids: list[int]) -> list[str]:
    """Read what is private, put files and signals where they would do harm; returns what succeeded."""
    done = []
    private = [run_dir.key_path, run_dir.path / "job.json", *run_dir.path.glob("logs/server*.log"), *segments]
    private += [Path(f"/proc/{pid}/{name}") for pid in pids for name in ("environ", "mem", "maps")]
    for path in private:
        done += [f"read {path}"] if succeeds(path.read_bytes) else []
    for path in (run_dir.private, run_dir.names, *(segment for segment in segments if segment.is_dir())):
        done += [f"list {path}"] if succeeds(lambda path=path: os.listdir(path)) else []
    for path in (run_dir.path, run_dir.private, run_dir.names, run_dir.logs, run_dir.weights, *segments):
        done += [f"write in {path}"] if succeeds((path / "servers@0").touch) else []
    done += ["remove lock"] if succeeds((run_dir.path / "lock").unlink) else []
    done += [f"stop {pid}" for pid in pids if succeeds(lambda pid=pid: os.kill(pid, signal.SIGSTOP))]
    return done


def attack_server(address: str) -> list[str]:
    """Send requests without the key and with wrong ones; returns those that were accepted."""
    done = []
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}, {"Authorization": "\xe9"}):
        for path in (*GETS, *POSTS):
            body = POSTS.get(path)
            connection = http.client.HTTPConnection(address, timeout=30)
            content = {"Content-Type": "application/json"} if body is not None else {}
            text = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", f"/{path}", text, {**headers, **content})
            status = connection.getresponse().status
            connection.close()
            done += [] if status in (400, 401, 403) else [f"{path}: {status}"]
    return done


def attack_port(port: int) -> list[str]:
    """Send noise to a port of the ranks, which must ignore it."""
    for data in (b"", b"\0" * 8, b"\xff" * 64, os.urandom(4096)):
        # Ranks close some ports once they are connected; whether the noise ended a rank is seen at the end of the run.
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port), timeout=30) as connection,
        ):
            connection.sendall(data)
    return []


def find_listeners(pids: list[int]) -> dict[int, str]:
    """Return port and address of each socket on which these processes listen."""
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in pids]
    return {c.laddr.port: c.laddr.ip for c in listening}


def test_another_user_can_neither_read_nor_steer_nor_stop_a_run(folder, model_path):
    job = ChaosJob(folder, model_path, allocation_mode="embedded.d1+d2", total_train_steps=10)
    run_dir = RunDir(job.run_dir)
    try:
        job.wait_for_step(2)
        key, pids = run_dir.key_path.read_bytes(), job.all_pids()
        commands = [job.command_of(pid) for pid in pids]
        segments = [path for path in (run_dir.shared_weights, *run_dir.shared_weights.glob("*")) if path.exists()]
        assert segments, "weights are in shared memory"
        assert as_nobody(lambda: attack_files(run_dir, segments, pids)) == []
        (names,) = run_dir.names.glob("*-0")
        (server,) = FileNames(names).list("servers/").values()
        assert as_nobody(lambda: attack_server(server)) == []
        listeners = find_listeners(pids)
        assert set(listeners.values()) == {"127.0.0.1"}, listeners
        for port in listeners:
            if not server.endswith(f":{port}"):
                assert as_nobody(lambda port=port: attack_port(port)) == []
        assert any("arealite.cli.serve" in command for command in commands)
        assert not [command for command in commands if key.decode() in command]
        assert job.finish() == 0, job.tail()
        job.check()
    finally:
        job.end()
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent != run_dir.private]
    assert [path for path in files if key in path.read_bytes()] == []
    assert stat.S_IMODE(run_dir.key_path.stat().st_mode) == 0o600


def test_a_run_directory_that_another_user_made_is_refused(folder, model_path):
    (folder / "runs" / "chaos").mkdir(parents=True)
    (folder / "runs" / "chaos").chmod(0o1777)
    as_nobody(lambda: [(folder / "runs" / "chaos" / "job").mkdir(0o777) or "made"])
    job = ChaosJob(folder, model_path)
    try:
        assert job.finish(60) == 2
        assert f"belongs to another user (uid {NOBODY})" in (folder / "launcher.log").read_text()
        assert list(job.run_dir.glob("private/*")) == []
    finally:
        job.end()
