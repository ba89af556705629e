"""The doctor's report as text: verdict, processes and their waits, machine, events, stacks."""

from collections.abc import Iterator
from typing import Any

from arealite.doctor.case import Case, Finding, Process
from arealite.doctor.graph import find_cycle, find_edges
from arealite.utils.text import clean

_GIB = 1 << 30
_MAX_WAITS = 4
_STATES = {"R": "computes", "S": "sleeps", "D": "waits in the kernel", "T": "is stopped", "t": "is traced"}


def render(case: Case, findings: list[Finding]) -> str:
    """Return the report."""
    lines = [f"run {case.run_dir}", ""]
    for i, finding in enumerate(findings):
        lines.append(f"{'verdict' if i == 0 else 'also'}: {finding.verdict}  [{finding.kind}]")
        lines += [f"  - {text}" for text in finding.evidence]
        lines.append(f"  do: {finding.remedy}")
    lines += ["", "processes:", *(line for process in case.processes for line in _describe(process))]
    cycle = find_cycle(find_edges(case))
    lines += [f"cycle: {' → '.join([*(edge.waiter for edge in cycle), cycle[0].waiter])}"] if cycle else []
    lines += ["", "machine:", *(f"  {line}" for line in _machine(case))]
    lines += ["", "last events:", *(f"  {event}" for event in case.events)] if case.events else []
    lines += ["", "notes:", *(f"  {note}" for note in case.notes)] if case.notes else []
    for process in case.processes:
        if process.stacks:
            lines += ["", f"stacks of {process.name} (process {process.pid}):"]
            lines += [f"  {line}" for line in process.stacks.strip().splitlines()]
    for name, text in case.logs.items():
        lines += ["", f"end of the log of {name}:", *(f"  | {line}" for line in text.splitlines())]
    return clean("\n".join(lines))


def _describe(process: Process) -> Iterator[str]:
    yield f"  {process.name:12} pid {process.pid} on {process.host}: {_state(process)}"
    for entry in process.parts("doing")[-1:]:
        yield f"      does: {entry.get('text')} ({float(entry.get('age_s', 0)) + process.age_s:.0f} s)"
    for wait in process.waits[:_MAX_WAITS]:
        yield f"      {_wait(wait)}"


def _wait(wait: dict[str, Any]) -> str:
    count = f"{wait.get('count')} × " if wait.get("count", 1) > 1 else ""
    whom = f" for {', '.join(map(str, wait['whom']))}" if wait.get("whom") else ""
    limit = f", deadline {wait['deadline_s']:g} s" if wait.get("deadline_s") else ""
    return f"waits: {count}{wait.get('kind')} {wait.get('what')}{whom} (since {wait['age_s']:.1f} s{limit})"


def _state(process: Process) -> str:
    if process.has_ended:
        return str(process.status["ended"])
    if not process.is_local:
        return f"on another machine, status {process.age_s:.0f} s old"
    if process.proc is None:
        return f"gone; last status {process.age_s:.0f} s old"
    proc = process.proc
    state = _STATES.get(proc.state, proc.state)
    return (
        f"{state}, {process.cpu_share:.0%} of a core, {proc.rss_bytes / _GIB:.1f} GiB, status {process.age_s:.0f} s old"
    )


def _machine(case: Case) -> Iterator[str]:
    for disk in case.disks:
        yield f"{disk['path']}: {disk['free'] / _GIB:.1f} of {disk['total'] / _GIB:.1f} GiB free"
    yield f"writing to the run directory: {case.probe_error or f'{case.probe_s * 1000:.0f} ms'}"
    if case.memory:
        yield f"memory: {case.memory['available'] / _GIB:.1f} of {case.memory['total'] / _GIB:.1f} GiB available"
    yield from (f"GPU {line}" for line in case.gpus)
    yield from (f"server {address}: {problem or 'healthy'}" for address, problem in case.health.items())
