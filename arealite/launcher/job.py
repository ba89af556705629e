"""A job: one script, its configuration and its nodes, in the form that launchers pass to every node.

Saved as job.json in the run directory, readable only by its owner because it may hold the servers' API key. Each node
computes the same placement from it.
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

from arealite.api.backends import API_KEY_ENV, BACKENDS
from arealite.api.errors import ConfigError
from arealite.launcher.launch_config import LaunchConfig
from arealite.launcher.placement import Placement, cluster_slots, make_placement
from arealite.utils.rundir import RunDir, run_path, write_file

# How long processes of a killed run may take to end, besides their grace period.
_ENDING_S = 5.0


class LogFollower:
    """Copies what is appended to a log file to the console."""

    def __init__(self, path: Path):
        self.path = path
        self.position = path.stat().st_size if path.exists() else 0

    def copy(self) -> None:
        """Print what was appended since the last call."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.position)
                sys.stdout.write(file.read().decode(errors="replace"))
                self.position = file.tell()
            sys.stdout.flush()


class StopEvent(threading.Event):
    """Set by SIGINT and SIGTERM in a `with` block: libraries such as Ray may lose an exception."""

    number = 0

    def __enter__(self) -> StopEvent:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        self.number = self.number or number
        self.set()


@dataclass
class Job:
    """What to run and where. `devices` lists the devices of each node, or slots if there are no GPUs."""

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
        """Make a job for other machines, which need the script's absolute path."""
        path = str(Path(script).absolute()) if str(script).endswith(".py") else str(script)
        return cls(config, path, argv, *cluster_slots(config))

    def __post_init__(self) -> None:
        cluster = self.config.cluster
        root = (Path(self.cwd) / Path(cluster.fileroot).expanduser()).absolute()
        self.config.cluster = dataclasses.replace(cluster, fileroot=str(root))
        server = self.config.server
        if len(self.devices) > 1 and server.host == "127.0.0.1" and not self.config.server_addrs:
            # Other machines must reach the servers, so the servers require a key.
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
        """Folder of this attempt's names; each attempt starts with an empty one."""
        return self.run_dir.names / f"{self.id}-{self.attempt}"

    def placement(self) -> Placement:
        return make_placement(self.config, self.devices, self.on_gpu)

    def command(self) -> list[str]:
        """Return the script's command line, with an environment variable in place of an API key."""
        target = [self.script] if self.script.endswith(".py") else ["-m", self.script]
        hidden = f"server.api_key=${{oc.env:{API_KEY_ENV}}}"
        argv = [hidden if a.startswith("server.api_key=") and self.config.server.api_key else a for a in self.argv]
        return [sys.executable, *target, *argv]

    def describe(self) -> str:
        """List what would be started, and where."""
        placement = self.placement()
        lines = [f"run directory {self.run_dir.path}", placement.describe()]
        if placement.servers and placement.mode.gen_backend:
            command = BACKENDS[placement.mode.gen_backend].command(self.config, self.config.server.port)
            lines.append(f"each server: {shlex.join(command)}")
        process = "the driver: " if placement.engines else "each rank:   "
        lines.append(f"{process}{shlex.join(self.command())}")
        lines.append(f"threads per process: {placement.threads}")
        return "\n".join(lines)

    def announce(self) -> None:
        """Print the run directory, and a note if the job runs differently from how it is written."""
        note = self.placement().note
        print(f"run directory: {self.run_dir.path}" + (f"\nnote: {note}" if note else ""), flush=True)

    def save(self) -> Path:
        """Write config.yaml and job.json; returns the path of job.json."""
        with self.lock():
            try:
                has_key = self.config.server.api_key is not None
                write_file(self.run_dir.config_path, self.config.resolved_yaml, private=has_key)
                write_file(self.path, json.dumps(dataclasses.asdict(self), indent=1), private=True)
            except OSError as error:
                raise self.run_dir.unwritable(error) from error
        return self.path

    def lock(self) -> AbstractContextManager[int]:
        """Lock the run directory. Waits for processes of a killed run that are still ending."""
        return self.run_dir.lock(self.config.launcher.stop_timeout_s + _ENDING_S)

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
