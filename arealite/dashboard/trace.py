"""Reads trace.json of a run and returns the spans of a time window, few enough to draw.

The file is read as it grows. One that was replaced, as when a run resumes or the file became too large, is read again
together with its older part. Counters are left out: the ledger has those of servers.
"""

import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from arealite.dashboard.opening import GrowingFile, open_regular
from arealite.utils.trace.trace_file import TraceReader, lane_order, older_path

DEFAULT_SPANS, MAX_SPANS = 5_000, 20_000
# Spans that share a column this wide may become one: a part of the window.
_COLUMNS = 2_000
# More spans than two files of the largest size have.
_MAX_TOTAL = 1_000_000
# Bytes of one portion of the file.
_PORTION = 1 << 24


class _Lane:
    """Spans of one lane in the order of the file, and as arrays in order of time."""

    def __init__(self) -> None:
        # Beginning in unix seconds, seconds, name, and arguments as JSON.
        self.spans: list[tuple[float, float, str, bytes]] = []
        self._sorted: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def add(self, span: tuple[float, float, str, bytes]) -> None:
        self.spans.append(span)
        self._sorted = None

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return beginnings, ends and positions in `spans`, in order of the beginnings."""
        if self._sorted is None:
            begins = np.array([span[0] for span in self.spans])
            ends = begins + np.array([span[1] for span in self.spans])
            order = np.argsort(begins, kind="stable")
            self._sorted = begins[order], ends[order], order
        return self._sorted


class TraceFile(GrowingFile):
    """The spans of one run; safe to use from several threads."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        super().forget()
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._total = 0
        self._reader = TraceReader()

    def window(self, start: float | None, end: float | None, limit: int) -> dict[str, Any]:
        """Return the lanes between two unix times, by default all, with about `limit` spans at most."""
        with self._lock:
            self._read_new()
            arrays = {key: lane.arrays() for key, lane in self._lanes.items()}
            first = min((float(begins[0]) for begins, _, _ in arrays.values()), default=0.0)
            last = max((float(ends.max()) for _, ends, _ in arrays.values()), default=0.0)
            start, end = first if start is None else start, last if end is None else end
            found = {k: np.flatnonzero((b <= end) & (e >= start)) for k, (b, e, _) in arrays.items()}
            is_truncated = sum(map(len, found.values())) > limit
            width_s = max(end - start, 1e-6) / _COLUMNS
            spans = {key: self._whole(key, arrays[key][2][rows]) for key, rows in found.items() if not is_truncated}
            while is_truncated:
                spans = {key: self._merged(key, *arrays[key], rows, width_s) for key, rows in found.items()}
                if sum(map(len, spans.values())) <= limit or width_s > end - start:
                    break
                width_s *= 2
        order = sorted(spans, key=lane_order)
        lanes = [{"id": f"{g}:{name}", "group": g, "name": name, "spans": spans[g, name]} for g, name in order]
        return {"start": start, "end": end, "first": first, "last": last, "lanes": lanes, "truncated": is_truncated}

    def _whole(self, key: tuple[str, str], positions: np.ndarray) -> list[Any]:
        spans = self._lanes[key].spans
        return [(*spans[i][:3], orjson.Fragment(spans[i][3])) for i in positions.tolist()]

    def _merged(
        self,
        key: tuple[str, str],
        begins: np.ndarray,
        ends: np.ndarray,
        positions: np.ndarray,
        rows: np.ndarray,
        width_s: float,
    ) -> list[Any]:
        """Return long spans as they are; short ones that begin in the same column become one."""
        is_short = ends[rows] - begins[rows] < width_s
        result = self._whole(key, positions[rows[~is_short]])
        short = rows[is_short]
        if len(short):
            columns = np.floor(begins[short] / width_s)
            _, starts, counts = np.unique(columns, return_index=True, return_counts=True)
            # Named after the longest.
            longest = short[np.lexsort((begins[short] - ends[short], columns))[starts]]
            last_ends = np.maximum.reduceat(ends[short], starts)
            for first, named, count, last in zip(short[starts], longest, counts.tolist(), last_ends, strict=True):
                began, seconds, name, args = self._lanes[key].spans[positions[named]]
                if count > 1:
                    result.append((float(begins[first]), float(last - begins[first]), name, {"merged": count}))
                else:
                    result.append((began, seconds, name, orjson.Fragment(args)))
        return sorted(result, key=lambda span: span[0])

    def _read_new(self) -> None:
        with self.open_new() as file:
            if file is None:
                return
            if not self._offset:
                self._lanes, self._total = {}, 0
                with suppress(FileNotFoundError), open_regular(older_path(self.path)) as older:
                    self._read_lines(older)
                self._reader = TraceReader()
            self._offset += self._read_lines(file)

    def _read_lines(self, file: Any) -> int:
        """Add the events of all complete lines; returns how many bytes they have."""
        done = 0
        rest = b""
        while data := file.read(_PORTION):
            *lines, rest = (rest + data).split(b"\n")
            done += sum(map(len, lines)) + len(lines)
            for event in map(self._reader.read, lines):
                if event is not None and event.seconds is not None and self._total < _MAX_TOTAL:
                    # A copy: what orjson returns keeps the kilobytes that it reserved.
                    packed = bytes(memoryview(orjson.dumps(event.args)))
                    span = event.began, event.seconds, sys.intern(event.name), packed
                    self._lanes.setdefault(event.lane, _Lane()).add(span)
                    self._total += 1
        return done
