"""The machines of `tests/machines.py`: links, partitions, and that nothing is left of them."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.machines import ROOT, machines, why_not

pytestmark = pytest.mark.slow
PORT = 5000
LIMIT_S = 60.0

LEFT_ALONE = """
import os, signal, subprocess, sys
from tests.machines import machines
with machines(2) as net:
    sleeper = subprocess.Popen(["sleep", "600"], preexec_fn=net[1].enter, start_new_session=True)
    print(sleeper.pid, *(machine.pid for machine in net), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def connect_s(one, other):
    """Return how long a connection takes; raises `OSError` if none can be made.

    The system gives up after three unanswered requests for an address, one a second, however long the limit of the
    connection is. On a busy machine the process that delays frames may be that late, so such a failure is not the last
    word on the link.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        began = time.monotonic()
        try:
            with one.network():
                socket.create_connection((other.address, PORT), LIMIT_S).close()
            return time.monotonic() - began
        except OSError as error:
            if error.errno != errno.EHOSTUNREACH or time.monotonic() > deadline:
                raise


def is_cut(one, other):
    """Whether no connection can be made within a second."""
    with one.network(), contextlib.suppress(OSError):
        socket.create_connection((other.address, PORT), 1.0).close()
        return False
    return True


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_links_can_be_cut_slowed_and_mended():
    with machines(3) as (one, two, three), contextlib.ExitStack() as stack:
        for machine in (two, three):
            with machine.network():
                stack.enter_context(socket.create_server((machine.address, PORT)))
        connect_s(one, two)
        connect_s(one, three)
        two.partition()
        assert is_cut(one, two)
        connect_s(one, three)
        two.rejoin()
        two.slow(delay_ms=50)
        # There and back. A busy machine can only make this longer.
        assert connect_s(one, two) >= 0.1
        two.slow(mbit=10)
        connect_s(one, two)
        two.kill()
        assert is_cut(one, two) and not two.pids()
        two.boot()
        connect_s(one, two)


def test_nothing_is_left_of_machines_whose_maker_was_killed():
    if why_not():
        pytest.skip(why_not())
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = subprocess.run([sys.executable, "-c", LEFT_ALONE], env=env, capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in made.stdout.split()]
    assert len(pids) == 3, made.stderr
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
