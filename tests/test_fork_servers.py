"""Forks in place of new interpreters inherit no lock: fork servers of pytest, and programs of warm programs."""

import multiprocessing
import os
import signal
import threading
from multiprocessing import forkserver

from tests import warm_python


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


SLOW_MODULE = """
import os
if "BLOCKS" in os.environ:
    open("importing", "w").close()
    open("fifo").read()
"""
PARENT = """
import os, pathlib, subprocess, sys, threading, time
os.mkfifo("fifo")
os.environ["BLOCKS"] = "1"
thread = threading.Thread(target=__import__, args=("slow_module",))
thread.start()
while not pathlib.Path("importing").exists():
    time.sleep(0.01)
del os.environ["BLOCKS"]
try:
    code = subprocess.run([sys.executable, "child.py"], timeout=60).returncode
finally:
    open("fifo", "w").close()
    thread.join()
sys.exit(code)
"""


def test_a_program_that_is_forked_while_a_thread_imports_can_import_the_same(tmp_path):
    files = {"slow_module.py": SLOW_MODULE, "parent.py": PARENT, "child.py": "import slow_module\nprint('imported')"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = warm_python.run(["parent.py"], timeout=100, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr
