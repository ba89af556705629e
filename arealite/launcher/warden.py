"""The warden outlives its launcher by a moment: when the launcher is gone, however it went, it ends what was started.

Started by `Supervisor` as a process of its own, fed over standard input (its end is seen by the end of its output): first the mark and the grace, then `+pid` for each child that
started and `-pid` for each whose family was ended. End of input means that the launcher ended, also by `kill -9`.
"""

from __future__ import annotations

import os
import signal
import sys

from arealite.utils.process import end_families


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # No child of the launcher any more: whoever kills a process and its children (as Ray does) spares us.
    if os.fork():
        os._exit(0)
    mark, grace_s = sys.stdin.readline().rsplit(" ", 1)
    pids: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        (pids.add if line[0] == "+" else pids.discard)(pid)
    end_families(pids, float(grace_s), [mark])


if __name__ == "__main__":
    main()
