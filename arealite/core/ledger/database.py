"""The connection to `run.sqlite`: waits while it is locked, and restores it if it is removed.

Used by the ledger's writer thread only. A removed file stays readable for the process that has it open, so that nothing
is lost: its content is copied to a new file of the same name.
"""

import contextlib
import os
import sqlite3
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from arealite.api.errors import AReaLiteError, CheckpointError
from arealite.utils.console import show_message

T = TypeVar("T")
# SQLite itself waits so long for a lock; then other processes are looked for, until the deadline.
BUSY_TIMEOUT_S, LOCK_TIMEOUT_S = 10.0, 120.0
_COMPANIONS = ("-wal", "-shm")
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_CANNOT_WRITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)

SCHEMA_VERSION = 3
_SCHEMA = f"""
PRAGMA user_version = {SCHEMA_VERSION};
CREATE TABLE IF NOT EXISTS episodes(
  id INTEGER NOT NULL,         -- number within its source; for the stream, the position of the data row
  state TEXT NOT NULL,         -- running, buffered, trained, rejected, failed, stale, evaluated
  reason TEXT,                 -- why it was rejected or failed
  start_version INTEGER,       -- weights when it started
  oldest_version INTEGER,      -- weights of its oldest token
  step INTEGER,                -- weights it was trained on top of
  samples INTEGER, tokens INTEGER, reward REAL,
  started_at REAL, ended_at REAL,   -- started_at: NULL if it was restored from a checkpoint
  source TEXT NOT NULL,        -- stream (prepare_batch), submitted (submit), direct (rollout_batch)
  PRIMARY KEY(source, id));
CREATE INDEX IF NOT EXISTS episodes_by_step ON episodes(step);
CREATE TABLE IF NOT EXISTS episode_times(   -- when an episode ended, before it was trained; parts: see episode_clock
  id INTEGER NOT NULL, finished_at REAL, parts TEXT, source TEXT NOT NULL, PRIMARY KEY(source, id));
CREATE TABLE IF NOT EXISTS prompts(id INTEGER PRIMARY KEY, text TEXT);    -- the id is a hash of the text
CREATE TABLE IF NOT EXISTS rollouts(        -- narrow, so that it is fast to filter; see rollout_data
  id INTEGER PRIMARY KEY AUTOINCREMENT, source TEXT, episode INTEGER, sample INTEGER, step INTEGER, reward REAL,
  oldest_version INTEGER, newest_version INTEGER, tokens INTEGER, answer_tokens INTEGER, turns INTEGER, images INTEGER,
  truncated INTEGER, prompt INTEGER, preview TEXT, UNIQUE(source, episode, sample));
CREATE INDEX IF NOT EXISTS rollouts_numbers ON rollouts(   -- what rows are chosen and sorted by, without texts
  step, reward, tokens, answer_tokens, turns, images, episode, oldest_version, newest_version, source, prompt);
CREATE INDEX IF NOT EXISTS rollouts_by_prompt ON rollouts(prompt);
CREATE TABLE IF NOT EXISTS rollout_data(    -- parts: statistics of the sample as JSON; record: see token_record.py
  id INTEGER PRIMARY KEY, completion TEXT, parts TEXT, record BLOB);
CREATE TRIGGER IF NOT EXISTS delete_rollout_data AFTER DELETE ON rollouts BEGIN
  DELETE FROM rollout_data WHERE id = OLD.id; END;
CREATE TABLE IF NOT EXISTS rollout_images(  -- names of files in rollouts/images of the run directory; see images.py
  id INTEGER PRIMARY KEY, names TEXT);
CREATE TRIGGER IF NOT EXISTS delete_rollout_images AFTER DELETE ON rollouts BEGIN
  DELETE FROM rollout_images WHERE id = OLD.id; END;
CREATE TABLE IF NOT EXISTS vocabulary(id INTEGER PRIMARY KEY, bytes BLOB);   -- texts of the tokens in records
CREATE TABLE IF NOT EXISTS ages(            -- trained samples by the age of their oldest token, tokens by their own
  step INTEGER, age INTEGER, samples INTEGER, tokens INTEGER, PRIMARY KEY(step, age));
CREATE TABLE IF NOT EXISTS servers(         -- counters are those of the server; NULL if it does not tell
  time REAL, address TEXT, version INTEGER, is_open INTEGER, running INTEGER, waiting INTEGER, kv_used REAL,
  prompt_tokens INTEGER, cached_tokens INTEGER, generated_tokens INTEGER, busy_s REAL);
CREATE INDEX IF NOT EXISTS servers_by_time ON servers(time);
CREATE TABLE IF NOT EXISTS server_steps(    -- counters of an embedded server at `time`; steps: see step_times, as JSON
  address TEXT PRIMARY KEY, time REAL, steps TEXT, cpu_s REAL);
CREATE TABLE IF NOT EXISTS buffer(          -- finished episodes that the checkpoint at `step` had not trained on yet
  step INTEGER, source TEXT, id INTEGER, tensors BLOB, PRIMARY KEY(step, source, id));
CREATE TABLE IF NOT EXISTS events(time REAL, kind TEXT, text TEXT, step INTEGER, level TEXT);
"""
# Words of completions and prompts. Entries of rows that were deleted stay, and are ignored.
_SEARCH_SCHEMA = """
CREATE VIRTUAL TABLE IF NOT EXISTS rollout_search USING fts5(text, content='');
CREATE VIRTUAL TABLE IF NOT EXISTS prompt_search USING fts5(text, content='');
"""


class Database:
    """`run.sqlite`, opened for writing. A lock of another process that stays is an `AReaLiteError`."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in one transaction. It is called again if the file was locked."""
        self._restore_if_removed()

        def attempt() -> T:
            with self._db:
                return work(self._db)

        return self._retry_while_locked(attempt)

    def close(self) -> None:
        """Restore the file if it was removed since the last transaction, and close it."""
        try:
            self._restore_if_removed()
        finally:
            self._db.close()

    def _open(self) -> None:
        self._db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S)
        try:
            self._retry_while_locked(self._create_tables)
        except BaseException:
            self._db.close()
            raise
        stat = self.path.stat()
        self._identity = stat.st_dev, stat.st_ino
        # A file system without shared memory (NFS) has no companions.
        self._companions = [path for path in self._companion_paths() if path.exists()]

    def _companion_paths(self) -> list[Path]:
        return [Path(f"{self.path}{suffix}") for suffix in _COMPANIONS]

    def _create_tables(self) -> None:
        self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version != SCHEMA_VERSION and self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
            raise CheckpointError(
                f"{self.path} was written by another version of arealite (its schema is {version}, this one's "
                f"{SCHEMA_VERSION})"
            )
        self._db.executescript(_SCHEMA)
        try:
            self._db.executescript(_SEARCH_SCHEMA)
        except sqlite3.OperationalError as error:
            # An SQLite without this extension: readers then search through all texts.
            if "no such module" not in str(error):
                raise

    def _is_in_place(self) -> bool:
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return False
        return (stat.st_dev, stat.st_ino) == self._identity and all(path.exists() for path in self._companions)

    def _restore_if_removed(self) -> None:
        """Write the file again if it was removed or replaced: what goes to the open file would be lost."""
        if self._is_in_place():
            return
        aside = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        try:
            self._db.execute("VACUUM INTO ?", (str(aside),))
            what = "it is written again, with all episodes so far"
        except sqlite3.DatabaseError as error:
            aside.unlink(missing_ok=True)
            if error.sqlite_errorcode & 0xFF in _CANNOT_WRITE:
                raise
            what = f"a new one begins here ({error})"
        # Closing removes companions by their name; those of another file would be applied to the new one.
        self._db.close()
        for companion in self._companion_paths():
            companion.unlink(missing_ok=True)
        if aside.exists():
            aside.replace(self.path)
        show_message(f"warning: the ledger {self.path} was removed while the run writes it: {what}")
        self._open()

    def _retry_while_locked(self, action: Callable[[], T]) -> T:
        deadline, has_warned = time.monotonic() + LOCK_TIMEOUT_S, False
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _LOCKED:
                    raise
                who = _describe_users(self.path)
                if time.monotonic() > deadline:
                    raise AReaLiteError(
                        f"the ledger {self.path} has been locked for {LOCK_TIMEOUT_S:.0f} s by {who}: end it, or have "
                        "it open the file read-only (sqlite3 'file:run.sqlite?mode=ro'), then resume the run with "
                        "recover.mode=auto"
                    ) from error
                if not has_warned:
                    has_warned = True
                    show_message(
                        f"warning: the ledger {self.path} is locked by {who}: waiting up to {LOCK_TIMEOUT_S:.0f} s for "
                        "it to end"
                    )


def _describe_users(path: Path) -> str:
    """Return which other processes have the file open."""
    found, wanted = [], {str(path.resolve()), *(f"{path.resolve()}{suffix}" for suffix in _COMPANIONS)}
    for process in psutil.process_iter():
        # It may have ended, or belong to another user.
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and any(file.path in wanted for file in process.open_files()):
                found.append(f"process {process.pid} ({process.name()})")
    return ", ".join(found) or "a process of another user, container or machine"


def describe_error(path: Path, error: BaseException) -> AReaLiteError:
    """Return an error for the user: what failed, and what to do about it."""
    if isinstance(error, AReaLiteError) and not isinstance(error, CheckpointError):
        return error
    text = f"the ledger {path} cannot be written or read: {type(error).__name__}: {error}"
    if isinstance(error, OSError | sqlite3.OperationalError):
        return AReaLiteError(
            f"{text}. Free space or fix the folder's permissions, then resume the run with recover.mode=auto"
        )
    # The base class itself means a damaged file; its subclasses mean a wrong statement.
    if type(error) is sqlite3.DatabaseError or isinstance(error, CheckpointError):
        return CheckpointError(
            f"{text}. The file is damaged or foreign: move it and those beside it ({path.name}-*) away and start the "
            "run again. It goes on from its checkpoint without the history of earlier steps; buffered episodes run anew"
        )
    return AReaLiteError(
        f"{text}. Resume the run with recover.mode=auto; if that fails here too the file is damaged: move it away first"
    )
