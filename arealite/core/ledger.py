"""The book of episodes: one row per episode in the run directory's `run.sqlite`, with what became of it.

The executor notes transitions in memory (a dict entry each) and commits once per training step; a thread of its own writes each commit as
one transaction, so nobody who trains or generates waits for the disk. A row is keyed by the episode's id, its position in the stream of
data: an episode can be neither lost nor entered twice. `rewind` undoes what a killed process did after its last checkpoint.
"""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from arealite.api.errors import AReaLiteError
from arealite.api.io_struct import Batch

_SCHEMA = """
CREATE TABLE IF NOT EXISTS episodes(
  id INTEGER PRIMARY KEY,      -- position in the stream of data rows
  state TEXT NOT NULL,         -- running, buffered, trained, rejected, failed, stale
  reason TEXT,                 -- why it was rejected or failed
  start_version INTEGER,       -- weights when it started
  oldest_version INTEGER,      -- weights of its oldest token
  step INTEGER,                -- weights it was trained on top of
  samples INTEGER, tokens INTEGER, reward REAL,
  started_at REAL, ended_at REAL);
CREATE INDEX IF NOT EXISTS episodes_by_step ON episodes(step);
CREATE TABLE IF NOT EXISTS rollouts(
  episode INTEGER, sample INTEGER, step INTEGER, reward REAL, oldest_version INTEGER, newest_version INTEGER,
  tokens INTEGER, prompt TEXT, completion TEXT, PRIMARY KEY(episode, sample));
CREATE TABLE IF NOT EXISTS buffer(          -- finished episodes that the checkpoint at `step` had not trained on yet
  step INTEGER, id INTEGER, tensors BLOB, PRIMARY KEY(step, id));
CREATE TABLE IF NOT EXISTS events(time REAL, kind TEXT, text TEXT);
"""
_PUT_TIMEOUT_S = 60.0
_UPSERT = "INSERT OR REPLACE INTO episodes VALUES (?,?,?,?,?,?,?,?,?,?,?)"


class EpisodeRow(NamedTuple):
    """One row of the table `episodes`."""

    id: int
    state: str
    reason: str | None = None
    start_version: int | None = None
    oldest_version: int | None = None
    step: int | None = None
    samples: int | None = None
    tokens: int | None = None
    reward: float | None = None
    started_at: float | None = None
    ended_at: float | None = None


class RolloutRow(NamedTuple):
    """One trajectory as people read it."""

    episode: int
    sample: int
    step: int
    reward: float
    oldest_version: int
    newest_version: int
    tokens: int
    prompt: str
    completion: str


class Ledger:
    """Batched writer of `run.sqlite`. `note*` may be called from any thread; `commit` from the trainer's."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._pending: dict[int, EpisodeRow] = {}
        self._events: list[tuple[float, str, str]] = []
        self._lock = threading.Lock()
        self._jobs: queue.Queue[Callable[[sqlite3.Connection], None] | None] = queue.Queue(
            maxsize=64
        )
        self._error: sqlite3.Error | OSError | None = None
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()
        self._run_now(
            lambda db: None
        )  # a path that cannot be written is told here, not at the first step

    def note(self, row: EpisodeRow) -> None:
        """Note what an episode has become; written by the next `commit`."""
        with self._lock:
            self._pending[row.id] = row

    def event(self, kind: str, text: str) -> None:
        with self._lock:
            self._events.append((time.time(), kind, text))

    def commit(self, rollouts: Callable[[], Iterable[RolloutRow]] | None = None) -> None:
        """Write everything noted so far in one transaction, in the background.

        `rollouts` is called on the writer's thread, so that decoding tokens delays nobody.
        """
        with self._lock:
            rows, self._pending = list(self._pending.values()), {}
            events, self._events = self._events, []

        def job(db: sqlite3.Connection) -> None:
            db.executemany(_UPSERT, rows)
            db.executemany("INSERT INTO events VALUES (?,?,?)", events)
            if rollouts is not None:
                db.executemany(
                    "INSERT OR REPLACE INTO rollouts VALUES (?,?,?,?,?,?,?,?,?)", rollouts()
                )

        self._submit(job)

    def flush(self) -> None:
        """Commit, and return when it is on disk."""
        self.commit()
        self._run_now(lambda db: None)

    def save_buffer(self, step: int, episodes: list[tuple[int, Batch]]) -> None:
        """Keep these episodes' trajectories for a checkpoint at `step`; returns when they are on disk."""
        rows = [(step, i, save_tensors(_contiguous(batch))) for i, batch in episodes]
        self.commit()

        def job(db: sqlite3.Connection) -> None:
            # the checkpoint before this one is the last good one until this one is whole
            db.execute(
                "DELETE FROM buffer WHERE step < (SELECT MAX(step) FROM buffer) OR step >= ?",
                (step,),
            )
            db.executemany("INSERT INTO buffer VALUES (?,?,?)", rows)

        self._run_now(job)

    def rewind(
        self, step: int, unfinished_from: int, finished: Iterable[int]
    ) -> list[tuple[int, Batch]]:
        """Undo what happened after the checkpoint at `step`; returns the episodes that it had buffered.

        The checkpoint knows every episode before `unfinished_from`, and those in `finished`, as ended; all others run
        again under the same id, except the buffered ones.
        """
        buffered: list[tuple[int, Batch]] = []
        keep = set(finished)

        def job(db: sqlite3.Connection) -> None:
            found = db.execute("SELECT id, tensors FROM buffer WHERE step = ? ORDER BY id", (step,))
            buffered.extend((i, load_tensors(blob)) for i, blob in found)
            keep.update(i for i, _ in buffered)
            later = db.execute(
                "SELECT id FROM episodes WHERE id >= ?", (unfinished_from,)
            ).fetchall()
            undone = [row for row in later if row[0] not in keep]
            for table, key in (("episodes", "id"), ("rollouts", "episode")):
                db.executemany(f"DELETE FROM {table} WHERE {key} = ?", undone)
            text = f"resumed at step {step}: {len(undone)} episodes run again, {len(buffered)} were buffered"
            db.execute("INSERT INTO events VALUES (?,?,?)", (time.time(), "recover", text))

        self._run_now(job)
        return buffered

    def clear(self) -> None:
        """Forget an earlier run of the same name."""

        def job(db: sqlite3.Connection) -> None:
            for table in ("episodes", "rollouts", "buffer", "events"):
                db.execute(f"DELETE FROM {table}")

        self._run_now(job)

    def counts(self) -> dict[str, int]:
        """Episodes by state, as on disk after everything noted so far."""
        found: dict[str, int] = {}
        self.commit()
        self._run_now(
            lambda db: found.update(
                db.execute("SELECT state, COUNT(*) FROM episodes GROUP BY state").fetchall()
            )
        )
        return found

    def close(self) -> None:
        """Write what is noted and end the thread; idempotent."""
        if self._thread.is_alive():
            if self._error is None:
                self.commit()
            self._jobs.put(None)
            self._thread.join(timeout=30)

    def _run_now(self, job: Callable[[sqlite3.Connection], None]) -> None:
        done = threading.Event()

        def wrapped(db: sqlite3.Connection) -> None:
            try:
                job(db)
            finally:
                done.set()

        self._submit(wrapped)
        while not done.wait(timeout=1.0):
            if not self._thread.is_alive():
                break
        self._raise_error()

    def _submit(self, job: Callable[[sqlite3.Connection], None]) -> None:
        self._raise_error()
        try:
            self._jobs.put(job, timeout=_PUT_TIMEOUT_S)
        except queue.Full:
            self._raise_error()
            raise AReaLiteError(
                f"the ledger {self.path} has not taken a write for {_PUT_TIMEOUT_S:.0f} s: its disk hangs or is very slow"
            ) from None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise AReaLiteError(
                f"the ledger {self.path} cannot be written: {self._error}. Free space or fix the folder's rights, then resume "
                "the run with recover.mode=auto"
            ) from self._error

    def _write(self) -> None:
        """The writer's thread: consumes jobs, one transaction each; the first error ends it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.path, timeout=30)
            try:
                db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)
                while (job := self._jobs.get()) is not None:
                    with db:
                        job(db)
            finally:
                db.close()
        except (sqlite3.Error, OSError) as error:
            self._error = error
            # Whoever waits for room in the queue must get it, to be told at the next write.
            with contextlib.suppress(queue.Empty):
                while True:
                    self._jobs.get_nowait()


def _contiguous(batch: Batch) -> Batch:
    return {key: value.detach().cpu().contiguous() for key, value in batch.items()}


def read_counts(path: str | Path) -> dict[str, Any]:
    """Episodes by state of a run that may still be going on; for reports and tests."""
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return dict(db.execute("SELECT state, COUNT(*) FROM episodes GROUP BY state").fetchall())
    finally:
        db.close()
