"""The run directory `{fileroot}/{experiment_name}/{trial_name}/`: every path that a run writes to, and no other.

Everybody who writes takes the path from here; `report` and `dashboard` read the same ones. Making a `RunDir` makes no folder:
`create()` does.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.utils.config import to_yaml
from arealite.utils.process import process_table

logger = logging.getLogger("arealite.rundir")
_LOOK_INTERVAL_S = 0.1  # a lock on a shared folder cannot call back
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class RunDir:
    """Paths of one run. Give a configuration, or the path of a run that exists."""

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
        self.names = path / "names"  # where processes of this run publish their addresses
        self.weights = path / "weights"  # where weights pass from trainer to servers by disk
        # The same in shared memory, under a name that is the run's own: a restarted trainer takes over what a killed one left.
        key = hashlib.sha256(str(path).encode()).hexdigest()[:16]
        self.shared_weights = Path("/dev/shm") / f"arealite-{key}"

    def create(self, config: BaseExperimentConfig | None = None) -> RunDir:
        """Make the folders and, if a configuration is given, write it as resolved."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            if config is not None:
                self.config_path.write_text(to_yaml(config))
        except OSError as error:
            raise self.unwritable(error) from error
        return self

    def unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot write to the run directory {self.path}: {error.strerror}; free space there, or set cluster.fileroot to a folder you can write"
        )

    @contextmanager
    def held(self, wait_s: float = 0.0) -> Iterator[int]:
        """Around a run: no other one may run here. Gives the lock's descriptor; the kernel lets go of it when all who have it are gone."""
        try:
            lock = os.open(self.create().path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self.unwritable(error) from error
        try:
            self._take(lock, time.monotonic() + wait_s)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
            yield lock
        finally:
            os.close(lock)

    def _take(self, lock: int, deadline: float) -> None:
        """What a killed run left may still be ending: that is waited for."""
        pause = threading.Event()
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 200, 0).decode(errors="replace")
                if _lives_here(holder) or time.monotonic() > deadline:
                    raise ConfigError(
                        f"a run is going on in {self.path} ({holder}): wait for its end, stop it, or give this one another trial_name"
                    ) from None
            except OSError as error:
                return logger.warning(
                    "%s has no locks (%s): mind that no other run is started there", self.path, error.strerror
                )
            pause.wait(_LOOK_INTERVAL_S)


def _lives_here(holder: str) -> bool:
    """Whether `process 123 on host` is running on this machine."""
    words = holder.split()
    if len(words) != 4 or words[3] != os.uname().nodename:
        return False
    info = process_table().get(int(words[1]))
    return info is not None and not info.zombie


def run_path(fileroot: str, experiment_name: str, trial_name: str) -> Path:
    """The path of the run that is so named."""
    for key, name in (("experiment_name", experiment_name), ("trial_name", trial_name)):
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{key}={name!r} becomes a folder: use letters, digits, '.', '_' and '-'")
    return Path(fileroot).expanduser().absolute() / experiment_name / trial_name
