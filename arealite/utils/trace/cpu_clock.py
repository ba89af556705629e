"""`CpuClock`: CPU seconds of a trainer's process, for predictions of other settings.

Seconds on the clock grow when processes compete for cores; CPU seconds do not. The difference between the two tells
`arealite plan` and the report what a phase would take with the machine to itself.
"""

import os
import threading
import time

from arealite.utils.process import SHARED_GPU_ENV

# Threads that are not the trainer's: the one that runs episodes, and an inference engine in this process, which counts
# its own seconds (`inference.timing.step_times`).
_ROLLOUT, _ENGINE = "rollout", "inference-engine"


class CpuClock:
    """Counts the CPU seconds of this process: of the thread that runs episodes, and of all others."""

    def __init__(self) -> None:
        self._last = _cpu_s()

    def take(self) -> dict[str, float]:
        """Return the CPU seconds since the last call, and the number of cores that this process may use."""
        now = _cpu_s()
        # A thread is new if its engine was made since the last call.
        process_s, rollout_s, engine_s = (max(0.0, new - old) for new, old in zip(now, self._last, strict=True))
        self._last = now
        trainer_s = max(0.0, process_s - rollout_s - engine_s)
        found = {"cpu/trainer": trainer_s, "cpu/rollout": rollout_s, "cpu/cores": float(num_cores())}
        return found | ({"gpu/shared": 1.0} if SHARED_GPU_ENV in os.environ else {})


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_s() -> tuple[float, float, float]:
    """Return the CPU seconds of the process, of its rollout thread and of its inference engine."""
    threads = {thread.name: thread.ident for thread in threading.enumerate()}
    return time.process_time(), _thread_s(threads.get(_ROLLOUT)), _thread_s(threads.get(_ENGINE))


def _thread_s(ident: int | None) -> float:
    # Not on macOS.
    if ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(ident))
