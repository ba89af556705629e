"""The run directory `{fileroot}/{experiment_name}/{trial_name}/`: every path that a run writes to.

All code that writes or reads run files takes its paths from `RunDir`. Making a `RunDir` creates no folder; `create()`
does.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.utils.config import to_yaml

logger = logging.getLogger("arealite.rundir")
# A lock on a shared folder cannot notify: it is polled.
_POLL_INTERVAL_S = 0.1
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
        self.curve_path = path / "reward.png"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.recover = path / "recover"
        self.tensorboard = path / "tensorboard"
        # Where processes of this run publish their addresses.
        self.names = path / "names"
        # Where weights pass from the trainer to servers: by disk, and in shared memory. The second name depends only on
        # the path, so a restarted trainer reuses what a killed one left.
        self.weights = path / "weights"
        key = hashlib.sha256(str(path).encode()).hexdigest()[:16]
        self.shared_weights = Path("/dev/shm") / f"arealite-{key}"

    def create(self, config: BaseExperimentConfig | None = None) -> RunDir:
        """Make the folders and, if a configuration is given, write config.yaml."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            if config is not None:
                has_key = getattr(getattr(config, "server", None), "api_key", None) is not None
                write_file(self.config_path, to_yaml(config), private=has_key)
        except OSError as error:
            raise self.unwritable(error) from error
        return self

    def unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot write to the run directory {self.path}: {error.strerror}; free space there, or set "
            "cluster.fileroot to a folder you can write"
        )

    @contextmanager
    def lock(self, wait_s: float = 0.0) -> Iterator[int]:
        """Hold the lock of this run directory against other runs; yields the lock's file descriptor.

        The kernel releases the lock when all processes that inherited the descriptor are gone.
        """
        try:
            descriptor = os.open(self.create().path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self.unwritable(error) from error
        try:
            self._acquire(descriptor, time.monotonic() + wait_s)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def _acquire(self, descriptor: int, deadline: float) -> None:
        """Take the lock. Waits until the deadline if its owner is gone: its processes may still be ending."""
        pause = threading.Event()
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(descriptor, 200, 0).decode(errors="replace")
                if _is_running_here(owner) or time.monotonic() > deadline:
                    raise ConfigError(
                        f"another run uses {self.path} ({owner}): wait for its end, stop it, or use another trial_name"
                    ) from None
            except OSError as error:
                return logger.warning(
                    "%s does not support locks (%s): make sure that no other run uses it", self.path, error.strerror
                )
            pause.wait(_POLL_INTERVAL_S)


def _is_running_here(owner: str) -> bool:
    """Whether `process 123 on host` is running on this machine."""
    words = owner.split()
    if len(words) != 4 or words[3] != os.uname().nodename:
        return False
    try:
        return psutil.Process(int(words[1])).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_path(fileroot: str, experiment_name: str, trial_name: str) -> Path:
    """Return the path of the run with these names."""
    for key, name in (("experiment_name", experiment_name), ("trial_name", trial_name)):
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{key}={name!r} becomes a folder name: use letters, digits, '.', '_' and '-'")
    return Path(fileroot).expanduser().absolute() / experiment_name / trial_name


def write_file(path: Path, text: str, private: bool) -> None:
    """Replace a file as a whole. Only its owner can read a private file."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    aside.replace(path)
