"""The fork server of tests is a fork of pytest, also after tests have killed it many times while threads run."""

import multiprocessing
import os
import signal
import threading
from multiprocessing import forkserver


def report(connection) -> None:
    connection.send((os.getppid(), len(os.listdir("/proc/self/task"))))


def fork_server_of_a_child() -> int:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=report, args=(theirs,))
    process.start()
    parent, num_threads = ours.recv() if ours.poll(60) else (0, 0)
    process.join()
    assert num_threads == 1
    return parent


def test_a_killed_fork_server_is_replaced_by_another_fork_of_pytest():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    seen = set()
    try:
        for _ in range(10):
            server = fork_server_of_a_child()
            assert server == forkserver._forkserver._forkserver_pid and server not in seen
            # Programs that are started have other command lines.
            with open(f"/proc/{server}/cmdline") as one, open("/proc/self/cmdline") as other:
                assert one.read() == other.read()
            seen.add(server)
            os.kill(server, signal.SIGKILL)
            os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    finally:
        end.set()
        thread.join()
