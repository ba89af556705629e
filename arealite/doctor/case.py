"""`Case`: everything that is collected about a run. `Finding`: one thing that is wrong with it."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from arealite.utils.status.writer import pid_space

HERE = os.uname().nodename
PID_SPACE = pid_space()
# Files are written every five seconds.
LATE_FILE_S = 20.0


@dataclass
class Proc:
    """What the kernel says about a process. `state` is the letter of /proc/PID/stat."""

    state: str
    rss_bytes: int = 0
    swap_bytes: int = 0
    virtual_bytes: int = 0
    virtual_limit: int | None = None


@dataclass
class Process:
    """One process of the run, with the last status that is known of it."""

    name: str
    role: str
    pid: int
    host: str
    started: float
    status: dict[str, Any]
    # None: it is gone, or on another machine.
    proc: Proc | None = None
    # What its launcher saw; negative after a signal. None while it runs, or without a launcher.
    exit_code: int | None = None
    # Whether the status was read from its memory, and how old status and file are.
    is_live: bool = False
    age_s: float = 0.0
    file_age_s: float | None = None
    clock_skew_s: float = 0.0
    cpu_share: float = 0.0
    major_faults_per_s: float = 0.0
    tokens_per_s: float | None = None
    stacks: str = ""

    @property
    def is_local(self) -> bool:
        """Whether its pid means this process here: the same machine, not another container on it."""
        return self.host == HERE and self.status.get("pid_space", PID_SPACE) == PID_SPACE

    @property
    def key(self) -> tuple[str, str, int]:
        """What no two processes of a run share."""
        return self.host, str(self.status.get("pid_space", "")), self.pid

    @property
    def where(self) -> str:
        """` on HOST` for a process of another machine, for sentences."""
        return "" if self.is_local else f" on {self.host}"

    @property
    def engine(self) -> str:
        """In controller mode the engine that a rank belongs to (actor.rank0); empty for ordinary ranks."""
        return self.name.rpartition(".")[0] if self.role == "trainer" else ""

    @property
    def has_ended(self) -> bool:
        """Whether it said that it ended."""
        return "ended" in self.status

    @property
    def is_dead(self) -> bool:
        """Whether it is gone without having said so: seen here, or by its launcher."""
        is_gone = self.exit_code is not None or (self.is_local and self.proc is None)
        return is_gone and not self.has_ended

    @property
    def is_running(self) -> bool:
        return self.proc is not None if self.is_local else not self.has_ended and self.exit_code is None

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger: its waits are those of the moment before."""
        return self.proc is not None and self.proc.state in "Tt"

    @property
    def is_silent(self) -> bool:
        """Whether it is on another machine and has not written its file for long: what it says is old."""
        return not self.is_local and self.age_s > LATE_FILE_S

    @property
    def waits(self) -> list[dict[str, Any]]:
        """Its open waits, the oldest first. Ages are counted until now."""
        found = self.status.get("waits")
        entries = [wait for wait in found if isinstance(wait, dict)] if isinstance(found, list) else []
        return [{**wait, "age_s": float(wait.get("age_s", 0)) + self.age_s} for wait in entries]

    def part(self, name: str) -> dict[str, Any]:
        """Return a mapping of its status; empty if it has none."""
        found = self.status.get(name)
        return found if isinstance(found, dict) else {}

    def parts(self, name: str) -> list[dict[str, Any]]:
        """Return a list of mappings of its status."""
        found = self.status.get(name)
        return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


@dataclass
class Finding:
    """A cause: what it is, by what it is seen, what to do. `kind` is a fixed word for programs.

    `blames` names the processes at fault, where single ones are.
    """

    kind: str
    verdict: str
    evidence: list[str]
    remedy: str
    blames: tuple[str, ...] = ()


@dataclass
class Case:
    """A run as the doctor sees it. Waits longer than `patience_s` are worth a look."""

    run_dir: Path
    patience_s: float
    processes: list[Process] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # The present time by the clock of the run directory's file system.
    folder_clock: float = 0.0
    probe_error: str = ""
    # Whether this user or mount may only read the directory: the run itself may be able to write.
    is_probe_refused: bool = False
    probe_s: float = 0.0
    disks: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    # Why the health check of a server failed, by address; empty if it passed.
    health: dict[str, str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)

    def role(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role]

    @property
    def trainer(self) -> Process | None:
        """Rank 0, or the driver of controller mode; the first rank that is known without it."""
        ranks = sorted(self.role("trainer"), key=lambda p: (p.engine, p.status.get("rank") or 0))
        return ranks[0] if ranks else None

    @property
    def collector(self) -> Process | None:
        """The process that runs the executor: rank 0, in controller mode the rollout's actor."""
        return next((process for process in self.role("trainer") if process.part("executor")), None)

    def long_waits(self, *kinds: str) -> Iterator[tuple[Process, dict[str, Any]]]:
        """Yield (process, wait) of the running processes, beyond the patience."""
        for process in self.processes:
            if process.is_running and not process.is_silent and not process.is_stopped:
                for wait in process.waits:
                    if wait.get("kind") in kinds and wait["age_s"] >= self.patience_s:
                        yield process, wait

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {**asdict(self), "run_dir": str(self.run_dir)}
