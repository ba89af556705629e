"""A job: one script, its configuration and the nodes it runs on, as every launcher hands it to every node.

Written as job.json into the run directory (readable by its owner alone: it may hold the servers' key). Each node makes the same plan from it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shlex
import signal
import sys
import threading
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf

from arealite.api.errors import ConfigError
from arealite.launcher.launch_config import LaunchConfig
from arealite.launcher.placement import Placement, cluster_slots, make_placement
from arealite.launcher.servers import server_command
from arealite.utils.rundir import RunDir, run_path

_ENDING_S = 5.0


class Follower:
    """Copies what is appended to a log on the shared folder to the console."""

    def __init__(self, path: Path):
        self.path = path
        self.position = path.stat().st_size if path.exists() else 0

    def copy(self) -> None:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.position)
                sys.stdout.write(file.read().decode(errors="replace"))
                self.position = file.tell()
            sys.stdout.flush()


class Stop(threading.Event):
    """Set by SIGINT and SIGTERM within its `with` block, instead of raising out of the middle of somebody else's code, where it may be lost."""

    number = 0

    def __enter__(self) -> Stop:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._handlers = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.number = self.number or number
        self.set()


@dataclass
class Job:
    """What to run and on what. `devices` lists each node's devices (places for processes where there are none)."""

    config: LaunchConfig
    script: str
    argv: list[str]
    devices: list[list[int]]
    on_gpu: bool
    attempt: int = 0
    cwd: str = field(default_factory=os.getcwd)
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @classmethod
    def on_cluster(cls, config: LaunchConfig, script: str | Path, argv: list[str]) -> Job:
        """A job on machines that know neither this folder nor each other."""
        path = str(Path(script).absolute()) if str(script).endswith(".py") else str(script)
        return cls(config, path, argv, *cluster_slots(config))

    def __post_init__(self) -> None:
        cluster = self.config.cluster
        root = (Path(self.cwd) / Path(cluster.fileroot).expanduser()).absolute()
        self.config.cluster = dataclasses.replace(cluster, fileroot=str(root))
        server = self.config.server
        if len(self.devices) > 1 and server.host == "127.0.0.1":
            # Other machines must reach the servers; then they ask for a key.
            key = server.api_key or secrets.token_hex(16)
            self.config.server = dataclasses.replace(server, host="0.0.0.0", api_key=key)

    @property
    def run_dir(self) -> RunDir:
        config = self.config
        return RunDir(run_path(config.cluster.fileroot, config.experiment_name, config.trial_name))

    @property
    def path(self) -> Path:
        return self.run_dir.path / "job.json"

    @property
    def names_folder(self) -> Path:
        """Of this attempt alone: what an earlier one left there means nothing."""
        return self.run_dir.names / f"{self.id}-{self.attempt}"

    def placement(self) -> Placement:
        return make_placement(self.config, self.devices, self.on_gpu)

    def command(self) -> list[str]:
        """The script's command line."""
        target = [self.script] if self.script.endswith(".py") else ["-m", self.script]
        return [sys.executable, *target, *self.argv]

    def describe(self) -> str:
        """What would be started, and where."""
        placement = self.placement()
        lines = [f"run directory {self.run_dir.path}", placement.describe()]
        if placement.mode.gen_backend is not None:
            command = server_command(self.config, placement.mode.gen_backend, self.config.server.port)
            lines.append(f"each server: {shlex.join(command)}")
        who = "the driver: " if placement.engines else "each rank:   "
        lines.append(f"{who}{shlex.join(self.command())}")
        lines.append(f"threads per process: {placement.threads}")
        return "\n".join(lines)

    def save(self) -> Path:
        """Write config.yaml and job.json; returns the latter."""
        with self.held():
            try:
                self.run_dir.config_path.write_text(self.config.resolved_yaml)
                self.path.unlink(missing_ok=True)
                descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    json.dump(dataclasses.asdict(self), file, indent=1)
            except OSError as error:
                raise self.run_dir.unwritable(error) from error
        return self.path

    def held(self) -> AbstractContextManager[int]:
        """The run directory for this job alone; what a killed one left there has its time to end."""
        return self.run_dir.held(self.config.launcher.stop_timeout_s + _ENDING_S)

    @classmethod
    def load(cls, path: str | Path) -> Job:
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the job {path}: {error}") from error
        node = OmegaConf.merge(OmegaConf.structured(LaunchConfig), values.pop("config"))
        config = OmegaConf.to_object(node)
        assert isinstance(config, LaunchConfig)
        return cls(config=config, **values)
