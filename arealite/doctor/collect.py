"""Collects what can be seen of a run from outside: status, /proc, stacks, machine.

Nothing here judges. What cannot be read becomes a line in `Case.notes`, never an error.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arealite.doctor.case import Case, Process
from arealite.doctor.machine import read_disks, read_gpus, read_memory, write_probe
from arealite.doctor.proc import is_same_process, read_proc, read_usage
from arealite.doctor.stacks import read_stacks
from arealite.utils.rundir import RunDir
from arealite.utils.status.memory import STATUS_NAME
from arealite.utils.status.writer import FOLDER

# Between two looks at counters: processor time, generated tokens.
SAMPLE_S = 1.0
_MAX_STATUS_BYTES = 1 << 20
_MAX_FILES = 5000


def collect(run_dir: Path, patience_s: float, with_stacks: bool = True) -> Case:
    """Look at a run for about a second."""
    case = Case(RunDir(run_dir).path, patience_s)
    case.folder_clock = write_probe(case)
    found = {process.key: process for process in _read_files(case)}
    for process in _read_memory(case):
        known = found.get(process.key)
        process.file_age_s = known.file_age_s if known else None
        found[process.key] = process
    for launcher in (process for process in list(found.values()) if process.role == "launcher"):
        for child in launcher.parts("children"):
            started = found.get((*launcher.key[:2], child.get("pid", 0)))
            if started is not None and isinstance(child.get("code"), int):
                started.exit_code = child["code"]
    case.processes = sorted(found.values(), key=lambda process: (process.role, process.name))
    for process in case.processes:
        if process.is_local:
            process.proc = read_proc(process.pid, process.started)
    _sample(case)
    if with_stacks:
        read_stacks(case)
    case.memory, case.gpus = read_memory(case), read_gpus(case)
    case.disks = read_disks(case)
    return case


def _read_files(case: Case) -> Iterator[Process]:
    folder = case.run_dir / FOLDER
    try:
        paths = sorted(folder.glob("*.json"))[:_MAX_FILES]
    except OSError as error:
        case.notes.append(f"cannot read {folder}: {error.strerror}")
        return
    for path in paths:
        try:
            content, written = path.read_bytes()[:_MAX_STATUS_BYTES], path.stat().st_mtime
        except OSError as error:
            case.notes.append(f"cannot read {path.name}: {error.strerror}")
            continue
        process = _parse(case, content, path.name)
        if process is not None:
            if not _is_of(case, process):
                case.notes.append(f"{path.name} belongs to another run ({str(process.status.get('run'))[:80]})")
            process.file_age_s = max(0.0, case.folder_clock - written)
            process.age_s = process.file_age_s
            process.clock_skew_s = float(process.status["written"]) - written
            yield process


def _read_memory(case: Case) -> Iterator[Process]:
    """Find processes of this run on this machine by their files in memory, also without any file on disk."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        content = _memory_of(int(entry))
        process = _parse(case, content, f"the memory of process {entry}") if content else None
        # Other runs may name this one: its replays, or runs that start from its checkpoints.
        if process is not None and process.pid == int(entry) and _is_of(case, process):
            process.is_live = True
            process.age_s = max(0.0, time.monotonic() - float(process.status["clock"]))
            yield process


def _is_of(case: Case, process: Process) -> bool:
    """Whether a process named this run directory, by any path to it."""
    return os.path.realpath(str(process.status.get("run"))) == os.path.realpath(case.run_dir)


def _memory_of(pid: int) -> bytes:
    """Return the status in the memory of a process; empty if it has none or belongs to another user."""
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{STATUS_NAME}"):
                for _ in range(5):
                    content = Path(folder, name).read_bytes()
                    # It is being replaced otherwise: empty, cut, or with the end of what it was.
                    with contextlib.suppress(ValueError):
                        json.loads(content)
                        return content
    except OSError:
        pass
    return b""


def _parse(case: Case, content: bytes, where: str) -> Process | None:
    """Return the process that a status describes; a note if it is damaged."""
    try:
        values: Any = json.loads(content)
        if not isinstance(values, dict):
            raise ValueError("it is not a mapping")
        process = Process(
            name=str(values["name"]),
            role=str(values["role"]),
            pid=int(values["pid"]),
            host=str(values["host"]),
            started=float(values["started"]),
            status=values,
        )
        values |= {name: float(values[name]) for name in ("written", "clock")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        case.notes.append(f"{where} is no status of a process ({type(error).__name__}: {str(error)[:80]}): ignored")
        return None
    return process


def _sample(case: Case) -> None:
    """Measure processor time and generated tokens over a second."""
    local = [process for process in case.processes if process.proc is not None]
    before = {process.pid: (read_usage(process.pid), _tokens(process.status)) for process in local}
    if not local:
        return
    began = time.monotonic()
    time.sleep(SAMPLE_S)
    for process in local:
        usage, tokens = before[process.pid]
        content = _memory_of(process.pid)
        try:
            status = json.loads(content) if content else None
        except ValueError:
            status = None
        seconds = time.monotonic() - began
        now = read_usage(process.pid)
        process.cpu_share = (now.cpu_s - usage.cpu_s) / seconds
        process.major_faults_per_s = (now.major_faults - usage.major_faults) / seconds
        if status and tokens is not None and status["clock"] > process.status["clock"]:
            passed_s = status["clock"] - process.status["clock"]
            process.tokens_per_s = ((_tokens(status) or 0) - tokens) / passed_s
        if status and process.is_live and is_same_process(process.pid, process.started):
            process.status = status
            process.age_s = max(0.0, time.monotonic() - float(status["clock"]))


def _tokens(status: dict[str, Any]) -> int | None:
    engine = status.get("engine")
    return engine.get("generated_tokens") if isinstance(engine, dict) else None
