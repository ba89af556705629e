"""The watchdog process: ends what a launcher started when the launcher is gone, also after `kill -9`.

`Supervisor` starts it and writes lines to its standard input: first the mark and the grace period, then `+pid` for each
child that started, `-pid` for each whose process family has ended, and `=path` for a file or folder to remove at the
end. The end of that input means that the launcher has ended. The end of the watchdog's output means that it is done.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from arealite.utils.process import end_families


def detach() -> None:
    """Leave the launcher's process tree, and ignore signals: the child ends, and its own child goes on.

    Called before the program starts, because the watchdog needs protection while it imports its modules, too: code that
    kills a launcher with its children, as Ray does, must not kill it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)


def main() -> None:
    first = sys.stdin.readline()
    if not first:
        # The launcher was killed before it started anything. Every process carries the empty mark.
        return
    mark, grace_s = first.rsplit(" ", 1)
    pids: set[int] = set()
    paths: list[Path] = []
    for line in sys.stdin:
        kind, value = line[0], line[1:].rstrip("\n")
        if kind == "=":
            paths.append(Path(value))
        else:
            (pids.add if kind == "+" else pids.discard)(int(value))
    end_families(pids, float(grace_s), [mark])
    remove_paths(paths)


def remove_paths(paths: list[Path]) -> None:
    """Remove files and folders that still exist."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
