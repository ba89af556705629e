"""`status`: the status of this process, written while it lives (see the package's docstring).

It never fails a run: a file that cannot be written is reported once, and noted in the status in memory. A thread of its
own writes the file, so that the status in memory stays new while a write does not return (a file server that hangs).
"""

import asyncio
import atexit
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from arealite.utils.activity import activity
from arealite.utils.status import waits
from arealite.utils.status.memory import STATUS_NAME, dump_stacks_on_signal, make_memory, replace_content

logger = logging.getLogger("arealite.status")
FORMAT = 1
FOLDER = "status"
INTERVAL_S, FILE_INTERVAL_S = 1.0, 5.0
# The run directory and the name of a process, set by a launcher. The process removes its name, which is not that of
# its children.
RUN_ENV, NAME_ENV = "AREALITE_STATUS_RUN", "AREALITE_STATUS_NAME"
# Roles of the processes that a launcher names.
_ROLES = {"rank": "trainer", "server": "server"}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_EVENTS, _MAX_TEXT, _MAX_ERROR = 10, 300, 2000
# Steps whose durations are known to the doctor.
_NUM_PACE = 10
# Facts about the end of a process, which do not outlive it in a notebook's next run.
_LAST_FACTS = ("error", "signal")
Source = Callable[[], Any]


class Status:
    """What this process reports. `begin` starts it; before, everything else is only remembered."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self._sources: dict[str, Source] = {}
        self._loops: dict[str, _LoopProbe] = {}
        self._events: deque[tuple[float, str]] = deque(maxlen=_MAX_EVENTS)
        self._base: dict[str, Any] | None = None
        self._path: Path | None = None
        self._memory = -1
        self._file_due = 0.0
        self._problem = ""
        # Held while the file is written, and since when it is.
        self._file_lock = threading.Lock()
        self._writes_since: float | None = None
        # Whether `end` removes the variable again: a notebook may go on with other things.
        self._sets_environment = False
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, run_dir: str | Path, name: str, role: str, has_thread: bool = True) -> None:
        """Write the status of this process from now on; nothing changes if it does.

        Without a thread the process calls `tick` every second or so.
        """
        known = self._base or {}
        if known.get("pid") == os.getpid() and "ended" not in known:
            if (known["run"], known["name"]) == (str(Path(run_dir).absolute()), name):
                return
            # Another run of the same process, such as a notebook.
            self.end()
        for fact in _LAST_FACTS:
            self.facts.pop(fact, None)
        self._base = _describe_process(run_dir, name, role)
        self._path = Path(run_dir) / FOLDER / f"{name}.json"
        self._file_due = 0.0
        # A parent process may have been writing when it forked.
        self._file_lock, self._writes_since = threading.Lock(), None
        self._memory = make_memory(STATUS_NAME)
        self._base["stacks_fd"] = dump_stacks_on_signal()
        atexit.register(self.end)
        self.tick()
        if has_thread:
            self._stop.clear()
            bodies = {"status": self._write_memory_often, "status-file": self._write_file_often}
            self._threads = [threading.Thread(target=body, name=name, daemon=True) for name, body in bodies.items()]
            for thread in self._threads:
                thread.start()

    def begin_rank(self, run_dir: str | Path) -> None:
        """Begin in a trainer rank, if a launcher has not had it begin before."""
        run = str(Path(run_dir).absolute())
        is_named = os.environ.get(RUN_ENV) == run
        if not is_named and os.environ.get("RANK", "0") == "0":
            clear_status(run_dir)
        self.begin(run_dir, f"rank{os.environ.get('RANK', '0')}", "trainer")
        if not is_named:
            # Its workers inherit it.
            os.environ[RUN_ENV] = run
            self._sets_environment = True

    def begin_launcher(self, run_dir: str | Path, node: int, children: Source) -> None:
        """Begin in the launcher of a node, which calls `tick`: it starts processes, and best without threads."""
        self.add("children", children)
        self.begin(run_dir, f"node{node}", "launcher", has_thread=False)

    def environment(self, name: str) -> dict[str, str]:
        """Return the variables by which a child process begins its status under this name."""
        return {RUN_ENV: self._base["run"], NAME_ENV: name} if self._base and "ended" not in self._base else {}

    def begin_here(self, role: str) -> None:
        """Begin in a process of a run that has no name of its own, with a thread."""
        if RUN_ENV in os.environ:
            self.begin(os.environ[RUN_ENV], f"{role}-{os.getpid()}", role)

    def begin_quietly(self, role: str) -> None:
        """Only let the doctor find this process and read its stack: no thread, no file."""
        if RUN_ENV in os.environ:
            self._base = _describe_process(os.environ[RUN_ENV], f"{role}-{os.getpid()}", role)
            self._base |= {"interval_s": None, "stacks_fd": dump_stacks_on_signal()}
            self._memory = make_memory(STATUS_NAME)
            replace_content(self._memory, json.dumps(self.snapshot()).encode())

    def begin_from_environment(self) -> None:
        """Begin if a launcher has named this process."""
        name = os.environ.pop(NAME_ENV, None)
        # In controller mode ranks have the name of their engine, too: actor.rank0.
        own = name.rpartition(".rank")[1].strip(".") or name if name else ""
        role = next((role for start, role in _ROLES.items() if own.startswith(start)), None)
        if name and role and RUN_ENV in os.environ:
            self.begin(os.environ[RUN_ENV], name, role)

    def add(self, name: str, source: Source) -> None:
        """Have the status hold what `source` returns, under `name`; it is called from the status thread."""
        self._sources[name] = source

    def remove(self, *names: str) -> None:
        """Forget sources, and event loops of these names."""
        for name in names:
            self._sources.pop(name, None)
            self._loops.pop(name, None)

    def watch_loop(self, name: str, loop: asyncio.AbstractEventLoop, **sources: Source) -> None:
        """Measure how long an event loop takes to answer; `sources` are added."""
        self._loops[name] = _LoopProbe(loop)
        self._sources |= sources

    def count_steps(self, steps: range) -> Iterator[int]:
        """Yield the steps, and remember the present one and how long the last ones took."""
        began, last = time.monotonic(), deque[float](maxlen=_NUM_PACE)
        self.add("pace", lambda: {"age_s": time.monotonic() - began, "longest_s": max(list(last), default=None)})
        try:
            for step in steps:
                self.facts |= {"step": step, "total_steps": steps.stop}
                began = time.monotonic()
                yield step
                last.append(time.monotonic() - began)
        finally:
            self.remove("pace")

    def event(self, text: str) -> None:
        """Remember something that happened; the last ones are part of the status."""
        self._events.append((time.time(), text[:_MAX_TEXT]))

    def note_error(self, error: BaseException | None) -> None:
        """Remember why this process ends; nothing without an error."""
        if error is not None:
            self.facts["error"] = f"{type(error).__name__}: {error}"[:_MAX_ERROR]

    def mark(self, **facts: Any) -> None:
        """Add facts, and write them to the file at once: the process may end soon."""
        self.facts |= facts
        self._file_due = 0.0
        self.tick()

    def tick(self) -> None:
        """Write the status to memory, and to the file if that is due."""
        if self._base is None or self._base["pid"] != os.getpid():
            return
        self._write_memory()
        if time.monotonic() >= self._file_due:
            self._write_file()
            # Not earlier: a write may take long on a slow folder.
            self._file_due = time.monotonic() + FILE_INTERVAL_S

    def end(self, how: str = "ended") -> None:
        """Write the last status; idempotent."""
        if self._base is None or self._base["pid"] != os.getpid() or "ended" in self._base:
            return
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * INTERVAL_S)
        self._base["ended"] = how
        self._file_due = 0.0
        self.tick()
        os.close(self._memory)
        if self._sets_environment:
            self._sets_environment = False
            os.environ.pop(RUN_ENV, None)

    def loop_lag_s(self, name: str) -> float:
        """Return for how long a watched event loop has not answered; 0 if there is none of this name."""
        probe = self._loops.get(name)
        return probe.lag_s() if probe is not None else 0.0

    def snapshot(self) -> dict[str, Any]:
        """Return the status as it is now. Ages are in seconds, so that no clock matters."""
        doing = [{"text": text, "age_s": age_s} for text, age_s in activity.stack()]
        loops = {name: round(probe.lag_s(), 3) for name, probe in list(self._loops.items())}
        sources = {name: _read(source) for name, source in list(self._sources.items())}
        base = {**(self._base or {}), "written": time.time(), "clock": time.monotonic()}
        known = {"doing": doing, "waits": waits.describe(), "completed": waits.describe_completed(), "loops": loops}
        known["facts"] = dict(self.facts)
        return {**base, **known, **sources, "events": list(self._events), "problem": self._describe_problem()}

    def _describe_problem(self) -> str:
        """Say why the file is not written; empty if it is."""
        since = self._writes_since
        write_s = 0.0 if since is None else time.monotonic() - since
        if write_s > FILE_INTERVAL_S:
            return f"a write of {self._path} has not returned for {write_s:.0f} s"
        return self._problem

    def _write_memory(self) -> None:
        replace_content(self._memory, json.dumps(self.snapshot(), default=str).encode())

    def _write_file(self) -> None:
        """Write the file; not if a write by another thread does not return."""
        if self._file_lock.acquire(timeout=2 * INTERVAL_S):
            try:
                content = json.dumps(self.snapshot(), default=str).encode()
                self._writes_since = time.monotonic()
                self._replace_file(content)
            finally:
                self._writes_since = None
                self._file_lock.release()

    def _replace_file(self, content: bytes) -> None:
        assert self._path is not None
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(content)
            aside.replace(self._path)
            self._problem = ""
        except OSError as error:
            if not self._problem:
                logger.warning("the status of this process is not written: %s: %s", self._path, error.strerror)
            self._problem = f"cannot write {self._path}: {error.strerror}"

    def _write_memory_often(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._write_memory()

    def _write_file_often(self) -> None:
        while not self._stop.wait(FILE_INTERVAL_S):
            self._write_file()


class _LoopProbe:
    """Asks an event loop for a sign of life, one at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._asked: float | None = None

    def lag_s(self) -> float:
        """Return for how long the loop has not answered."""
        # The loop may answer meanwhile.
        asked = self._asked
        if asked is not None:
            return time.monotonic() - asked
        self._asked = time.monotonic()
        try:
            self.loop.call_soon_threadsafe(self._answer)
        except RuntimeError:
            # The loop is closed.
            self._asked = None
        return 0.0

    def _answer(self) -> None:
        self._asked = None


def _read(source: Source) -> Any:
    try:
        return source()
    # Sources read objects that other threads change. A status without one entry is better than none.
    except Exception as error:
        return {"unreadable": f"{type(error).__name__}: {error}"}


def _describe_process(run_dir: str | Path, name: str, role: str) -> dict[str, Any]:
    rank = os.environ.get("RANK")
    return {
        "format": FORMAT,
        "run": str(Path(run_dir).absolute()),
        "name": name,
        "role": role,
        "rank": int(rank) if rank and role == "trainer" else None,
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "host": os.uname().nodename,
        "pid_space": pid_space(),
        "interval_s": INTERVAL_S,
    }


def pid_space() -> str:
    """Name what a pid is valid in: one boot of a machine, one container."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def clear_status(run_dir: str | Path) -> None:
    """Remove what an earlier attempt or run has left."""
    for path in Path(run_dir, FOLDER).glob("*.json"):
        path.unlink(missing_ok=True)


status = Status()
