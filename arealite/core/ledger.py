"""The book of episodes: one row per episode in the run directory's `run.sqlite`, with what became of it.

The executor notes transitions in memory (a dict entry each) and commits once per training step; a thread of its own writes each commit as
one transaction, so nobody who trains or generates waits for the disk. A row is keyed by the episode's id, its position in the stream of
data: an episode can be neither lost nor entered twice. `rewind` undoes what a killed process did after its last checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from arealite.api.errors import AReaLiteError, CheckpointError
from arealite.api.io_struct import Batch

logger = logging.getLogger("arealite.ledger")

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
_PUT_TIMEOUT_S, _WRITE_TIMEOUT_S = 60.0, 600.0
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


class _Job(NamedTuple):
    """One transaction for the writer; `done` is set when it is on disk, or never will be."""

    work: Callable[[sqlite3.Connection], None]
    done: threading.Event


class Ledger:
    """Batched writer of `run.sqlite`. `note*` may be called from any thread; `commit` from the trainer's."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._pending: dict[int, EpisodeRow] = {}
        self._events: list[tuple[float, str, str]] = []
        self._lock = threading.Lock()
        self._jobs: queue.Queue[_Job | None] = queue.Queue(maxsize=64)
        self._error: BaseException | None = None
        self._error_told = self._transcripts_failed = False
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()
        self._run_now(lambda db: None)  # a path that cannot be written is told here, not at the first step

    def note(self, row: EpisodeRow) -> None:
        """Note what an episode has become; written by the next `commit`."""
        with self._lock:
            self._pending[row.id] = row

    def event(self, kind: str, text: str) -> None:
        with self._lock:
            self._events.append((time.time(), kind, text))

    def commit(self, rollouts: Callable[[], Iterable[RolloutRow]] | None = None) -> None:
        """Write everything noted so far in one transaction, in the background.

        `rollouts` is called on the writer's thread, so that decoding tokens delays nobody. If it raises, the step is written without.
        """
        with self._lock:
            rows, self._pending = list(self._pending.values()), {}
            events, self._events = self._events, []

        def job(db: sqlite3.Connection) -> None:
            texts = [] if rollouts is None else self._make_transcripts(rollouts)
            db.executemany(_UPSERT, rows)
            db.executemany("INSERT INTO events VALUES (?,?,?)", events)
            db.executemany("INSERT OR REPLACE INTO rollouts VALUES (?,?,?,?,?,?,?,?,?)", texts)

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
            db.execute("DELETE FROM buffer WHERE step < (SELECT MAX(step) FROM buffer) OR step >= ?", (step,))
            db.executemany("INSERT INTO buffer VALUES (?,?,?)", rows)

        self._run_now(job)

    def rewind(self, step: int, has_ended: Callable[[int], bool]) -> list[tuple[int, Batch]]:
        """Undo what happened after the checkpoint at `step`; returns the episodes that it had buffered.

        Of the others, those that had not ended by then, as `has_ended` tells of an id, are struck: they run again.
        """
        buffered: list[tuple[int, Batch]] = []

        def job(db: sqlite3.Connection) -> None:
            found = db.execute("SELECT id, tensors FROM buffer WHERE step = ? ORDER BY id", (step,))
            buffered.extend((i, load_tensors(blob)) for i, blob in found)
            kept = {i for i, _ in buffered}
            ids = db.execute("SELECT id FROM episodes").fetchall()
            undone = [row for row in ids if row[0] not in kept and not has_ended(row[0])]
            # of checkpoints that were never whole: counted as the last good one, they would push out this one's
            db.execute("DELETE FROM buffer WHERE step > ?", (step,))
            for table, key in (("episodes", "id"), ("rollouts", "episode")):
                db.executemany(f"DELETE FROM {table} WHERE {key} = ?", undone)
            text = f"resumed at step {step}: {len(undone)} episodes undone, {len(buffered)} were buffered"
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
            lambda db: found.update(db.execute("SELECT state, COUNT(*) FROM episodes GROUP BY state").fetchall())
        )
        return found

    def close(self) -> None:
        """Write what is noted and end the thread; idempotent. An error nobody heard of yet is logged: what else ends must still end."""
        try:
            if self._thread.is_alive():
                self.commit()
                self._put(None)
                self._thread.join(timeout=30)
            if self._error is not None and not self._error_told:
                self._require_writer()
        except AReaLiteError as error:
            logger.error("%s", error)

    def _make_transcripts(self, rollouts: Callable[[], Iterable[RolloutRow]]) -> list[RolloutRow]:
        try:
            return list(rollouts())
        # A user's tokenizer may raise whatever: text to look at must not cost the book.
        except BaseException as error:
            if not self._transcripts_failed:
                self._transcripts_failed = True
                logger.warning(
                    "no transcripts of this step, nor of any other that fails so: the workflow's `tokenizer` cannot decode "
                    "(%s: %s). Mend it, or set rollout.dump_rollouts=false",
                    type(error).__name__,
                    error,
                )
            return []

    def _run_now(self, work: Callable[[sqlite3.Connection], None]) -> None:
        if not self._submit(work).wait(_WRITE_TIMEOUT_S):
            raise self._hangs(_WRITE_TIMEOUT_S)
        if self._error is not None:
            self._require_writer()

    def _submit(self, work: Callable[[sqlite3.Connection], None]) -> threading.Event:
        self._require_writer()
        job = _Job(work, threading.Event())
        self._put(job)
        return job.done

    def _put(self, job: _Job | None) -> None:
        try:
            self._jobs.put(job, timeout=_PUT_TIMEOUT_S)
        except queue.Full:
            self._require_writer()
            raise self._hangs(_PUT_TIMEOUT_S) from None

    def _hangs(self, since_s: float) -> AReaLiteError:
        return AReaLiteError(
            f"the ledger {self.path} has not taken a write for {since_s:.0f} s: its disk hangs or is very slow"
        )

    def _require_writer(self) -> None:
        """Raise what ended the writer's thread, if it has ended."""
        error = self._error
        if error is not None:
            self._error_told = True
            told = f"the ledger {self.path} cannot be written or read: {type(error).__name__}: {error}"
            if isinstance(error, OSError | sqlite3.OperationalError):
                remedy = "Free space or fix the folder's rights, then resume the run with recover.mode=auto"
                raise AReaLiteError(f"{told}. {remedy}") from error
            # not one of its kinds, which are of a statement
            if type(error) is sqlite3.DatabaseError:
                raise CheckpointError(
                    f"{told}. The file is damaged: move it and those beside it ({self.path.name}-*) away and start the run again. It goes on from its "
                    "checkpoint; what is lost is the history of earlier steps, and buffered episodes are played again"
                ) from error
            remedy = (
                "Resume the run with recover.mode=auto; if that ends here too the file is damaged: move it away first"
            )
            raise AReaLiteError(f"{told}. {remedy}") from error
        if not self._thread.is_alive():
            raise AReaLiteError(f"the ledger {self.path} is closed: nothing is written any more")

    def _write(self) -> None:
        """The writer's thread: consumes jobs, one transaction each; the first error ends it."""
        job: _Job | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.path, timeout=30)
            try:
                db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)
                while (job := self._jobs.get()) is not None:
                    with db:
                        job.work(db)
                    job.done.set()
            finally:
                db.close()
        # Nothing is swallowed: the top of a thread hands over whatever ended it, or those who wait would never hear of it.
        except BaseException as error:
            self._error = error
            with contextlib.suppress(queue.Empty):
                while True:
                    if job is not None:
                        job.done.set()
                    job = self._jobs.get_nowait()


def _contiguous(batch: Batch) -> Batch:
    return {key: value.detach().cpu().contiguous() for key, value in batch.items()}


def read_counts(path: str | Path) -> dict[str, Any]:
    """Episodes by state of a run that may still be going on; for reports and tests."""
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return dict(db.execute("SELECT state, COUNT(*) FROM episodes GROUP BY state").fetchall())
    finally:
        db.close()
