"""A job: one script, its configuration and its nodes, in the form that launchers pass to every node.

Saved as job.json in the run directory. Each node computes the same placement from it. The API key of the servers is not
part of it: the key is in a file that only the run's owner can read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import shlex
import signal
import sys
import threading
import time
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from arealite.api.backends import API_KEY_ENV, BACKENDS, KEY_REFERENCE
from arealite.api.config_field import check_section
from arealite.api.errors import ConfigError, WaitTimeout
from arealite.launcher.launch_config import LaunchConfig
from arealite.launcher.output import lasting_output
from arealite.launcher.placement import Placement, cluster_slots, make_placement
from arealite.launcher.supervisor import INTERRUPTED
from arealite.utils.activity import activity
from arealite.utils.names import FileNames
from arealite.utils.process import ATTEMPT_ENV, CONTROLLER_ENV, tail
from arealite.utils.rundir import RunDir, list_complete, run_path, write_file
from arealite.utils.startup import LAUNCHED_ENV, process_began
from arealite.utils.status.writer import clear_status
from arealite.utils.text import clean_stream, text_decoder

# How long processes of a killed run may take to end, besides their grace period.
_ENDING_S = 5.0
_KEY = "server.api_key="
# A key that a launcher has made, not one that a user has set.
_MADE_KEY = re.compile("[0-9a-f]{32}")
# By this name a launcher elsewhere asks nodes to save a checkpoint and end; its value is the number of the signal.
STOP_NAME = "stop"
# The error of a node that ends because of another one.
SEE_NODE = "node {} failed; see its log"
# Characters of a log's last line in a message.
_MAX_LINE = 160


def resume_command() -> str:
    """Return the command of this process with `recover.mode=auto`, without the API key."""
    kept = [a for a in sys.orig_argv if not a.startswith((_KEY, "recover.mode="))]
    return f"{shlex.join(kept)} recover.mode=auto"


@lasting_output()
def name_checkpoint(job: Job, code: int) -> None:
    """After a signal, print the newest recover checkpoint and the command that continues it."""
    saved = list_complete(job.run_dir.recover)
    if code in INTERRUPTED and saved:
        print(f"the newest recover checkpoint is {saved[0]}\nresume with: {job.resume}", flush=True)


def named_cause(error: str) -> int | None:
    """Return the node that the last error of a node names as the cause; None if it failed itself."""
    found = re.match(SEE_NODE.format("(-?[0-9]+)"), error)
    return int(found[1]) if found else None


def _is_running_here(holder: str) -> bool:
    """Whether `process 123 on host` is running on this machine."""
    words = holder.split()
    if len(words) < 4 or words[3] != os.uname().nodename:
        return False
    try:
        return psutil.Process(int(words[1])).status() != psutil.STATUS_ZOMBIE
    # A damaged lock file may name any number.
    except (psutil.Error, ValueError, OverflowError):
        return False


class LogFollower:
    """Copies what is appended to a log file to the console, as clean text."""

    def __init__(self, path: Path):
        self.path = path
        self._decoder = text_decoder()
        self._start = self.position = path.stat().st_size if path.exists() else 0

    def copy(self) -> None:
        """Print what was appended since the last call."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.position)
                sys.stdout.write(clean_stream(self._decoder.decode(file.read())))
                if file.tell() > self.position:
                    activity.note_output()
                self.position = file.tell()
            sys.stdout.flush()

    def describe_start(self, state: str, other_log: Path) -> str:
        """Say what the job does until this log has a line, with the last line of the log of what starts it."""
        if self.position > self._start:
            return ""
        last = tail(other_log, lines=1).strip()[:_MAX_LINE]
        return f"{state}; rank 0 has not started yet; {other_log} ends with: {last}"


class StopEvent(threading.Event):
    """Set by SIGINT and SIGTERM in a `with` block: libraries such as Ray may lose an exception.

    The first signal asks for a checkpoint and an end, the second for an end at once.
    """

    number = 0
    count = 0

    def __enter__(self) -> StopEvent:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        self.number = self.number or number
        self.count += 1
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
    # The command of the launcher that continues this job.
    resume: str = field(default_factory=resume_command)
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    # When the command began that this process runs, as `time.time()`. Not saved: other processes begin with themselves.
    began: float = field(default_factory=process_began)

    @classmethod
    def on_cluster(cls, config: LaunchConfig, script: str | Path, argv: list[str]) -> Job:
        """Make a job for other machines, which need the script's absolute path."""
        path = str(Path(script).absolute()) if str(script).endswith(".py") else str(script)
        return cls(config, path, argv, *cluster_slots(config))

    def __post_init__(self) -> None:
        cluster = self.config.cluster
        root = (Path(self.cwd) / Path(cluster.fileroot).expanduser()).absolute()
        self.config.cluster = dataclasses.replace(cluster, fileroot=str(root))
        self._protect_servers()

    def _protect_servers(self) -> None:
        """Make an API key unless there is one, and remove a given one from the arguments.

        Arguments become command lines, which every user can read. Without a key, every user of the machine could read
        what servers generate, and replace their weights.
        """
        server = self.config.server
        key, host = server.api_key or os.environ.get(API_KEY_ENV), server.host
        if not self.config.server_addrs:
            key = key or self._earlier_key() or secrets.token_hex(16)
            # Other machines must reach the servers.
            host = "0.0.0.0" if len(self.devices) > 1 and host == "127.0.0.1" else host
        self.config.server = dataclasses.replace(server, host=host, api_key=key)
        check_section("server", self.config.server)
        self.argv = [f"{_KEY}{KEY_REFERENCE}" if a.startswith(_KEY) else a for a in self.argv]
        if server.api_key and any(a.startswith("server=") and "api_key" in a for a in self.argv):
            raise ConfigError(f"`server={{api_key: …}}` shows the key to all users: set {_KEY}… or {API_KEY_ENV}")

    def _earlier_key(self) -> str | None:
        """Return the key that an earlier run here has made: servers that joined it by hand know no other."""
        try:
            key = self.run_dir.read_key() or ""
        except ConfigError:
            return None
        return key if _MADE_KEY.fullmatch(key) else None

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
        """Return the script's command line."""
        target = [self.script] if self.script.endswith(".py") else ["-m", self.script]
        return [sys.executable, *target, *self.argv]

    def rank_env(self, servers: list[str], master: str, local_world_size: int) -> dict[str, str]:
        """Return the variables of all ranks, which find each other at `master`."""
        placement = self.placement()
        host, port = master.rsplit(":", 1)
        env = {
            "WORLD_SIZE": str(len(placement.ranks)),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "AREALITE_SERVER_ADDRS": ",".join(servers),
            "AREALITE_NAMES": str(self.names_folder),
            ATTEMPT_ENV: str(self.attempt),
            LAUNCHED_ENV: str(self.began),
            "OMP_NUM_THREADS": str(placement.threads),
            "PYTHONUNBUFFERED": "1",
        }
        if self.config.server.api_key:
            env[API_KEY_ENV] = self.config.server.api_key
        if placement.engines:
            env |= {CONTROLLER_ENV: str(self.path), "CUDA_VISIBLE_DEVICES": ""}
        return env

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

    @lasting_output()
    def announce(self) -> None:
        """Print the run directory."""
        print(f"run directory: {self.run_dir.path}", flush=True)

    def save(self) -> Path:
        """Write config.yaml, job.json and the key; returns the path of job.json."""
        with self.lock():
            self._keep_earlier_run()
            clear_status(self.run_dir.path)
            self.run_dir.write_key(self.config.server.api_key)
            values = dataclasses.asdict(self)
            del values["began"]
            values["config"]["server"]["api_key"] = None
            try:
                write_file(self.run_dir.config_path, self.config.resolved_yaml, private=False)
                write_file(self.path, json.dumps(values, indent=1), private=True)
            except OSError as error:
                raise self.run_dir.unwritable(error) from error
        return self.path

    def _keep_earlier_run(self) -> None:
        """Move the results of an earlier run of this name aside, unless this job continues it."""
        run_dir, mode = self.run_dir, self.config.recover.mode
        if self.attempt > 0 or mode == "resume" or (mode == "auto" and run_dir.has_recover_checkpoint()):
            return
        moved = run_dir.earlier_results()
        for key, path in self.config.model_paths.items():
            if any(Path(path).absolute().is_relative_to(folder) for folder in moved):
                raise ConfigError(
                    f"{key}={path} is part of an earlier run of the same name: use another trial_name for this one"
                )
        try:
            kept = run_dir.keep_earlier_results()
        except OSError as error:
            raise run_dir.unwritable(error) from error
        if kept is not None:
            print(f"note: the earlier run of this name is kept in {kept}", flush=True)

    def lock(self) -> AbstractContextManager[int]:
        """Lock the run directory. Waits for processes that are still ending, of a killed run or of this job."""
        began, has_printed, name = time.monotonic(), False, f"of job {self.id}"

        def waits_for(holder: str) -> bool:
            nonlocal has_printed
            waited_s, limit_s = time.monotonic() - began, self.config.launcher.stop_timeout_s + _ENDING_S
            if not holder.endswith(f" {name}"):
                return waited_s < limit_s and not _is_running_here(holder)
            # A node of an earlier attempt, or one that Ray has given up: it ends when it notices that.
            limit_s = max(limit_s, self.config.setup_timeout_s)
            if waited_s > limit_s:
                raise WaitTimeout(
                    f"processes of an earlier start of this job have not ended within {limit_s:.0f} s "
                    f"(rollout.setup_timeout_s) and use {self.run_dir.path} ({holder}): end them, and resume with: "
                    f"{self.resume}"
                )
            if not has_printed:
                print(f"waiting for processes of this job that are still ending ({holder})", flush=True)
            has_printed = True
            return True

        return self.run_dir.lock(waits_for, name)

    def ask_to_stop(self, number: int) -> None:
        """Ask the nodes of all attempts to save a checkpoint and end, after a signal with this number."""
        print("stopping: a checkpoint is saved after this step (a second signal ends at once, without one)", flush=True)
        for folder in self.run_dir.names.glob(f"{self.id}-*"):
            FileNames(folder).publish(STOP_NAME, str(number))

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read a saved job, with its key."""
        run_dir = RunDir(Path(path).parent)
        try:
            values = json.loads(Path(path).read_text())
            node = OmegaConf.merge(OmegaConf.structured(LaunchConfig), values.pop("config"))
            config = OmegaConf.to_object(node)
            assert isinstance(config, LaunchConfig)
            key = run_dir.read_key()
            if key is None and not config.server_addrs:
                raise ConfigError(f"there is no API key in {run_dir.key_path}")
            config.server = dataclasses.replace(config.server, api_key=key)
            return cls(config=config, **values)
        except (OSError, ValueError, TypeError, AttributeError, KeyError, OmegaConfBaseException) as error:
            raise ConfigError(f"cannot read the job {path}: {error}") from error
