"""Finds rollouts of a run by filters, words and order.

Numbers of all rows are in memory (12 MB for 10⁵), texts in `run.sqlite`. The dashboard keeps one `RolloutIndex` for
each run that it shows: a filter or another order takes milliseconds, where SQLite would read most of the table. Follows
a run that goes on: rows are only added, except when it recovers; then everything is read again.
"""

import json
import os
import re
import sqlite3
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from arealite.core.ledger.reading import MAX_PREVIEW, RolloutFilter, match_phrase

NUMBERS = (
    "episode", "sample", "step", "reward", "oldest_version", "newest_version", "tokens", "answer_tokens", "turns",
    "images", "truncated",
)  # fmt: skip
_LOAD = (
    f"SELECT r.id, r.prompt, {', '.join(f'r.{name}' for name in NUMBERS)}, r.source, e.state FROM rollouts r "
    "LEFT JOIN episodes e ON e.source = r.source AND e.id = r.episode WHERE r.id > ? ORDER BY r.id"
)
# Texts whose matches are kept.
_MAX_TEXTS = 16


class RolloutIndex:
    """The numbers of all rollouts of one run; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._identity: tuple[int, int] | None = None
        self._clear()
        # Whether all rows have been read once. Until then `find` takes about a second for 10⁵ rows.
        self.is_loaded = False

    def update(self, db: sqlite3.Connection) -> None:
        """Read the rows that were added since the last call."""
        with self._lock:
            self._update(db)

    def _clear(self) -> None:
        self._ids = np.empty(0, np.int64)
        self._columns = {name: np.empty(0, np.float64) for name in NUMBERS}
        self._prompts = np.empty(0, np.int64)
        # Texts as numbers: the position in the list of those seen.
        self._words: dict[str, list[str | None]] = {"source": [], "state": []}
        self._codes = {name: np.empty(0, np.int16) for name in self._words}
        # For each text the last id that was searched, and for each row up to there whether it matches.
        self._matches: OrderedDict[str, np.ndarray] = OrderedDict()

    def find(
        self,
        db: sqlite3.Connection,
        where: RolloutFilter,
        sort: str = "step",
        desc: bool = True,
        offset: int = 0,
        limit: int = 100,
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return how many rollouts there are, and `limit` of them with the beginnings of their texts."""
        with self._lock:
            self._update(db)
            found = np.flatnonzero(self._mask(db, where))
            values = self._columns[sort][found]
            # Rows are in the order of their ids, which decides between equal values.
            order = np.argsort(values, kind="stable")
            order = order[::-1] if desc else order
            chosen = found[order[offset : offset + limit]]
            rows = [self._row(i) for i in chosen.tolist()]
            ids = self._ids[chosen].tolist()
        texts = _read_texts(db, ids)
        empty = {"prompt": "", "completion": ""}
        return len(found), [row | texts.get(each, empty) for each, row in zip(ids, rows, strict=True)]

    def _update(self, db: sqlite3.Connection) -> None:
        # As bytes: the path may be no valid UTF-8.
        (path,) = db.execute("SELECT CAST(file AS BLOB) FROM pragma_database_list WHERE name = 'main'").fetchone()
        state = os.stat(path)
        if self._identity != (state.st_dev, state.st_ino):
            # Another run of the same name has its own file, whose ids begin again.
            self._clear()
            self._identity = state.st_dev, state.st_ino
        last = int(self._ids[-1]) if len(self._ids) else -1
        rows = db.execute(_LOAD, (last,)).fetchall()
        (count,) = db.execute("SELECT COUNT(*) FROM rollouts").fetchone()
        if count != len(self._ids) + len(rows) and len(self._ids):
            # Rows were removed or replaced.
            self._clear()
            rows = db.execute(_LOAD, (-1,)).fetchall()
        if rows:
            self._add(list(zip(*rows, strict=True)))
        self.is_loaded = True

    def _add(self, columns: list[tuple[Any, ...]]) -> None:
        ids, prompts, *numbers, sources, states = columns
        self._ids = np.concatenate([self._ids, np.array(ids, np.int64)])
        self._prompts = np.concatenate([self._prompts, np.array(prompts, np.int64)])
        for name, values in zip(NUMBERS, numbers, strict=True):
            self._columns[name] = np.concatenate([self._columns[name], np.array(values, np.float64)])
        for name, values in (("source", sources), ("state", states)):
            words = self._words[name]
            words += [word for word in dict.fromkeys(values) if word not in words]
            position = {word: i for i, word in enumerate(words)}
            codes = np.array([position[value] for value in values], np.int16)
            self._codes[name] = np.concatenate([self._codes[name], codes])

    def _mask(self, db: sqlite3.Connection, where: RolloutFilter) -> np.ndarray:
        mask = np.ones(len(self._ids), bool)
        bounds = (("reward", where.min_reward, where.max_reward), ("tokens", where.min_tokens, where.max_tokens))
        for name, low, high in (*bounds, ("step", where.step_from, where.step_to)):
            if low is not None:
                mask &= self._columns[name] >= low
            if high is not None:
                mask &= self._columns[name] <= high
        for name, word in (("source", where.source), ("state", where.state)):
            if word is not None:
                words = self._words[name]
                mask &= self._codes[name] == (words.index(word) if word in words else -1)
        text = where.text.strip()
        return mask & self._matching(db, text) if text else mask

    def _matching(self, db: sqlite3.Connection, text: str) -> np.ndarray:
        """Return for each row whether its completion or prompt contains a text."""
        known = self._matches.pop(text, np.empty(0, bool))
        new = self._ids[len(known) :]
        if len(new):
            completions, prompts = _search(db, text, int(new[0]))
            found = np.isin(new, completions) | np.isin(self._prompts[len(known) :], prompts)
            known = np.concatenate([known, found])
        self._matches[text] = known
        if len(self._matches) > _MAX_TEXTS:
            self._matches.popitem(last=False)
        return known

    def _row(self, i: int) -> dict[str, Any]:
        row: dict[str, Any] = {name: self._words[name][self._codes[name][i]] for name in self._words}
        for name in NUMBERS:
            value = float(self._columns[name][i])
            row[name] = None if np.isnan(value) else value if name == "reward" else int(value)
        return row | {"truncated": bool(row["truncated"])}


def _read_texts(db: sqlite3.Connection, ids: list[int]) -> dict[int, dict[str, str]]:
    found = db.execute(
        f"SELECT r.id, substr(p.text, 1, {MAX_PREVIEW}), r.preview FROM rollouts r LEFT JOIN prompts p "
        "ON p.id = r.prompt WHERE r.id IN (SELECT value FROM json_each(?))",
        (json.dumps(ids),),
    )
    return {number: {"prompt": prompt or "", "completion": preview or ""} for number, prompt, preview in found}


def _search(db: sqlite3.Connection, text: str, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids of completions that contain a text, from `first` on, and of all prompts that do.

    With the index of words, `text` is a phrase whose last word may be incomplete; otherwise any characters, in ASCII
    without regard to case.
    """
    has_index = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'rollout_search'").fetchone()
    if has_index and re.search(r"\w", text):
        phrase = match_phrase(text)
        queries = (
            ("SELECT rowid FROM rollout_search WHERE rollout_search MATCH ? AND rowid >= ?", (phrase, first)),
            ("SELECT rowid FROM prompt_search WHERE prompt_search MATCH ?", (phrase,)),
        )
    else:
        pattern = "%{}%".format(re.sub(r"([%_\\])", r"\\\1", text))
        queries = (
            ("SELECT id FROM rollout_data WHERE id >= ? AND completion LIKE ? ESCAPE '\\'", (first, pattern)),
            ("SELECT id FROM prompts WHERE text LIKE ? ESCAPE '\\'", (pattern,)),
        )
    completions, prompts = (np.array([row[0] for row in db.execute(*query)], np.int64) for query in queries)
    return completions, prompts
