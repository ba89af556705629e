"""Shows and records where the time between a command and its first update went. Used by `Run`."""

import time

from arealite.trainer.trace import Trace
from arealite.utils.console import show_message
from arealite.utils.distributed import rank
from arealite.utils.startup import take_startup_phases


def take_startup_stats(trace: Trace, step_times: dict[str, float]) -> dict[str, float]:
    """After the first step, show and return the times of the start; later nothing.

    `step_times` are those of the phases of that step.
    """
    phases = take_startup_phases()
    if not phases or rank() != 0:
        return {}
    seconds: dict[str, float] = {}
    for phase in phases:
        trace.span(*phase, track="startup")
        seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
    step = {name[5:]: took_s for name, took_s in step_times.items() if name[:5] == "time/" and name != "time/step"}
    if "rollout" in step:
        # The trainer tries a micro-batch before it waits.
        step["rollout"] -= seconds.get("trial", 0.0)
    total_s = time.time() - min(phase.began for phase in phases)
    # Reading the data, making the run directory, starting reward processes.
    seconds["other"] = max(0.0, total_s - sum(seconds.values()) - sum(step.values()))
    parts = ", ".join(f"{name} {took_s:.1f}" for name, took_s in (seconds | step).items())
    show_message(f"first update after {total_s:.1f} s: {parts}")
    return {f"time/startup/{name}": took_s for name, took_s in seconds.items()} | {"time/startup/total": total_s}
