"""The state of this machine: disks, memory, GPUs, and whether the run directory can be written."""

import contextlib
import errno
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from arealite.doctor.case import Case
from arealite.utils.status.writer import FOLDER

_PROBE_TIMEOUT_S, _GPU_TIMEOUT_S = 5.0, 5.0
_PROBE_BYTES = 64 * 1024
# Errors that may concern this user or this mount only, and not the run.
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_GPU_FIELDS = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu"


def write_probe(case: Case) -> float:
    """Write and remove a small file beside the status files; returns the file system's time."""
    result: list[float] = []
    began = time.monotonic()

    def write() -> None:
        path = _probe_folder(case.run_dir) / f".doctor.{os.getpid()}"
        try:
            path.write_bytes(b"\0" * _PROBE_BYTES)
            result.append(path.stat().st_mtime)
        except OSError as error:
            case.probe_error = error.strerror or str(error)
            case.is_probe_refused = error.errno in _REFUSED
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    thread = threading.Thread(target=write, name="doctor-probe", daemon=True)
    thread.start()
    thread.join(_PROBE_TIMEOUT_S)
    case.probe_s = time.monotonic() - began
    if thread.is_alive():
        case.probe_error = f"no answer within {_PROBE_TIMEOUT_S:.0f} s"
    return result[0] if result else time.time()


def _probe_folder(run_dir: Path) -> Path:
    return run_dir / FOLDER if (run_dir / FOLDER).is_dir() else run_dir


def read_disks(case: Case) -> list[dict[str, Any]]:
    """Return free and total bytes of the file systems that a run writes to."""
    disks = []
    for path in (case.run_dir, Path("/dev/shm"), Path("/tmp")):
        with contextlib.suppress(OSError):
            usage, inodes = shutil.disk_usage(path), os.statvfs(path)
            free_inodes = inodes.f_favail / inodes.f_files if inodes.f_files else 1.0
            disks.append({"path": str(path), "free": usage.free, "total": usage.total, "free_inodes": free_inodes})
    return disks


def read_memory(case: Case) -> dict[str, Any]:
    """Return memory of machine and cgroup, and the share of time that tasks wait for it."""
    memory = psutil.virtual_memory()
    found: dict[str, Any] = {
        "total": memory.total,
        "available": memory.available,
        "swap_used": psutil.swap_memory().used,
    }
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        found["cgroup_used"] = int((group / "memory.current").read_text())
        found["cgroup_limit"] = int((group / "memory.max").read_text())
    with contextlib.suppress(OSError, ValueError):
        events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
        found["oom_kills"] = int(events.get("oom_kill", 0))
    with contextlib.suppress(OSError, ValueError, IndexError):
        full = next(line for line in Path("/proc/pressure/memory").read_text().splitlines() if line.startswith("full"))
        found["pressure"] = float(full.split()[1].split("=")[1])
    return found


def read_gpus(case: Case) -> list[str]:
    """Return a line for each GPU of this machine; a note if the driver does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        arguments = [command, f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        case.notes.append(f"nvidia-smi does not answer ({type(error).__name__}): the GPU driver may hang")
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
