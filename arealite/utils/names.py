"""The name service: who is where, for processes on any number of machines. Entries are leases: what is not renewed expires.

`FileNames` keeps one small file per name on a folder that all machines share (the run directory). Ages are taken from the file server's
clock, so the machines' own clocks need not agree. Anything else with these methods (etcd, Redis, Ray) can take its place.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from arealite.api.errors import AReaLiteError, WaitTimeout
from arealite.utils.rundir import RunDir

DEFAULT_TTL_S = 30.0
ELASTIC_PREFIX, _ELASTIC_TTL_S = "server/", 6.0
# A shared folder cannot call back: this is how long news may take to be noticed.
_LOOK_INTERVAL_S = 0.2


class NamesError(AReaLiteError, OSError):
    """The folder of a name service is gone, full or not ours."""


class FileNames:
    """Names like `servers/3` with short values such as an address, as files. Published ones live until withdrawn, or `ttl_s` after their owner last called `renew`."""

    def __init__(self, folder: str | Path, ttl_s: float = DEFAULT_TTL_S):
        self.folder = Path(folder)
        self.ttl_s = ttl_s
        self._own: set[str] = set()
        self._renewed = 0.0
        self._probe = f".now-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        with self._using_the_folder():
            self.folder.mkdir(parents=True, exist_ok=True)

    def publish(self, name: str, value: str) -> None:
        """Set or replace a name; seen whole or not at all."""
        self._write(self._path(name), value)
        self._own.add(name)

    def claim(self, name: str, value: str) -> bool:
        """Set a name if nobody holds it; False if somebody does. At most one of many callers gets True."""
        path = self._path(name)
        if not self._bury(path):
            return False
        aside = self._write(path.with_name(f".{path.name}.{uuid.uuid4().hex}"), value)
        try:
            # fails if it exists: the one atomic test-and-set of a shared folder
            os.link(aside, path)
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        self._own.add(name)
        return True

    def withdraw(self, name: str) -> None:
        self._own.discard(name)
        self._path(name).unlink(missing_ok=True)

    def renew(self) -> None:
        """Keep what this process published; cheap, to be called often."""
        if time.monotonic() - self._renewed < self.ttl_s / 4:
            return
        self._renewed = time.monotonic()
        for name in self._own:
            try:
                os.utime(self._path(name))
            except FileNotFoundError:
                continue  # withdrawn by somebody else, such as a launcher cleaning up

    def get(self, name: str) -> str | None:
        """The value, or None if it was never published, withdrawn, or has expired."""
        return self._read(self._path(name), self._now())

    def list(self, prefix: str) -> dict[str, str]:
        """All living names that start with `prefix`, sorted."""
        now, paths = self._now(), sorted(self.folder.glob(f"{_encode(prefix)}*"))
        found = {p: self._read(p, now) for p in paths if not p.name.startswith(".")}
        return {p.name.replace("@", "/"): v for p, v in found.items() if v is not None}

    def close(self) -> None:
        """Withdraw everything this process published."""
        for name in list(self._own):
            self.withdraw(name)
        (self.folder / self._probe).unlink(missing_ok=True)

    def _bury(self, path: Path) -> bool:
        """Remove an entry that has expired. False if it lives, or if somebody else removes it: what stands there after that is theirs."""
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
        path.unlink(missing_ok=True)
        return True

    def _now(self) -> float:
        probe = self.folder / self._probe
        with self._using_the_folder():
            probe.touch()
            return probe.stat().st_mtime

    def _read(self, path: Path, now: float) -> str | None:
        try:
            age_s = now - path.stat().st_mtime
            entry = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return None  # withdrawn, or left empty by a machine that crashed
        return entry["value"] if age_s <= entry["ttl_s"] else None

    def _write(self, path: Path, value: str) -> Path:
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with self._using_the_folder():
            aside.write_text(json.dumps({"value": value, "ttl_s": self.ttl_s}))
            return aside.replace(path)

    @contextmanager
    def _using_the_folder(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NamesError(
                f"the folder {self.folder}, by which processes of this run find each other, cannot be used: {error.strerror}"
            ) from error

    def _path(self, name: str) -> Path:
        return self.folder / _encode(name)


def _encode(name: str) -> str:
    return name.replace("/", "@")


def elastic_names(run_dir: RunDir) -> FileNames:
    """Who joined a running job (a server that was started again, one of a pool, one by hand), under ELASTIC_PREFIX."""
    return FileNames(run_dir.names / "elastic", _ELASTIC_TTL_S)


def wait_for_names(
    names: FileNames, wanted: list[str], timeout_s: float, who: str, pause: Callable[[float], object] = time.sleep
) -> dict[str, str]:
    """Wait until all these names live; returns them in this order. Raises `WaitTimeout` that says which are missing.

    `pause` is called between two looks: whoever has other duties sees to them there.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        living = names.list(os.path.commonpath(wanted)) if wanted else {}
        missing = [name for name in wanted if name not in living]
        if not missing:
            return {name: living[name] for name in wanted}
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"{who} waited {timeout_s:.0f} s for {len(wanted)} names; not there: {', '.join(missing)}"
            )
        names.renew()
        pause(_LOOK_INTERVAL_S)
