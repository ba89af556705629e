"""Opens weight files that another process names: regular files only, and without waiting.

Used by everything that reads published weights. A path comes from an HTTP request, so it may name a FIFO, a device, a
link, somebody else's file or any private file of this user. Errors say what kind of thing was found, never what is in
it: they travel back in HTTP answers.
"""

import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arealite.api.errors import WeightUpdateError

logger = logging.getLogger("arealite.weights")

# The names, dtypes and shapes of a hundred thousand tensors fit several times.
MAX_HEADER_BYTES = 32 << 20


@contextmanager
def opened(path: str | Path, *, for_writing: bool = False, is_private: bool = False) -> Iterator[int]:
    """Open a regular file of this user and yield its descriptor.

    A file of another user is accepted only beside others in a folder of that user (network file systems show other
    owners), and never if it `is_private`.
    """
    flags = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_RDWR if for_writing else os.O_RDONLY)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:
        # A null character in the path.
        raise WeightUpdateError(f"{str(path)!r:.200} is not a path") from error
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise WeightUpdateError(f"{path} is not a regular file: weights are read from files only")
        owners = {os.geteuid()} if is_private else {os.geteuid(), Path(path).parent.stat().st_uid}
        if info.st_uid not in owners:
            raise WeightUpdateError(
                f"{path} belongs to user {info.st_uid}, this process runs as user {os.geteuid()}: weights must be "
                "published by the same user"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def read_small(path: str | Path, max_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """Read a whole file of at most `max_bytes`."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > max_bytes:
            raise WeightUpdateError(f"{path} has {size} bytes, at most {max_bytes} are read")
        return os.pread(descriptor, max_bytes, 0)


def read_json(path: str | Path) -> Any:
    """Read a JSON file; raises `WeightUpdateError` if it is none."""
    try:
        return json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from error


def safetensors_header(descriptor: int) -> tuple[bytes, int]:
    """Return the JSON of a safetensors header and the number of bytes that follow.

    Raises `ValueError` if there is none.
    """
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise ValueError("no safetensors header, or a truncated file")
    return os.pread(descriptor, length, 8), size - 8 - length


def cause_of(error: BaseException) -> str:
    """Describe an error without the text that it quotes from a file: that goes to the log only."""
    logger.info("weights were not read: %s", error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # CUDA says why it refuses; it has not seen the file.
    return str(error).partition("\n")[0] if type(error) is RuntimeError else type(error).__name__


def unreadable(path: str | Path, error: BaseException) -> WeightUpdateError:
    """Make an error about weights that cannot be read."""
    return WeightUpdateError(f"cannot read the weights in {path}: {cause_of(error)}. The old weights are still served")


def replace_private(path: Path, text: str) -> None:
    """Write a whole file that only this user can read, without following a link."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def cannot_create(path: Path, error: OSError) -> WeightUpdateError:
    """Make an error about a segment that cannot be created."""
    return WeightUpdateError(
        f"cannot create shared weights {path}: {error.strerror}. Make {path.parent} writable and large enough, or set "
        "rollout.weight_update=disk"
    )
