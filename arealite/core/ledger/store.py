"""The store behind the ledger: `run.sqlite` in the run directory, written by a thread of its own.

Callers record rows in memory (one dict entry each) and commit once per training step; the writer thread writes each
commit as one transaction, so neither training nor generation waits for the disk. An episode's row is keyed by its
source and number there: it can be neither lost nor recorded twice. `rewind` removes what a killed process did after its
last checkpoint.
"""

import contextlib
import functools
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from safetensors.torch import load as load_tensors

from arealite.api.errors import AReaLiteError
from arealite.api.io_struct import Batch
from arealite.core.episode import EpisodeId, to_bytes
from arealite.core.ledger.database import LOCK_TIMEOUT_S, Database, describe_error
from arealite.core.ledger.rollouts import RolloutRow, write_rollouts
from arealite.utils.console import show_message
from arealite.utils.text import clean

logger = logging.getLogger("arealite.ledger")
T = TypeVar("T")
# One transaction for the writer thread. The future is done once it is on disk, or the writer has failed.
_Job = tuple[Callable[[sqlite3.Connection], Any], Future[Any]]

# Episodes of `rollout_batch` bypass admission, so they are not part of the counts that must add up.
_COUNT_ADMITTED = "SELECT state, COUNT(*) FROM episodes WHERE source != 'direct' GROUP BY state"
_PUT_TIMEOUT_S, _WRITE_TIMEOUT_S, _CLOSE_TIMEOUT_S = 60.0, 600.0, LOCK_TIMEOUT_S + 30.0
_UPSERT_EPISODE = "INSERT OR REPLACE INTO episodes VALUES (?,?,?,?,?,?,?,?,?,?,?,?)"
# Room for the other columns of a row.
_ROW_BYTES = 1000
# What is recorded without a commit is on disk after so long, for those who watch the run.
_FLUSH_INTERVAL_S = 2.0
Level = Literal["info", "warning", "alarm"]


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
    source: str = "stream"


class TimesRow(NamedTuple):
    """One row of the table `episode_times`."""

    id: int
    finished_at: float
    # `[[kind, seconds], …]` in order; parts that generate also have a list of the tokens of their answers.
    parts: str
    source: str = "stream"


class ServerSample(NamedTuple):
    """One row of the tables `servers` and `server_steps`: what a server did. Unknown values are None."""

    time: float
    address: str
    version: int
    is_open: bool
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    busy_s: float | None = None
    # In `server_steps`: `[[steps, sequences, prompt tokens, seconds, CPU seconds], …]`, and CPU seconds of the process.
    step_times: str | None = None
    cpu_s: float | None = None


class AgeRow(NamedTuple):
    """One row of the table `ages`."""

    step: int
    age: int
    samples: int
    tokens: int


class _Pending:
    """What was recorded and is not written yet."""

    def __init__(self) -> None:
        self.episodes: dict[tuple[str, int], EpisodeRow] = {}
        self.times: list[TimesRow] = []
        self.events: list[tuple[float, str, str, int | None, str]] = []
        self.servers: list[ServerSample] = []

    def __bool__(self) -> bool:
        return bool(self.episodes or self.times or self.events or self.servers)

    def write(self, db: sqlite3.Connection) -> None:
        db.executemany(_UPSERT_EPISODE, list(self.episodes.values()))
        db.executemany("INSERT OR REPLACE INTO episode_times VALUES (?,?,?,?)", self.times)
        db.executemany("INSERT INTO events VALUES (?,?,?,?,?)", self.events)
        db.executemany("INSERT INTO servers VALUES (?,?,?,?,?,?,?,?,?,?,?)", [row[:11] for row in self.servers])
        known = [(row.address, row.time, row.step_times, row.cpu_s) for row in self.servers if row.step_times]
        db.executemany("INSERT OR REPLACE INTO server_steps VALUES (?,?,?,?)", known)


class Ledger:
    """Writes `run.sqlite`. Any thread may call `record`, `event`, `sample`, the trainer's the rest."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._pending = _Pending()
        self._lock = threading.Lock()
        self._jobs: queue.Queue[_Job | None] = queue.Queue(maxsize=64)
        self._error: BaseException | None = None
        self._has_raised_error = self._has_warned_of_text = False
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()
        # Report a path that cannot be written now, not at the first step.
        self._run_now(lambda db: None)

    def record(self, row: EpisodeRow) -> None:
        """Set the state of one episode; the next `commit` writes it."""
        with self._lock:
            self._pending.episodes[row.source, row.id] = row

    def record_times(self, row: TimesRow) -> None:
        """Keep what the time of one episode was spent on; the next `commit` writes it."""
        with self._lock:
            self._pending.times.append(row)

    def event(self, kind: str, text: str, step: int | None = None, level: Level = "info") -> None:
        """Record something that happened to the run, after `step` steps; the next `commit` writes it."""
        with self._lock:
            self._pending.events.append((time.time(), kind, clean(text), step, level))

    def sample(self, rows: Iterable[ServerSample]) -> None:
        """Record what servers do; the next `commit` writes it."""
        with self._lock:
            self._pending.servers += rows

    def commit(
        self,
        rollouts: Callable[[], Iterable[RolloutRow]] | None = None,
        ages: Callable[[], Iterable[AgeRow]] | None = None,
    ) -> None:
        """Write everything recorded so far in one transaction, in the background.

        The writer thread calls `rollouts` and `ages`, so that reading tokens delays nobody. If `rollouts` raises, the
        rest is written without it.
        """
        # A transaction that finds the file locked runs again; texts are decoded once. Only the writer thread takes what
        # is pending: of two takers, the one with the older state of an episode might write last.
        pending = functools.cache(self._take_pending)
        rows = None if rollouts is None else functools.cache(lambda: self._decode(rollouts))

        def job(db: sqlite3.Connection) -> None:
            # First, because it takes longest and needs no lock.
            texts = [] if rows is None else rows()
            pending().write(db)
            write_rollouts(db, texts)
            if ages is not None:
                db.executemany("INSERT OR REPLACE INTO ages VALUES (?,?,?,?)", ages())

        self._submit(job)

    def _take_pending(self) -> _Pending:
        with self._lock:
            pending, self._pending = self._pending, _Pending()
        return pending

    def flush(self) -> None:
        """Commit, and return once it is on disk."""
        self.commit()
        self._run_now(lambda db: None)

    def save_buffer(self, step: int, episodes: list[tuple[EpisodeId, Batch]]) -> None:
        """Keep buffered episodes for a checkpoint at `step`; returns once they are on disk.

        One that is too large for SQLite is left out: after a resume it runs again.
        """
        rows = [(step, *episode_id, to_bytes(batch)) for episode_id, batch in episodes]
        self.commit()

        def job(db: sqlite3.Connection) -> list[Any]:
            # The checkpoint before this one stays the last good one until this one is complete.
            db.execute("DELETE FROM buffer WHERE step < (SELECT MAX(step) FROM buffer) OR step >= ?", (step,))
            limit = db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) - _ROW_BYTES
            db.executemany("INSERT INTO buffer VALUES (?,?,?,?)", [row for row in rows if len(row[-1]) <= limit])
            return [row for row in rows if len(row[-1]) > limit]

        if too_large := self._run_now(job):
            sizes = ", ".join(f"{EpisodeId(*row[1:3])} ({len(row[-1]) >> 20} MiB)" for row in too_large[:4])
            logger.warning(
                "%d episodes are larger than SQLite can store and are not in the checkpoint at step %d: after a resume "
                "they run again (%s)",
                len(too_large),
                step,
                sizes,
            )

    def rewind(self, step: int, has_ended: Callable[[EpisodeId], bool]) -> list[tuple[EpisodeId, Batch]]:
        """Undo what happened after the checkpoint at `step`; returns the episodes that it had buffered.

        Other episodes that had not ended by then, according to `has_ended`, are deleted: they run again.
        """

        def job(db: sqlite3.Connection) -> list[tuple[EpisodeId, Batch]]:
            found = db.execute("SELECT source, id, tensors FROM buffer WHERE step = ? ORDER BY source, id", (step,))
            buffered = [(EpisodeId(source, number), load_tensors(blob)) for source, number, blob in found]
            kept = {episode_id for episode_id, _ in buffered}
            ids = [EpisodeId(*row) for row in db.execute("SELECT source, id FROM episodes")]
            undone = [i for i in ids if i not in kept and not has_ended(i)]
            # Buffers of checkpoints that were never completed would otherwise count as newer than this one.
            db.execute("DELETE FROM buffer WHERE step > ?", (step,))
            for table, key in (("episodes", "id"), ("episode_times", "id"), ("rollouts", "episode")):
                db.executemany(f"DELETE FROM {table} WHERE source = ? AND {key} = ?", undone)
            # Buffered episodes that were trained later are trained again, or become stale.
            db.execute("DELETE FROM rollouts WHERE source != 'direct' AND step >= ?", (step,))
            db.execute("DELETE FROM ages WHERE step >= ?", (step,))
            text = f"resumed at step {step}: {len(undone)} episodes undone, {len(buffered)} were buffered"
            db.execute("INSERT INTO events VALUES (?,?,?,?,?)", (time.time(), "recover", text, step, "info"))
            return buffered

        return self._run_now(job)

    def clear(self, sources: Iterable[str]) -> None:
        """Delete what an earlier run of the same name left of episodes from these sources."""

        def job(db: sqlite3.Connection) -> None:
            for source in sources:
                for table in ("episodes", "episode_times", "rollouts", "buffer"):
                    db.execute(f"DELETE FROM {table} WHERE source = ?", (source,))
            if "stream" in sources:
                for table in ("events", "ages", "servers", "server_steps"):
                    db.execute(f"DELETE FROM {table}")

        self._run_now(job)

    def counts(self) -> dict[str, int]:
        """Admitted episodes by state, on disk, after everything recorded so far."""
        self.commit()
        return self._run_now(lambda db: dict(db.execute(_COUNT_ADMITTED).fetchall()))

    def close(self) -> None:
        """Write what is recorded and end the thread; idempotent. Logs errors, so that shutdown completes."""
        try:
            if self._thread.is_alive():
                self.commit()
                self._put(None)
                self._thread.join(_CLOSE_TIMEOUT_S)
                if self._thread.is_alive():
                    raise self._timeout_error(_CLOSE_TIMEOUT_S)
            if self._error is not None and not self._has_raised_error:
                self._raise_if_dead()
        except AReaLiteError as error:
            logger.error("%s", error)
            show_message(f"warning: {error}")

    def _decode(self, rollouts: Callable[[], Iterable[RolloutRow]]) -> list[RolloutRow]:
        try:
            return list(rollouts())
        # A user's tokenizer may raise anything. That loses this step's text, not its episodes.
        except BaseException as error:
            if not self._has_warned_of_text:
                self._has_warned_of_text = True
                logger.warning(
                    "rollouts of this step are not kept as text: the workflow's `tokenizer` cannot decode them (%s: "
                    "%s). Fix it, or set rollout.dump_rollouts=false. Further failures are not logged",
                    type(error).__name__,
                    error,
                )
            return []

    def _run_now(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work` once its transaction is on disk."""
        future = self._submit(work)
        wait([future], _WRITE_TIMEOUT_S)
        if self._error is not None:
            self._raise_if_dead()
        if not future.done():
            raise self._timeout_error(_WRITE_TIMEOUT_S)
        return future.result()

    def _submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        self._raise_if_dead()
        future: Future[T] = Future()
        self._put((work, future))
        return future

    def _put(self, job: _Job | None) -> None:
        try:
            self._jobs.put(job, timeout=_PUT_TIMEOUT_S)
        except queue.Full:
            self._raise_if_dead()
            raise self._timeout_error(_PUT_TIMEOUT_S) from None

    def _timeout_error(self, waited_s: float) -> AReaLiteError:
        return AReaLiteError(
            f"the ledger {self.path} has not completed a write for {waited_s:.0f} s: its disk hangs or is very slow"
        )

    def _raise_if_dead(self) -> None:
        """Raise what ended the writer thread, if it has ended."""
        error = self._error
        if error is not None:
            self._has_raised_error = True
            raise describe_error(self.path, error) from error
        if not self._thread.is_alive():
            raise AReaLiteError(f"the ledger {self.path} is closed: nothing can be written any more")

    def _write(self) -> None:
        """Writer thread: runs jobs, one transaction each, until None arrives; the first error ends it."""
        job = None
        try:
            with contextlib.closing(Database(self.path)) as database:
                while (job := self._next_job(database)) is not None:
                    work, future = job
                    future.set_result(database.run(work))
                    # They may hold a batch.
                    job = work = future = None
        # Callers that wait for a job get this error; without it they would wait for the timeout.
        except BaseException as error:
            self._error = error
            with contextlib.suppress(queue.Empty):
                while True:
                    if job is not None:
                        job[1].set_exception(error)
                    job = self._jobs.get_nowait()

    def _next_job(self, database: Database) -> _Job | None:
        """Return the next job; write what is recorded whenever none comes for a while."""
        while True:
            try:
                return self._jobs.get(timeout=_FLUSH_INTERVAL_S)
            except queue.Empty:
                if pending := self._take_pending():
                    database.run(pending.write)
