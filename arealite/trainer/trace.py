"""The time of a training loop by named phases: as numbers for the statistics, and as a trace file.

Wrap each part of a step in `with trace.phase("rollout"):`. `take()` returns the seconds since the last call, for
stats.jsonl. The spans also go to trace.json in Chrome's format (open it in ui.perfetto.dev or chrome://tracing),
flushed at each `take`.
"""

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
    """Records spans. Without a path it keeps only the numbers."""

    def __init__(self, path: Path | None = None):
        self._path = path
        self._start = time.perf_counter()
        self._last_take = self._start
        self._seconds: dict[str, float] = {}
        self._events: list[dict] = []
        self._tracks: set[str] = set()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("[\n")
            self._add({"name": "process_name", "ph": "M", "args": {"name": "trainer"}})

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
        """Add a span of another process on a track of its own. `began` is `time.time()` of that process."""
        start = began - time.time() + time.perf_counter() - self._start
        where = {"tid": zlib.crc32(track.encode())}
        if track not in self._tracks:
            self._tracks.add(track)
            self._add({"name": "thread_name", "ph": "M", "args": {"name": track}, **where})
        self._add({"name": name, "ph": "X", "ts": _us(start), "dur": _us(took_s), **where})

    def take(self) -> dict[str, float]:
        """Return seconds since the last call: `time/<phase>` for each phase, `time/step` for all."""
        now = time.perf_counter()
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        times["time/step"] = now - self._last_take
        self._seconds, self._last_take = {}, now
        self.flush()
        return times

    def flush(self) -> None:
        """Write the recorded spans to the file."""
        if self._path is not None and self._events:
            with self._disable_on_os_error(), self._path.open("a") as file:
                file.writelines(json.dumps(event) + ",\n" for event in self._events)
        self._events.clear()

    def close(self) -> None:
        """End the file so that it is strict JSON. Viewers do not need this, other programs do."""
        self.flush()
        if self._path is not None:
            with self._disable_on_os_error():
                text = self._path.read_text().rstrip().removesuffix(",")
                self._path.write_text(text + "\n]\n")
            self._path = None

    @contextlib.contextmanager
    def _disable_on_os_error(self) -> Iterator[None]:
        """Stop tracing when the file cannot be written (a full disk), and let the run continue."""
        try:
            yield
        except OSError as error:
            logger.warning("tracing stops: cannot write %s: %s", self._path, error.strerror)
            self._path = None

    def _add(self, event: dict) -> None:
        if self._path is not None:
            self._events.append({"pid": os.getpid(), "tid": threading.get_native_id(), **event})


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
