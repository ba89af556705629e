"""Opens files of run directories, which other users may write."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def is_regular(path: Path) -> bool:
    """Return whether there is a regular file; a link is none."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; links, pipes and what may not be read count as absent."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise FileNotFoundError(path) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(path)
    return os.fdopen(descriptor, "rb")


class GrowingFile:
    """Reads a file as it grows; one that was replaced, cut or removed is read again from its start."""

    def __init__(self, path: Path):
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0

    def forget(self) -> None:
        """Drop what was read so far."""
        self._identity, self._offset = None, 0

    @contextlib.contextmanager
    def open_new(self) -> Iterator[BinaryIO | None]:
        """Open the file behind what was read; None if there is none. Add to `_offset` what is read."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            self.forget()
            yield None
            return
        with file:
            state = os.fstat(file.fileno())
            if self._identity != (state.st_dev, state.st_ino) or state.st_size < self._offset:
                self.forget()
                self._identity = state.st_dev, state.st_ino
            file.seek(self._offset)
            yield file
