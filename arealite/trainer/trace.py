"""The time of a training loop by named phases: numbers for the statistics, and the run's trace.

Wrap each part of a step in `with trace.phase("rollout"):`. `take()` returns the seconds since the last call, for
stats.jsonl. The phases, and what all of this process has recorded (`utils.trace.tracing`), go to trace.json: open it
in ui.perfetto.dev or chrome://tracing.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from arealite.utils.trace import tracing
from arealite.utils.trace.cpu_clock import CpuClock
from arealite.utils.trace.trace_file import TraceWriter

logger = logging.getLogger("arealite.trace")
# Phases that end later than this after the last write have all spans written, for those who watch a long step.
_WRITE_INTERVAL_S = 5.0
TRAINER_LANE = "steps"


class Trace:
    """Records spans. Without a path it keeps only the numbers."""

    def __init__(self, path: Path | None = None):
        self._path = path
        self._last_take = self._last_write = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._cpu = CpuClock()
        self._writer: TraceWriter | None = None
        if path is not None:
            with self._disable_on_os_error():
                self._writer = TraceWriter(path)
                tracing.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step. Phases may nest; each counts its own full span."""
        began, start = time.time(), time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            self._seconds[name] = self._seconds.get(name, 0.0) + now - start
            tracing.record("trainer", TRAINER_LANE, name, began, now - start)
            if now - self._last_write > _WRITE_INTERVAL_S:
                self.flush()

    def span(self, name: str, began: float, took_s: float, track: str) -> None:
        """Add a span of another process on a lane of its own. `began` is `time.time()` of that process."""
        tracing.record("trainer", track, name, began, took_s)

    def take(self) -> dict[str, float]:
        """Return seconds since the last call: `time/<phase>` for each phase, `time/step`, CPU seconds."""
        now = time.perf_counter()
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        times["time/step"] = now - self._last_take
        times |= self._cpu.take()
        self._seconds, self._last_take = {}, now
        if now - self._last_write > _WRITE_INTERVAL_S:
            self.flush()
        return times

    def flush(self) -> None:
        """Write the recorded spans to the file."""
        self._last_write = time.perf_counter()
        if self._writer is not None:
            with self._disable_on_os_error():
                self._writer.write(tracing.take())

    def close(self) -> None:
        """Write what is left and end the file."""
        self.flush()
        if self._writer is not None:
            with self._disable_on_os_error():
                self._writer.close()
            self._writer = None
            tracing.stop()

    @contextlib.contextmanager
    def _disable_on_os_error(self) -> Iterator[None]:
        """Stop tracing when the file cannot be written (a full disk), and let the run continue."""
        try:
            yield
        except OSError as error:
            logger.warning("tracing stops: cannot write %s: %s", self._path, error.strerror)
            self._writer = None
            tracing.stop()
