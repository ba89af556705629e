"""Reads stats.jsonl of a run as columns, line by line as the file grows.

A row is a line: the statistics of a step, or of one evaluation. Damaged lines are left out. A file that was replaced or
cut, as when a run recovers, is read again from its start.
"""

import random
import threading
from pathlib import Path
from typing import Any

import orjson

from arealite.dashboard.opening import GrowingFile

# Positions are numbers that say which reading of the file they belong to: a page that still shows rows of an earlier
# one gets everything again. JavaScript has 53 bits.
_ROW_BITS = 32
_MAX_COLUMNS = 4_000
_MAX_STEP = 2**53


class StatsFile(GrowingFile):
    """The rows of one stats.jsonl; safe to use from several threads."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._lock = threading.Lock()
        self._columns: dict[str, list[float | None]] = {}
        self._num_rows = 0
        self._generation = random.getrandbits(20) + 1

    def update(self) -> None:
        """Read what was appended since the last call."""
        with self._lock:
            self._read_new()

    def rows(self, since: int = 0) -> dict[str, Any]:
        """Return columns from a position on, and the position of the next call."""
        with self._lock:
            self._read_new()
            generation, first = since >> _ROW_BITS, since & (1 << _ROW_BITS) - 1
            is_reset = since > 0 and (generation != self._generation or first > self._num_rows)
            first = 0 if is_reset or since <= 0 else first
            answer: dict[str, Any] = {
                "next": self._generation << _ROW_BITS | self._num_rows,
                "columns": {name: values[first:] for name, values in self._columns.items()},
            }
            return answer | {"reset": True} if is_reset else answer

    def column(self, name: str) -> list[float | None]:
        """Return one column of what was read so far."""
        with self._lock:
            return list(self._columns.get(name, ()))

    def names(self) -> list[str]:
        """Return the names of all columns read so far."""
        with self._lock:
            return list(self._columns)

    def _read_new(self) -> None:
        with self.open_new() as file:
            data = b"" if file is None else file.read()
        # The last line may still be being written.
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            self._add(line)

    def forget(self) -> None:
        super().forget()
        if self._num_rows:
            self._columns, self._num_rows = {}, 0
            self._generation = self._generation % (1 << 20) + 1

    def _add(self, line: bytes) -> None:
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError:
            return
        step = values.get("step") if isinstance(values, dict) else None
        if type(step) is not int or abs(step) >= _MAX_STEP:
            return
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= _MAX_COLUMNS:
                    continue
                column = self._columns[name] = [None] * self._num_rows
            column.append(value if type(value) in (int, float) and abs(value) < 1e300 else None)
        self._num_rows += 1
        for column in self._columns.values():
            if len(column) < self._num_rows:
                column.append(None)
