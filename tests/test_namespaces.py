"""The machines of `tests/machines.py`: links, partitions, and that nothing is left of them."""

import contextlib
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

LEFT_ALONE = """
import os, signal, subprocess, sys
from tests.machines import machines
with machines(2) as net:
    sleeper = subprocess.Popen(["sleep", "600"], preexec_fn=net[1].enter, start_new_session=True)
    print(sleeper.pid, *(machine.pid for machine in net), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def reaches(one, other, timeout_s=10.0):
    """Whether a connection can be made, and how long that takes."""
    began = time.monotonic()
    with one.network(), contextlib.suppress(OSError):
        socket.create_connection((other.address, PORT), timeout_s).close()
        return time.monotonic() - began
    return None


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_links_can_be_cut_slowed_and_mended():
    with machines(3) as (one, two, three), contextlib.ExitStack() as stack:
        for machine in (two, three):
            with machine.network():
                stack.enter_context(socket.create_server((machine.address, PORT)))
        assert reaches(one, two) and reaches(one, three)
        two.partition()
        assert reaches(one, two, 1.0) is None and reaches(one, three)
        two.rejoin()
        two.slow(delay_ms=50)
        assert (reaches(one, two) or 0) >= 0.1
        two.slow(mbit=10)
        assert reaches(one, two)
        two.kill()
        assert reaches(one, two, 1.0) is None and not two.pids()
        two.boot()
        assert reaches(one, two)


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
