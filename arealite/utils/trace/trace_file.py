"""The trace of a run as a file: `trace.json` in Chrome's format, which ui.perfetto.dev opens.

One event a line; times are unix times in microseconds. A file that has become too large is renamed to `trace.1.json`,
instead of an earlier one, so that a run keeps at most two. `read_trace` reads both, also while they are written.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from arealite.utils.trace.tracing import Span

MAX_BYTES = 32 << 20
# A longer line is not read.
_MAX_LINE = 1 << 16
_END = b"\n]\n"
# The processes that a viewer shows.
GROUPS = ("trainer", "weights", "server", "rollout")


def older_path(path: Path) -> Path:
    """Return where the older part of a trace is kept."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


class TraceWriter:
    """Appends events, and keeps what an earlier file has. Raises `OSError` if it cannot write."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES):
        self.path, self.max_bytes = path, max_bytes
        self._lanes: dict[tuple[str, str], int] = {}
        # For each lane, when the last part in each of its rows ended.
        self._rows: dict[tuple[str, str], list[float]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _end_file(path)
            path.replace(older_path(path))
        self._begin_file()

    def write(self, spans: Iterable[Span]) -> None:
        """Append spans; begins a new file if this one has become too large."""
        lines = [json.dumps(event, separators=(",", ":")) for span in spans for event in self._events(span)]
        if not lines:
            return
        with self.path.open("a") as file:
            file.write("".join(f"{line},\n" for line in lines))
            is_full = file.tell() > self.max_bytes
        if is_full:
            _end_file(self.path)
            self.path.replace(older_path(self.path))
            self._lanes.clear()
            self._begin_file()

    def close(self) -> None:
        """End the file so that it is strict JSON. Viewers do not need this, other programs do."""
        _end_file(self.path)

    def _begin_file(self) -> None:
        names = [{"name": "process_name", "ph": "M", "pid": _pid(g), "args": {"name": g}} for g in GROUPS]
        self.path.write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in names))

    def _events(self, span: Span) -> Iterator[dict[str, Any]]:
        lane = span.lane
        if span.is_part and span.seconds is not None:
            row = self._row(span, span.began + span.seconds)
            lane = lane if row == 0 else f"{lane} +{row}"
        pid, tid = _pid(span.group), self._lanes.get((span.group, lane))
        if tid is None:
            tid = self._lanes[span.group, lane] = len(self._lanes) + 1
            yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane}}
        began = round(span.began * 1e6)
        event = {"name": span.name, "pid": pid, "tid": tid, "ts": began, "args": span.args}
        if span.seconds is None:
            yield event | {"ph": "C"}
        else:
            # Both ends are rounded: Perfetto drops a span that begins a microsecond before the last one ends.
            yield event | {"ph": "X", "dur": max(1, round((span.began + span.seconds) * 1e6) - began)}

    def _row(self, span: Span, end: float) -> int:
        """Return a free row of the lane: parts that overlap would hide each other. Spans come as they end."""
        ends = self._rows.setdefault((span.group, span.lane), [])
        row = next((i for i, last in enumerate(ends) if last <= span.began + 1e-6), len(ends))
        ends[row:] = [end, *ends[row + 1 :]]
        return row


def _pid(group: str) -> int:
    return GROUPS.index(group) + 1


def _end_file(path: Path) -> None:
    """Close the list of events, without a last line that a kill or a full disk has cut off."""
    with path.open("r+b") as file:
        start = file.seek(max(0, file.seek(0, 2) - 2 * _MAX_LINE))
        text = file.read()
        end = text.rfind(b",\n")
        if end >= 0 and not text.endswith(_END):
            file.truncate(start + end)
            file.seek(start + end)
            file.write(_END)


class Event(NamedTuple):
    """A span of a lane, or without `seconds` a sample of the numbers in `args`. Times are unix seconds."""

    lane: tuple[str, str]
    began: float
    seconds: float | None
    name: str
    args: dict[str, Any]


class TraceReader:
    """Reads the lines of one trace file, whose numbers of groups and lanes it keeps."""

    def __init__(self) -> None:
        self._groups: dict[Any, str] = {}
        self._lanes: dict[tuple[Any, Any], str] = {}

    def read(self, line: bytes) -> Event | None:
        """Return the event of a line; None if it has none, or was damaged by a full disk."""
        text = line.strip().rstrip(b",")
        if not text.startswith(b"{") or len(text) >= _MAX_LINE:
            return None
        try:
            event = orjson.loads(text)
            kind, pid, tid, args = event.get("ph"), event.get("pid"), event.get("tid"), event.get("args") or {}
            if kind == "M" and event.get("name") == "process_name":
                self._groups[pid] = str(args["name"])
            elif kind == "M" and event.get("name") == "thread_name":
                self._lanes[pid, tid] = str(args["name"])
            elif kind in ("X", "C"):
                group = self._groups.get(pid, "trainer")
                lane = group, self._lanes.get((pid, tid), group)
                seconds = max(0.0, float(event["dur"]) / 1e6) if kind == "X" else None
                return Event(lane, float(event["ts"]) / 1e6, seconds, str(event["name"]), args)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            pass
        return None


def lane_order(lane: tuple[str, str]) -> tuple[int, str]:
    """Sort lanes by group, then by name."""
    return GROUPS.index(lane[0]) if lane[0] in GROUPS else len(GROUPS), lane[1]


class Lane(NamedTuple):
    """Spans of one lane, each `[began (unix seconds), seconds, name, args]`, in order of their beginning.

    Samples of numbers have None as seconds.
    """

    group: str
    name: str
    spans: list[list[Any]]


def read_trace(path: Path) -> list[Lane]:
    """Return the lanes of a trace, ordered by group and name."""
    lanes: dict[tuple[str, str], list[list[Any]]] = {}
    for part in (older_path(path), path):
        reader = TraceReader()
        with suppress(FileNotFoundError), part.open("rb") as file:
            for event in filter(None, map(reader.read, file)):
                lanes.setdefault(event.lane, []).append(list(event[1:]))
    return [Lane(*lane, sorted(lanes[lane], key=lambda span: span[0])) for lane in sorted(lanes, key=lane_order)]
