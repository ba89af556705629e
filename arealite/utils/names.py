"""The name service: addresses of processes on any number of machines.

Entries are leases and expire if not renewed.

`FileNames` keeps one small file per name in a folder that all machines share (the run directory). Ages come from the
file server's clock, so the clocks of the machines need not agree. Only the run's owner can enter the folder: clients
send their API key to the addresses in it. An entry that is damaged or no regular file is ignored with a warning.
"""

import errno
import json
import logging
import math
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from arealite.api.errors import AReaLiteError, WaitTimeout
from arealite.utils.activity import activity
from arealite.utils.rundir import RunDir, make_private_folder

logger = logging.getLogger("arealite.names")

DEFAULT_TTL_S = 30.0
ELASTIC_PREFIX, _ELASTIC_TTL_S = "server/", 6.0
# A shared folder cannot notify: it is polled.
_POLL_INTERVAL_S = 0.2
_MAX_ENTRY_BYTES = 4096
# Errors that concern one entry: withdrawn, a link, a socket, or not readable.
_OF_ENTRY = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM)


class NamesError(AReaLiteError, OSError):
    """The folder of the name service is gone, full or not accessible."""


class FileNames:
    """Names like `servers/3` with short values such as an address, stored as files.

    A published name lives until it is withdrawn, or until `ttl_s` after its owner last called `renew`.
    """

    def __init__(self, folder: str | Path, ttl_s: float = DEFAULT_TTL_S):
        self.folder = Path(folder)
        self.ttl_s = ttl_s
        self._own: set[str] = set()
        self._renewed = 0.0
        self._probe = f".now-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._damaged: set[Path] = set()
        with self._folder_errors():
            make_private_folder(self.folder)

    def publish(self, name: str, value: str) -> None:
        """Set or replace a name. Readers see the whole value or the old one."""
        self._write(self._path(name), value)
        self._own.add(name)

    def claim(self, name: str, value: str) -> bool:
        """Set a name unless it is held; False if it is. At most one of several callers gets True."""
        path = self._path(name)
        if not self._remove_expired(path):
            return False
        aside = self._write(path.with_name(f".{path.name}.{uuid.uuid4().hex}"), value)
        try:
            # Fails if the name exists: the only atomic test-and-set on a shared folder.
            os.link(aside, path)
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        self._own.add(name)
        return True

    def withdraw(self, name: str) -> None:
        """Remove a name."""
        self._own.discard(name)
        self._path(name).unlink(missing_ok=True)

    def renew(self) -> None:
        """Renew the leases of this process. Cheap, to be called often."""
        if time.monotonic() - self._renewed < self.ttl_s / 4:
            return
        self._renewed = time.monotonic()
        for name in self._own:
            # Another process, such as a launcher that cleans up, may have withdrawn it.
            with suppress(FileNotFoundError), self._folder_errors(but=(errno.ENOENT,)):
                os.utime(self._path(name))

    def get(self, name: str) -> str | None:
        """Return the value; None if the name was never published, withdrawn, or has expired."""
        return self._read(self._path(name), self._now())

    def list(self, prefix: str) -> dict[str, str]:
        """Return all living names that start with `prefix`, sorted."""
        now, paths = self._now(), sorted(self.folder.glob(f"{_encode(prefix)}*"))
        found = {p: self._read(p, now) for p in paths if not p.name.startswith(".")}
        return {p.name.replace("@", "/"): v for p, v in found.items() if v is not None}

    def close(self) -> None:
        """Withdraw all names of this process."""
        for name in list(self._own):
            self.withdraw(name)
        (self.folder / self._probe).unlink(missing_ok=True)

    def _remove_expired(self, path: Path) -> bool:
        """Remove an expired entry. False if it lives, or if another process removes it."""
        try:
            state = path.stat()
        except FileNotFoundError:
            return True
        if self._read(path, self._now()) is not None:
            return False
        try:
            path.with_name(f".{path.name}.{state.st_ino}-{state.st_mtime_ns}").touch(exist_ok=False)
        except FileExistsError:
            return False
        with self._folder_errors():
            path.unlink(missing_ok=True)
        return True

    def _now(self) -> float:
        probe = self.folder / self._probe
        with self._folder_errors():
            probe.touch()
            return probe.stat().st_mtime

    def _read(self, path: Path, now: float) -> str | None:
        try:
            with self._folder_errors(but=_OF_ENTRY):
                written_at, text = _read_entry(path)
            entry = json.loads(text)
            value, ttl_s = entry["value"], float(entry["ttl_s"])
            if not isinstance(value, str) or not math.isfinite(ttl_s):
                raise ValueError("not a value with a time to live")
        except FileNotFoundError:
            # Withdrawn.
            return None
        except NamesError:
            raise
        # A machine that crashed leaves an empty file.
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            if path not in self._damaged:
                self._damaged.add(path)
                logger.warning("ignoring the damaged entry %s of the name service: %s", path, type(error).__name__)
            return None
        return value if now - written_at <= ttl_s else None

    def _write(self, path: Path, value: str) -> Path:
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with self._folder_errors():
            aside.write_text(json.dumps({"value": value, "ttl_s": self.ttl_s}))
            self._damaged.discard(path)
            return aside.replace(path)

    @contextmanager
    def _folder_errors(self, but: tuple[int, ...] = ()) -> Iterator[None]:
        """Turn errors of the file system into `NamesError`, except for those with a number in `but`."""
        try:
            yield
        except OSError as error:
            if error.errno in but:
                raise
            raise NamesError(
                f"the folder {self.folder}, through which processes of this run find each other, cannot be used: "
                f"{error.strerror}"
            ) from error

    def _path(self, name: str) -> Path:
        return self.folder / _encode(name)


def _read_entry(path: Path) -> tuple[float, bytes]:
    """Return (time of the last renewal, content) of a regular file. Never waits, as a pipe would let it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_size > _MAX_ENTRY_BYTES:
            raise ValueError("not a small regular file")
        return state.st_mtime, os.read(descriptor, _MAX_ENTRY_BYTES)
    finally:
        os.close(descriptor)


def _encode(name: str) -> str:
    return name.replace("/", "@")


def elastic_names(run_dir: RunDir) -> FileNames:
    """Return the names of servers that joined a running job: restarted, pooled, or started by hand."""
    return FileNames(run_dir.names / "elastic", _ELASTIC_TTL_S)


def wait_for_names(
    names: FileNames, wanted: list[str], timeout_s: float, waiter: str, pause: Callable[[float], object] = time.sleep
) -> dict[str, str]:
    """Wait until all these names live; returns them in this order.

    Raises `WaitTimeout` with the missing ones.

    `waiter` names the caller in the error. `pause` is called between two polls; a caller with other work does it there.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        living = names.list(os.path.commonpath(wanted)) if wanted else {}
        missing = [name for name in wanted if name not in living]
        if not missing:
            return {name: living[name] for name in wanted}
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"{waiter} waited {timeout_s:.0f} s for {len(wanted)} names; missing: {', '.join(missing)}"
            )
        names.renew()
        with activity.doing(f"{waiter} waits for {', '.join(missing)}"):
            activity.tick()
            pause(_POLL_INTERVAL_S)
