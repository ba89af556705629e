"""Finds run directories below the given folders, and summarizes them.

A run directory is a folder with stats.jsonl or run.sqlite, or one that a launcher has just prepared. Its id is a hash
of its path, so that no request can name a path. Links are not followed.
"""

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from arealite.core.ledger.rollout_index import RolloutIndex
from arealite.dashboard.stats import StatsFile
from arealite.dashboard.trace import TraceFile
from arealite.utils.rundir import RunDir
from arealite.utils.text import clean

_MAX_DEPTH, _MAX_FOLDERS, MAX_RUNS = 6, 20_000, 1_000
# Folders are searched again at most so often.
_SCAN_INTERVAL_S = 2.0
# Folders of a run directory, and others, below which there are no runs.
_SKIPPED = {
    "checkpoints", "recover", "evaluations", "logs", "names", "private", "rollouts", "weights", "tensorboard", "model",
    "sweeps", "status",
}  # fmt: skip


class Run:
    """One run directory and what was read of it."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, clean(name)
        self.id = hashlib.sha256(str(path).encode(errors="surrogateescape")).hexdigest()[:12]
        self.dir = RunDir(path)
        self.stats = StatsFile(self.dir.stats_path)
        self.rollouts = RolloutIndex()
        self.trace = TraceFile(self.dir.trace_path)
        # Alarms in the ledger, and the time of the files that they were counted in.
        self.alarms: tuple[float | None, int] | None = None
        # What `foresight` found, and after how many steps.
        self.foresight: tuple[float, dict[str, Any]] | None = None
        self.foresight_lock = threading.Lock()

    def summary(self) -> dict[str, Any]:
        """Return what the list of runs shows."""
        self.stats.update()
        steps, times, rewards = (self.stats.column(name) for name in ("step", "time", "reward"))
        started = next((t for t in times if t is not None), None)
        return {
            "id": self.id,
            "name": self.name,
            "path": clean(str(self.path)),
            "experiment": clean(self.path.parent.name),
            "trial": clean(self.path.name),
            "started": modified(self.dir.config_path) or started,
            "updated": self.updated(),
            "live": self.dir.is_in_use(),
            "steps": int(max((s for s in steps if s is not None), default=-1)) + 1,
            "reward": next((r for r in reversed(rewards) if r is not None), None),
            "alarms": self.num_alarms(),
        }

    def updated(self) -> float | None:
        """Return when the run last wrote something."""
        files = (self.dir.stats_path, self.dir.db_path, Path(f"{self.dir.db_path}-wal"), self.dir.trace_path)
        return max((t for path in files if (t := modified(path)) is not None), default=modified(self.path))

    def num_alarms(self) -> int:
        """Return how many alarms the steps raised."""
        names = [name for name in self.stats.names() if name.startswith("alarm/")]
        return sum(value is not None for name in names for value in self.stats.column(name))


class Runs:
    """The runs below some folders; safe to use from several threads."""

    def __init__(self, roots: Sequence[Path]):
        self._roots = [Path(os.path.realpath(root)) for root in roots]
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._scanned = float("-inf")

    def all(self) -> list[Run]:
        """Return all runs, the newest first."""
        with self._lock:
            if time.monotonic() - self._scanned > _SCAN_INTERVAL_S:
                self._scan()
            return list(self._runs.values())

    def get(self, run_id: str) -> Run:
        """Return the run with this id; 404 if there is none."""
        run = self._runs.get(run_id)
        if run is None:
            run = next((each for each in self.all() if each.id == run_id), None)
        if run is None or not run.path.is_dir():
            raise web.HTTPNotFound(reason="there is no such run; it may have been removed")
        return run

    def _scan(self) -> None:
        found: dict[str, Run] = {}
        known = {run.path: run for run in self._runs.values()}
        for root in self._roots:
            for path in _find(root):
                name = _name(root, path)
                run = known.get(path) or Run(path, name)
                found.setdefault(run.id, run)
        ordered = sorted(found.values(), key=lambda run: run.updated() or 0.0, reverse=True)
        self._runs = {run.id: run for run in ordered[:MAX_RUNS]}
        self._scanned = time.monotonic()


def _name(root: Path, path: Path) -> str:
    if path == root:
        return f"{path.parent.name}/{path.name}"
    return str(path.relative_to(root))


def _find(root: Path) -> Iterator[Path]:
    """Yield run directories at or below a folder."""
    level, num_seen = [root], 0
    for _ in range(_MAX_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            num_seen += 1
            if num_seen > _MAX_FOLDERS:
                return
            try:
                with os.scandir(folder) as entries:
                    kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
            except OSError:
                # Removed meanwhile, or not ours to read.
                continue
            if kinds.keys() & {"stats.jsonl", "run.sqlite"} or kinds.keys() >= {"config.yaml", "logs"}:
                yield folder
                # Earlier runs of the same name are kept there.
                kinds = {"earlier": kinds.get("earlier", False)}
            names = (name for name, is_folder in kinds.items() if is_folder and name not in _SKIPPED)
            below += [folder / name for name in sorted(names) if not name.startswith(".")]
        level = below


def modified(path: Path) -> float | None:
    """Return when a file was last changed; None if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
