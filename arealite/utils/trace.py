"""Where the time of a training loop goes: named phases, as numbers for the statistics and as a picture.

`with trace.phase("rollout"):` around each part of a step; `take()` gives the seconds since the last call for stats.jsonl. The spans also go to
trace.json in Chrome's format (open it in ui.perfetto.dev or chrome://tracing), flushed at each `take`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("arealite.trace")


class Trace:
    """Spans of one process. Without a path, only the numbers are kept."""

    def __init__(self, path: Path | None = None, name: str = "trainer"):
        self._path = path
        self._start = time.perf_counter()
        self._last_take = self._start
        self._seconds: dict[str, float] = {}
        self._events: list[dict] = []
        self._tracks: set[str] = set()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("[\n")
            self._add({"name": "process_name", "ph": "M", "args": {"name": name}})

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step. Phases may nest; each counts its own full span."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + took_s
            self._add({"name": name, "ph": "X", "ts": _us(began - self._start), "dur": _us(took_s)})

    def span(self, name: str, began: float, took_s: float, track: str) -> None:
        """What another process did, by its clock (`time.time`), on a track of its own."""
        start = began - time.time() + time.perf_counter() - self._start
        where = {"tid": zlib.crc32(track.encode())}
        if track not in self._tracks:
            self._tracks.add(track)
            self._add({"name": "thread_name", "ph": "M", "args": {"name": track}, **where})
        self._add({"name": name, "ph": "X", "ts": _us(start), "dur": _us(took_s), **where})

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, as `time/<phase>`, and of the whole as `time/step`."""
        now = time.perf_counter()
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        times["time/step"] = now - self._last_take
        self._seconds, self._last_take = {}, now
        self.flush()
        return times

    def flush(self) -> None:
        if self._path is not None and self._events:
            with self._costs_the_trace_alone(), self._path.open("a") as file:
                file.writelines(json.dumps(event) + ",\n" for event in self._events)
        self._events.clear()

    def close(self) -> None:
        """Finish the file, so that it is strict JSON as well (viewers do not need it)."""
        self.flush()
        if self._path is not None:
            with self._costs_the_trace_alone():
                text = self._path.read_text().rstrip().removesuffix(",")
                self._path.write_text(text + "\n]\n")
            self._path = None

    @contextlib.contextmanager
    def _costs_the_trace_alone(self) -> Iterator[None]:
        """A full disk ends the trace, not the run."""
        try:
            yield
        except OSError as error:
            logger.warning("no more is written to %s: %s", self._path, error.strerror)
            self._path = None

    def _add(self, event: dict) -> None:
        if self._path is not None:
            self._events.append({"pid": os.getpid(), "tid": threading.get_native_id(), **event})


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
