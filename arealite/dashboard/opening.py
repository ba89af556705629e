"""Opens files of run directories, which other users may write."""

import os
import stat
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
