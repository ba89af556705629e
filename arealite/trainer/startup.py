"""Shows and records where the time between a command and its first update went. Used by `Run`."""

import time

from arealite.trainer.trace import Trace
from arealite.utils.console import show_message
from arealite.utils.distributed import rank
from arealite.utils.startup import Phase, take_startup_phases

_SHORTEST_GAP_S = 0.05


def take_startup_stats(trace: Trace, step_times: dict[str, float]) -> dict[str, float]:
    """After the first step, show and return the times of the start; later nothing.

    `step_times` are those of the phases of that step.
    """
    phases = take_startup_phases()
    if not phases or rank() != 0:
        return {}
    for phase in phases:
        trace.span(*phase, track="startup")
    seconds = _seconds_of(phases)
    step = {name[5:]: took_s for name, took_s in step_times.items() if name[:5] == "time/" and name != "time/step"}
    if "rollout" in step:
        # The trainer tries a micro-batch before it waits.
        step["rollout"] -= seconds.get("trial", 0.0)
    total_s = time.time() - min(phase.began for phase in phases)
    # Between the last phase and the first step: making the run directory. After the step: its statistics.
    seconds["other"] = max(0.0, total_s - sum(seconds.values()) - sum(step.values()))
    parts = ", ".join(f"{name.replace('_', ' ')} {took_s:.1f}" for name, took_s in (seconds | step).items())
    show_message(f"first update after {total_s:.1f} s: {parts}")
    return {f"time/startup/{name}": took_s for name, took_s in seconds.items()} | {"time/startup/total": total_s}


def _seconds_of(phases: list[Phase]) -> dict[str, float]:
    """Return the seconds of each phase, and of the time between phases as `before_<phase>`.

    Before `load` a script reads its data and starts reward processes. Before `servers` it connects to them.
    """
    seconds: dict[str, float] = {}
    phases = sorted(phases, key=lambda phase: phase.began)
    end = phases[0].began
    for name, began, took_s in phases:
        gap_s = began - end
        # The trial is a part of the first step.
        if gap_s > _SHORTEST_GAP_S and name != "trial":
            seconds[f"before_{name}"] = seconds.get(f"before_{name}", 0.0) + gap_s
        seconds[name] = seconds.get(name, 0.0) + took_s
        end = max(end, began + took_s)
    return seconds
