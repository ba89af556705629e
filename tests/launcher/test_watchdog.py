"""The watchdog ends what a launcher started, whatever kills the launcher and its children."""

import signal
import subprocess
import sys

from tests.launcher.conftest import wait_until_gone

# Starts a child with a daemon. Then the children of this process are killed, and itself, as Ray does with an actor.
KILLED = """
import os, signal, time
from pathlib import Path
from arealite.launcher.supervisor import ChildSpec, Supervisor

with Supervisor() as supervisor:
    supervisor.start(ChildSpec("a", ["sh", "-c", "setsid sh -c 'touch up; exec sleep 600' & wait"], Path("a.log")))
    while not os.path.exists("up"):
        time.sleep(0.001)
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_that_is_killed_with_its_children_at_its_start_leaves_nothing(work):
    assert subprocess.run([sys.executable, "-c", KILLED]).returncode == -signal.SIGKILL
    wait_until_gone(work)


def test_a_watchdog_whose_launcher_said_nothing_ends():
    command = [sys.executable, "-m", "arealite.launcher.watchdog"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
