"""The run directory `{fileroot}/{experiment_name}/{trial_name}/`: every path that a run writes to, and no other.

Everybody who writes takes the path from here; `report` and `dashboard` read the same ones. Making a `RunDir` makes no folder:
`create()` does.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.utils.config import to_yaml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class RunDir:
    """Paths of one run. Give a configuration, or the path of a run that exists."""

    def __init__(self, where: BaseExperimentConfig | str | Path):
        if isinstance(where, str | Path):
            self.path = Path(where).absolute()
            return
        for key in ("experiment_name", "trial_name"):
            if not _NAME.fullmatch(getattr(where, key)):
                raise ConfigError(
                    f"{key}={getattr(where, key)!r} becomes a folder: use letters, digits, '.', '_' and '-'"
                )
        root = Path(where.cluster.fileroot).expanduser().absolute()
        self.path = root / where.experiment_name / where.trial_name

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def stats_path(self) -> Path:
        return self.path / "stats.jsonl"

    @property
    def db_path(self) -> Path:
        return self.path / "run.sqlite"

    @property
    def trace_path(self) -> Path:
        return self.path / "trace.json"

    @property
    def curve_path(self) -> Path:
        return self.path / "reward.png"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def recover(self) -> Path:
        return self.path / "recover"

    @property
    def weights(self) -> Path:
        """Where weights pass from trainer to servers by disk."""
        return self.path / "weights"

    @property
    def shared_weights(self) -> Path:
        """The same in shared memory, under a name that is the run's own: a restarted trainer takes over what a killed one left."""
        key = hashlib.sha256(str(self.path).encode()).hexdigest()[:16]
        return Path("/dev/shm") / f"arealite-{key}"

    @property
    def names(self) -> Path:
        """Where processes of this run publish their addresses."""
        return self.path / "names"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def create(self, config: BaseExperimentConfig | None = None) -> RunDir:
        """Make the folders and, if a configuration is given, write it as resolved."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            if config is not None:
                self.config_path.write_text(to_yaml(config))
        except OSError as error:
            raise ConfigError(
                f"cannot write to the run directory {self.path}: {error.strerror}; set cluster.fileroot to a folder you can write"
            ) from error
        return self
