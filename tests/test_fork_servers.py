"""The fork server of tests is a fork of pytest, also after a test has killed it while threads run."""

import multiprocessing
import os
import signal
import threading
from multiprocessing import forkserver


def report(connection) -> None:
    connection.send(os.getppid())


def fork_server_of_a_child() -> int:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=report, args=(theirs,))
    process.start()
    answer = ours.recv() if ours.poll(60) else 0
    process.join()
    return answer


def test_a_killed_fork_server_is_replaced_by_a_spare():
    first = fork_server_of_a_child()
    assert first == forkserver._forkserver._forkserver_pid
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        second = fork_server_of_a_child()
    finally:
        end.set()
        thread.join()
    assert second == forkserver._forkserver._forkserver_pid != first
    # Programs that are started have other command lines.
    with open(f"/proc/{second}/cmdline") as one, open("/proc/self/cmdline") as other:
        assert one.read() == other.read()
