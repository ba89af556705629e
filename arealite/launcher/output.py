"""Lets a launcher go on when its output cannot be written any more.

The reader of a pipe may end (Ctrl+C ends `tee` too), and the disk of a redirected output may be full. Neither may end a
run: what its processes print is also in the logs of the run directory.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# File descriptors that could not be written.
_warned: set[int] = set()


@contextmanager
def lasting_output() -> Iterator[None]:
    """In this block, standard output and standard error lose what they cannot write, and raise nothing."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_lasting, streams)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams


class _LastingFile(io.FileIO):
    """A file descriptor on which writing does not fail."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            _warn_lost(self.fileno(), error)
            return memoryview(data).nbytes


def _warn_lost(number: int, error: OSError) -> None:
    """Say once that output is lost, on standard error. Nobody misses that of a reader that has gone."""
    if number in _warned or number == 2 or isinstance(error, BrokenPipeError):
        return
    _warned.add(number)
    print(
        f"warning: cannot write the output: {error.strerror}. The run goes on without it, and its logs are in the run "
        "directory",
        file=sys.stderr,
        flush=True,
    )


def _lasting(stream: TextIO | None) -> TextIO:
    """Return a stream to the same file descriptor; `stream` itself if it has none, as in a notebook."""
    if stream is None:
        # It was closed when the process was started.
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        file = _LastingFile(stream.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:
        return stream
    buffer = io.BufferedWriter(file)
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
