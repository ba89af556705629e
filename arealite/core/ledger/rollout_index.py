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
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from arealite.core.ledger.reading import MAX_PREVIEW, RolloutFilter, match_phrase, phrase_finder

NUMBERS = (
    "episode", "sample", "step", "reward", "oldest_version", "newest_version", "tokens", "answer_tokens", "turns",
    "images", "truncated",
)  # fmt: skip
_LOAD = (
    f"SELECT r.id, r.prompt, {', '.join(f'r.{name}' for name in NUMBERS)}, r.source, e.state FROM rollouts r "
    "LEFT JOIN episodes e ON e.source = r.source AND e.id = r.episode WHERE r.id > ? ORDER BY r.id"
)
_TEXTS = (
    "SELECT r.id, COALESCE(d.completion, ''), COALESCE(p.text, '') FROM rollouts r JOIN rollout_data d ON d.id = r.id "
    "JOIN prompts p ON p.id = r.prompt WHERE r.id IN (SELECT value FROM json_each(?))"
)
# Texts whose matches are kept.
_MAX_TEXTS = 16
# Texts that are read at once where they are searched without the index of words.
_SCAN_ROWS = 256


class _Numbers:
    """The numbers of the rows that were read so far. Never changed, so that it is read without a lock."""

    def __init__(self, rows: list[tuple[Any, ...]], before: "_Numbers | None" = None):
        ids, prompts, *numbers, sources, states = zip(*rows, strict=True) if rows else [()] * (len(NUMBERS) + 4)
        self.ids = np.array(ids, np.int64)
        self.prompts = np.array(prompts, np.int64)
        columns = zip(NUMBERS, numbers, strict=True)
        self.columns = {name: np.array(values, np.float64) for name, values in columns}
        # Texts as numbers: the position in the list of those seen.
        self.words: dict[str, list[str | None]] = {"source": [], "state": []} if before is None else before.words
        self.codes = {"source": self._encode("source", sources), "state": self._encode("state", states)}
        # For each text, which of the first rows contain it.
        self.matches: OrderedDict[str, np.ndarray] = OrderedDict() if before is None else before.matches
        if before is not None:
            self.ids = np.concatenate([before.ids, self.ids])
            self.prompts = np.concatenate([before.prompts, self.prompts])
            self.columns = {name: np.concatenate([before.columns[name], self.columns[name]]) for name in NUMBERS}
            self.codes = {name: np.concatenate([before.codes[name], self.codes[name]]) for name in self.words}

    def _encode(self, name: str, values: Sequence[str | None]) -> np.ndarray:
        words = self.words[name]
        words += [word for word in dict.fromkeys(values) if word not in words]
        position = {word: i for i, word in enumerate(words)}
        return np.array([position[value] for value in values], np.int16)

    def choose(self, where: RolloutFilter, sort: str, desc: bool) -> np.ndarray:
        """Return the positions of the rows that pass the filter, whatever their texts are, in an order."""
        mask = np.ones(len(self.ids), bool)
        bounds = (("reward", where.min_reward, where.max_reward), ("tokens", where.min_tokens, where.max_tokens))
        for name, low, high in (*bounds, ("step", where.step_from, where.step_to)):
            if low is not None:
                mask &= self.columns[name] >= low
            if high is not None:
                mask &= self.columns[name] <= high
        for name, word in (("source", where.source), ("state", where.state)):
            if word is not None:
                words = self.words[name]
                mask &= self.codes[name] == (words.index(word) if word in words else -1)
        found = np.flatnonzero(mask)
        # Rows are in the order of their ids, which decides between equal values.
        order = found[np.argsort(self.columns[sort][found], kind="stable")]
        return order[::-1] if desc else order

    def rows(self, db: sqlite3.Connection, positions: np.ndarray) -> list[dict[str, Any]]:
        """Return rows with the beginnings of their texts."""
        texts = _read_texts(db, self.ids[positions].tolist())
        # The run may have deleted one since.
        empty = {"prompt": "", "completion": ""}
        return [self._row(i) | texts.get(int(self.ids[i]), empty) for i in positions.tolist()]

    def _row(self, i: int) -> dict[str, Any]:
        row: dict[str, Any] = {name: self.words[name][self.codes[name][i]] for name in self.words}
        for name in NUMBERS:
            value = float(self.columns[name][i])
            row[name] = None if np.isnan(value) else value if name == "reward" else int(value)
        return row | {"truncated": bool(row["truncated"])}


class RolloutIndex:
    """The numbers of all rollouts of one run; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._identity: tuple[int, int] | None = None
        self._numbers = _Numbers([])
        # Whether all rows have been read once. Until then `find` takes about a second for 10⁵ rows.
        self.is_loaded = False

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
        numbers = self.update(db)
        chosen = numbers.choose(where, sort, desc)
        if text := where.text.strip():
            chosen = chosen[self._matching(db, numbers, text)[chosen]]
        return len(chosen), numbers.rows(db, chosen[offset : offset + limit])

    def find_first(
        self, db: sqlite3.Connection, where: RolloutFilter, sort: str, desc: bool, limit: int, budget_s: float
    ) -> tuple[int | None, list[dict[str, Any]]]:
        """Return the first rollouts with a text, of those read within a time; the number is None.

        Words that most answers have take long in the index of words, and are found at once this way. A text whose
        matches are known is answered as `find` does.
        """
        deadline, numbers = time.monotonic() + budget_s, self.update(db)
        if len(numbers.matches.get(where.text.strip(), ())) == len(numbers.ids):
            return self.find(db, where, sort, desc, limit=limit)
        chosen, contains = numbers.choose(where, sort, desc), phrase_finder(where.text)
        ids, found = numbers.ids[chosen], []
        for start in range(0, len(ids), _SCAN_ROWS):
            if len(found) >= limit or time.monotonic() > deadline:
                break
            part = ids[start : start + _SCAN_ROWS].tolist()
            matches = {key: any(map(contains, texts)) for key, *texts in db.execute(_TEXTS, (json.dumps(part),))}
            found += [start + i for i, key in enumerate(part) if matches.get(key)]
        return None, numbers.rows(db, chosen[found[:limit]])

    def update(self, db: sqlite3.Connection) -> _Numbers:
        """Read the rows that were added since the last call; returns all."""
        # As bytes: the path may be no valid UTF-8.
        (path,) = db.execute("SELECT CAST(file AS BLOB) FROM pragma_database_list WHERE name = 'main'").fetchone()
        state = os.stat(path)
        with self._lock:
            if self._identity != (state.st_dev, state.st_ino):
                # Another run of the same name has its own file, whose ids begin again.
                self._numbers = _Numbers([])
                self._identity = state.st_dev, state.st_ino
            ids = self._numbers.ids
            rows = db.execute(_LOAD, (int(ids[-1]) if len(ids) else -1,)).fetchall()
            (count,) = db.execute("SELECT COUNT(*) FROM rollouts").fetchone()
            if count != len(ids) + len(rows) and len(ids):
                # Rows were removed or replaced.
                self._numbers = _Numbers(db.execute(_LOAD, (-1,)).fetchall())
            elif rows:
                self._numbers = _Numbers(rows, self._numbers)
            self.is_loaded = True
            return self._numbers

    def _matching(self, db: sqlite3.Connection, numbers: _Numbers, text: str) -> np.ndarray:
        """Return for each row whether its completion or prompt contains a text."""
        # Without the lock: a word that most answers have takes long.
        known = numbers.matches.get(text, np.empty(0, bool))[: len(numbers.ids)]
        new = numbers.ids[len(known) :]
        if len(new):
            completions, prompts = _search(db, text, int(new[0]))
            found = np.isin(new, completions) | np.isin(numbers.prompts[len(known) :], prompts)
            known = np.concatenate([known, found])
        with self._lock:
            numbers.matches[text] = known
            numbers.matches.move_to_end(text)
            if len(numbers.matches) > _MAX_TEXTS:
                numbers.matches.popitem(last=False)
        return known


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
