"""Reads run.sqlite of a run for the dashboard, within limits of time and size.

Each request opens the file anew: a run may replace or remove it at any time. A run without a ledger has empty answers;
a ledger that cannot be read is an error with a plain message.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from aiohttp import web

from arealite.api.errors import AReaLiteError, RequestError
from arealite.core.ledger import reading
from arealite.core.ledger.database import SCHEMA_VERSION
from arealite.dashboard.csv_export import shown_step, to_csv
from arealite.dashboard.files import has_image
from arealite.dashboard.opening import is_regular
from arealite.dashboard.query import Query
from arealite.dashboard.runs import Run

T = TypeVar("T")
_QUERY_TIMEOUT_S = 20.0
# Instructions of SQLite's virtual machine between two looks at the clock: about a millisecond.
_CHECK_EVERY = 50_000
_MAX_LIMIT, _MAX_CSV_ROWS = 1_000, 200_000
_MAX_TEXT, _MAX_GROUP_TOKENS = 500, 300_000
# For the first rows that contain a text, while another request counts all of them.
_SCAN_S = 0.04
_COUNT, _MAX_LOAD_AT_ONCE = "SELECT COUNT(*) FROM rollouts", 10_000
_CSV_COLUMNS = (
    "step", "source", "episode", "sample", "reward", "tokens", "answer_tokens", "turns", "images", "truncated",
    "oldest_version", "newest_version", "prompt", "completion",
)  # fmt: skip


@contextlib.contextmanager
def open_ledger(run: Run) -> Iterator[sqlite3.Connection | None]:
    """Open the ledger of a run; None if it has none yet."""
    path = run.dir.db_path
    if not is_regular(path):
        yield None
        return
    deadline = time.monotonic() + _QUERY_TIMEOUT_S
    try:
        with contextlib.closing(reading.open_ledger(path)) as db:
            # A damaged file may hold anything.
            db.text_factory = lambda data: data.decode(errors="replace")
            db.set_progress_handler(lambda: time.monotonic() > deadline, _CHECK_EVERY)
            _check_schema(run, db)
            yield db
    except sqlite3.Error as error:
        raise _describe(run, error) from error


def _check_schema(run: Run, db: sqlite3.Connection) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (num_tables,) = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if num_tables and version != SCHEMA_VERSION:
        raise AReaLiteError(
            f"run.sqlite of {run.name} was written by another version of arealite: its schema is {version}, this "
            f"version reads {SCHEMA_VERSION}. Use the dashboard of that version"
        )


def _describe(run: Run, error: sqlite3.Error) -> AReaLiteError:
    """Return an error for the user."""
    code = getattr(error, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_INTERRUPT:
        return AReaLiteError(f"the query took longer than {_QUERY_TIMEOUT_S:.0f} s: use a narrower filter")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return AReaLiteError(f"run.sqlite of {run.name} is locked by another process: try again")
    return AReaLiteError(
        f"cannot read run.sqlite of {run.name}: {error}. It is damaged, being replaced, or of another arealite version"
    )


def _ask(run: Run, read: Callable[[sqlite3.Connection], T], empty: T) -> T:
    """Return what `read` finds in the ledger; `empty` if there is none, or it has no tables yet."""
    with open_ledger(run) as db:
        if db is None:
            return empty
        try:
            return read(db)
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            return empty


def num_alarms(run: Run) -> int:
    """Return how many alarms the ledger has; 0 if it cannot be read. Reads only what has changed."""
    updated = run.updated()
    if run.alarms is None or run.alarms[0] != updated:
        query, count = "SELECT COUNT(*) FROM events WHERE level = 'alarm'", 0
        with contextlib.suppress(AReaLiteError):
            count = _ask(run, lambda db: db.execute(query).fetchone()[0], 0)
        run.alarms = updated, count
    return run.alarms[1]


def events(run: Run, query: Query) -> dict[str, Any]:
    since = query.number("since") or 0.0
    return {"rows": _ask(run, lambda db: reading.read_events(db, since), [])}


def flow(run: Run, query: Query) -> dict[str, Any]:
    buckets = query.integer("buckets", 200, 1, 2_000)
    names = ("steps", "admitted", "buffered", "trained", "stale", "rejected", "failed")
    return _ask(run, lambda db: reading.read_flow(db, buckets), {**{name: [] for name in names}, "now": {}})


def ages(run: Run, _: Query) -> dict[str, Any]:
    return _ask(run, reading.read_ages, {"steps": [], "ages": [], "counts": []})


def servers(run: Run, query: Query) -> dict[str, Any]:
    start, end = query.number("start"), query.number("end")
    return {"servers": _ask(run, lambda db: reading.read_servers(db, start, end), [])}


def _filter(query: Query) -> reading.RolloutFilter:
    return reading.RolloutFilter(
        text=query.text("text")[:_MAX_TEXT],
        source=query.text("source") or None,
        state=query.text("state") or None,
        **{name: query.number(name) for name in ("min_reward", "max_reward")},
        **{name: _whole(query, name) for name in ("min_tokens", "max_tokens", "step_from", "step_to")},
    )


def _whole(query: Query, name: str) -> int | None:
    return query.integer(name, 0, -(2**53), 2**53) if query.text(name) else None


def _find(run: Run, query: Query, limit: int, offset: int = 0) -> tuple[int | None, list[dict[str, Any]]]:
    where, sort, desc = _filter(query), query.text("sort") or "step", query.text("desc", "1") == "1"
    if sort not in reading.SORTS:
        raise RequestError(f"sort is {sort!r:.60}; use one of {', '.join(reading.SORTS)}")

    def read(db: sqlite3.Connection) -> tuple[int | None, list[dict[str, Any]]]:
        if run.rollouts.is_loaded and query.text("first") and where.text.strip():
            return run.rollouts.find_first(db, where, sort, desc, limit, _SCAN_S)
        if run.rollouts.is_loaded or db.execute(_COUNT).fetchone()[0] <= _MAX_LOAD_AT_ONCE:
            return run.rollouts.find(db, where, sort, desc, offset, limit)
        # The first answer comes from the tables, while another thread loads the index.
        threading.Thread(target=_load_index, args=(run,), name="rollout index", daemon=True).start()
        return reading.find_rollouts(db, where, sort, desc, offset, limit)

    return _ask(run, read, (0, []))


def _load_index(run: Run) -> None:
    # What cannot be read is told to the one who asks next.
    with contextlib.suppress(AReaLiteError, OSError):
        _ask(run, run.rollouts.update, None)


def rollouts(run: Run, query: Query) -> dict[str, Any]:
    limit, offset = query.integer("limit", 100, 0, _MAX_LIMIT), query.integer("offset", 0, 0, 2**31)
    total, rows = _find(run, query, limit, offset)
    return {"total": total, "rows": rows}


def rollouts_csv(run: Run, query: Query) -> bytes:
    _, rows = _find(run, query, _MAX_CSV_ROWS)
    for row in rows:
        # For an evaluation the ledger stores the evaluated version: the number of steps before it.
        row["step"] = row["step"] if row["source"] == "direct" else shown_step(row["step"])
    return to_csv(_CSV_COLUMNS, ([row[name] for name in _CSV_COLUMNS] for row in rows))


def _key(query: Query) -> tuple[str, int, int]:
    number, sample = (query.integer(name, 0, -(2**53), 2**53) for name in ("episode", "sample"))
    return query.text("source"), number, sample


def _detail(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """Name the columns of tokens `tokens`, their number `num_tokens`, and addresses of images `images`."""
    columns, names = found.pop("token_columns"), found.pop("image_names", ())
    images = [f"api/runs/{run.id}/images/{name}" for name in names if has_image(run, name)]
    return {**found, "num_tokens": found["tokens"], "tokens": columns, "num_images": found["images"], "images": images}


def rollout(run: Run, query: Query) -> dict[str, Any]:
    found = _ask(run, lambda db: reading.read_rollout(db, *_key(query)), None)
    if found is None:
        raise web.HTTPNotFound(reason="the run has no such rollout")
    return _detail(run, found)


def group(run: Run, query: Query) -> dict[str, Any]:
    source, episode, _ = _key(query)
    found = _ask(run, lambda db: reading.read_group(db, source, episode, _MAX_GROUP_TOKENS), [])
    return {"rows": [_detail(run, each) for each in found]}


def same_prompt(run: Run, query: Query) -> dict[str, Any]:
    limit = query.integer("limit", 200, 1, _MAX_LIMIT)
    return {"rows": _ask(run, lambda db: reading.read_same_prompt(db, *_key(query), limit), [])}
