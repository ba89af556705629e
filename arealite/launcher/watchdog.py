"""The watchdog outlives its launcher by a moment: when the launcher is gone, however it went, it ends what was started.

Started by `Supervisor` as a process of its own, fed over standard input (its end is seen by the end of its output): first the mark and the grace, then `+pid` for each child that
started, `-pid` for each whose family was ended, and `=path` for a file or folder to remove after them. End of input means that the launcher ended, also by `kill -9`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from arealite.utils.process import end_families


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # No child of the launcher any more: whoever kills a process and its children (as Ray does) spares us.
    if os.fork():
        os._exit(0)
    mark, grace_s = sys.stdin.readline().rsplit(" ", 1)
    pids: set[int] = set()
    left: list[Path] = []
    for line in sys.stdin:
        kind, what = line[0], line[1:].rstrip("\n")
        if kind == "=":
            left.append(Path(what))
        else:
            (pids.add if kind == "+" else pids.discard)(int(what))
    end_families(pids, float(grace_s), [mark])
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
