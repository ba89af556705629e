"""The run directory `{fileroot}/{experiment_name}/{trial_name}/`: every path that a run writes to.

All code that writes or reads run files takes its paths from `RunDir`. Making a `RunDir` creates no folder; `create()`
does.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import re
import secrets
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.utils.config import public_yaml
from arealite.utils.text import clean
from arealite.utils.trace.trace_file import older_path

logger = logging.getLogger("arealite.rundir")
# A lock on a shared folder cannot notify: it is polled.
_POLL_INTERVAL_S = 0.1
_SEGMENT = re.compile(r"arealite-[0-9a-f]{32}")
_RUN_HINT = "give the folder of a run, {cluster.fileroot}/{experiment_name}/{trial_name}"
# The file of a recover checkpoint that is written last, and the name of one that is being replaced.
CHECKPOINT_STATE, CHECKPOINT_REPLACED = "state.json", "replaced"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class RunDir:
    """Paths of one run, from its configuration or from the path of an existing run directory."""

    def __init__(self, where: BaseExperimentConfig | str | Path):
        if not isinstance(where, str | Path):
            where = run_path(where.cluster.fileroot, where.experiment_name, where.trial_name)
        self.path = path = Path(where).absolute()
        self.config_path = path / "config.yaml"
        self.stats_path = path / "stats.jsonl"
        self.db_path = path / "run.sqlite"
        self.trace_path = path / "trace.json"
        # What `arealite replay` reads.
        self.record = path / "record"
        self.curve_path = path / "reward.png"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.recover = path / "recover"
        self.evaluations = path / "evaluations"
        # Images of prompts, which rollouts in the ledger name by their hash.
        self.rollouts = path / "rollouts"
        self.tensorboard = path / "tensorboard"
        # Where processes of this run publish their addresses.
        self.names = path / "names"
        # What only the owner of the run may read. `key_path` holds the API key that the run's servers require.
        self.private = path / "private"
        self.key_path = self.private / "api_key"
        # Where weights pass from the trainer to servers by disk.
        self.weights = path / "weights"

    def create(self, config: BaseExperimentConfig | None = None) -> RunDir:
        """Make the folders and, if a configuration is given, write config.yaml."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            _take_folder(self.path, 0o7775)
            make_private_folder(self.names)
            if config is not None:
                write_file(self.config_path, public_yaml(config), private=False)
        except OSError as error:
            raise self.unwritable(error) from error
        return self

    def check(self) -> None:
        """Raise `ConfigError` if no run has written here; the message names runs in folders below."""
        if not self.path.is_dir():
            raise ConfigError(f"there is no run directory {self.path}: {_RUN_HINT}")
        if any(path.exists() for path in (self.config_path, self.stats_path, self.db_path)):
            return
        below = sorted({path.parent for depth in ("*", "*/*") for path in self.path.glob(f"{depth}/config.yaml")})
        names = ", ".join(os.path.relpath(path) for path in below[:5])
        hint = f". Runs below it: {names}{', …' if len(below) > 5 else ''}" if below else f": {_RUN_HINT}"
        raise ConfigError(f"{self.path} is not a run directory: it has no {self.config_path.name}{hint}")

    def write_key(self, key: str | None) -> None:
        """Keep the API key of this run where only its owner can read it; None removes it."""
        try:
            make_private_folder(self.private)
            if key is None:
                self.key_path.unlink(missing_ok=True)
            else:
                write_file(self.key_path, key, private=True)
        except OSError as error:
            raise self.unwritable(error) from error

    def read_key(self) -> str | None:
        """Return the API key of this run; None if it has none."""
        try:
            return self.key_path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API key of the run in {self.key_path}: {error}") from error

    @property
    def shared_weights(self) -> Path:
        """Where weights pass from the trainer to servers in shared memory; chosen at the first use.

        The name is random, so that no other user can take it before. It is kept in the run directory, so that a
        restarted trainer replaces what a killed one left. A name that was taken nevertheless is given up, and so is the
        one in a copy of a run directory: the original run may still use it.
        """
        file = self.private / "segment"
        try:
            make_private_folder(self.private)
            folder = str(self.private.stat().st_ino)
            name, _, owner = file.read_text(errors="replace").partition(" ") if file.exists() else ("", "", "")
            path = Path("/dev/shm") / name
            if owner != folder or not _SEGMENT.fullmatch(name) or not _is_free_or_ours(path):
                path = Path("/dev/shm") / f"arealite-{secrets.token_hex(16)}"
                write_file(file, f"{path.name} {folder}", private=True)
        except OSError as error:
            raise self.unwritable(error) from error
        return path

    def answers_path(self, version: int, set_name: str) -> Path:
        """Return the file with the answers of an evaluation that began at a weight version."""
        return self.evaluations / f"step{version:06d}" / f"{set_name}.jsonl"

    def unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot write to the run directory {self.path}: {error.strerror}; free space there, or set "
            "cluster.fileroot to a folder you can write"
        )

    def has_recover_checkpoint(self) -> bool:
        """Whether there is a recover checkpoint from which a run can continue."""
        # A crash may have left one that was being replaced; the next run puts it back.
        replaced = self.recover.glob(f"{CHECKPOINT_REPLACED}*/{CHECKPOINT_STATE}")
        return bool(list_complete(self.recover)) or any(replaced)

    def earlier_results(self) -> list[Path]:
        """Return what a run of this name has left here; empty if there was none."""
        files = (self.stats_path, self.db_path, self.trace_path, self.curve_path, self.config_path)
        files = (*files, older_path(self.trace_path))
        folders = (self.checkpoints, self.recover, self.tensorboard, self.evaluations, self.record, self.rollouts)
        # SQLite keeps two more files beside a database.
        paths = [*files, *folders, *(self.db_path.with_name(f"{self.db_path.name}-{end}") for end in ("wal", "shm"))]
        return [p for p in paths if p.exists()] if self.stats_path.exists() or self.db_path.exists() else []

    def keep_earlier_results(self) -> Path | None:
        """Move what a run of this name has left to `earlier/N`, under the lock; returns that folder."""
        results = self.earlier_results()
        if not results:
            return None
        kept = make_new_folder(self.path / "earlier" / str(number) for number in itertools.count(1))
        for path in results:
            path.rename(kept / path.name)
        return kept

    @contextmanager
    def lock(self, waits_for: Callable[[str], bool] = lambda holder: False, job: str = "") -> Iterator[int]:
        """Hold the lock of this run directory against other runs; yields the lock's file descriptor.

        The kernel releases the lock when all processes that inherited the descriptor are gone. `waits_for` is asked
        whether to wait for a holder: `process 123 on host`, followed by the `job` that it gave.
        """
        try:
            descriptor = self._open_lock(self.create().path / "lock")
        except OSError as error:
            raise self.unwritable(error) from error
        try:
            self._acquire(descriptor, waits_for)
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename} {job}".strip().encode(), 0)
            except OSError as error:
                # A full disk: the lock itself holds.
                logger.warning("cannot write the owner of the lock of %s: %s", self.path, error.strerror)
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_lock(self, path: Path) -> int:
        """Open the lock file, or make it. Replaces anything that is no regular file; a folder is an error."""
        if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
            logger.warning("%s is not a regular file: replacing it", path)
            path.unlink(missing_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)

    def is_in_use(self) -> bool:
        """Whether a launcher runs a job in this run directory."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        # The file system has no locks.
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False

    def _acquire(self, descriptor: int, waits_for: Callable[[str], bool]) -> None:
        """Take the lock; raises if another process holds it that is not waited for."""
        pause = threading.Event()
        # `is_in_use` of another process holds it for a moment.
        first_deadline = time.monotonic() + 2 * _POLL_INTERVAL_S
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = clean(os.pread(descriptor, 200, 0).decode(errors="replace"))
                if time.monotonic() > first_deadline and not waits_for(owner):
                    raise ConfigError(
                        f"another run uses {self.path} ({owner}): wait for its end, stop it, or use another trial_name"
                    ) from None
            except OSError as error:
                return logger.warning(
                    "%s does not support locks (%s): make sure that no other run uses it", self.path, error.strerror
                )
            pause.wait(_POLL_INTERVAL_S)


def _is_free_or_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def list_complete(recover: Path) -> list[Path]:
    """Return the finished checkpoints of a folder `recover`, the newest first."""
    # A copy such as `step000004.bak` is not one.
    named = [path for path in recover.glob("step*") if path.name.removeprefix("step").isdecimal()]
    finished = [path for path in named if (path / CHECKPOINT_STATE).is_file()]
    return sorted(finished, key=lambda path: int(path.name.removeprefix("step")), reverse=True)


def run_path(fileroot: str, experiment_name: str, trial_name: str) -> Path:
    """Return the path of the run with these names."""
    for key, name in (("experiment_name", experiment_name), ("trial_name", trial_name)):
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{key}={name!r} becomes a folder name: use letters, digits, '.', '_' and '-'")
    return Path(fileroot).expanduser().absolute() / experiment_name / trial_name


def make_new_folder(names: Iterable[Path]) -> Path:
    """Make and return the first of these folders that does not exist."""
    for path in names:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise ConfigError("all of the given folders exist")


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner can enter; raises `ConfigError` if it is another user's."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _take_folder(path, 0o700)


def _take_folder(path: Path, allowed: int) -> None:
    """Reduce a folder's permissions to the allowed ones; raises `ConfigError` if it is another user's.

    Another user could replace what is in it. Compares with a file made there: a shared file system may map users.
    """
    with tempfile.TemporaryFile(dir=path) as probe:
        ours = os.fstat(probe.fileno()).st_uid
    for state in (path.lstat(), path.stat()):
        if state.st_uid != ours:
            raise ConfigError(
                f"{path} belongs to another user (uid {state.st_uid}), who could change the files of this run: use "
                "another trial_name or cluster.fileroot"
            )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & ~allowed:
        path.chmod(mode & allowed)


def write_file(path: Path, content: str | bytes, private: bool) -> None:
    """Replace a file as a whole. Only its owner can read a private file."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        aside.replace(path)
    except OSError:
        # On a full disk a part of the file would take the last space.
        aside.unlink(missing_ok=True)
        raise
