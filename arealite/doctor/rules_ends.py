"""Findings about processes that have ended, and about runs that are over or being stopped.

Three sources say how a process ended: its own last status, the exit code that its launcher saw, and, without both, that
it is gone. Only the last one means that nobody could write anything down: SIGKILL, or a lost machine.
"""

from collections.abc import Iterator
from typing import Any

from arealite.doctor.case import Case, Finding, Process
from arealite.utils.process import describe_exit

_CONTINUE = "continue with the same command and recover.mode=auto"
_SIGNALS = {
    "SIGINT": "Ctrl+C",
    "SIGTERM": "`kill`, or a scheduler: scancel, a time limit, a preemption",
    "SIGHUP": "its terminal was closed: use nohup, tmux or a scheduler",
}
_REMEDIES = {
    "server_dead": "the launcher starts a server again (launcher.server_restarts); without one, start it with "
    "`arealite serve join=RUN_DIR`. Killed by the kernel (SIGKILL)? Lower server.mem_fraction",
    "rank_dead": "stop the run and start it again with recover.mode=auto: other ranks wait for this one",
    "launcher_dead": "nothing restarts its processes, which end soon: start the run again with recover.mode=auto",
    "worker_dead": "its pool starts another one, and its episodes run again. If it happens again and again, it needs "
    "too much memory: see `dmesg`",
}
_KINDS = {"server": "server_dead", "trainer": "rank_dead", "launcher": "launcher_dead"}


def over(case: Case) -> Finding:
    """Judge a run without a running process: finished, stopped by a signal, failed or killed."""
    launchers, trainers = case.role("launcher"), case.role("trainer")
    logs = [f"{name}: {line}" for name, text in case.logs.items() for line in text.splitlines()[-2:]]
    ends = [f"{p.name}{p.where}: {p.status['ended']}" for p in (*launchers, *trainers) if p.has_ended]
    exits = [f"{child['name']} {describe_exit(child['code'])}" for child in _exits(case) if child["code"]]
    for process in (*launchers, *trainers):
        number = _signal(process)
        if number:
            verdict = f"the run was stopped by {number} ({_SIGNALS.get(number, 'a signal')}), which {process.name} got"
            return Finding("run_stopped", verdict, [*ends, *exits], _CONTINUE)
    errors = {p.name: error for p in (*trainers, *launchers) if (error := _error(case, p))}
    # A launcher that wrote its end has ended the others itself.
    lost = [process for process in launchers or trainers if process.is_dead]
    if lost:
        names = ", ".join(f"{process.name}{process.where}" for process in lost)
        verdict = f"the run is dead: {names} ended without a word: SIGKILL, out of memory, or a lost machine"
        return Finding("run_killed", verdict, [*_kills(case), *exits, *logs], f"see `dmesg` for a reason; {_CONTINUE}")
    # Servers are ended by the launcher, in the end.
    if errors or any(child["code"] and str(child["name"]).startswith("rank") for child in _exits(case)):
        # A launcher that ends because another node failed says less than that node.
        cause = min(errors.values(), key=lambda text: text.startswith("NodeFailure: node"), default="")
        cause = cause.splitlines()[0] if cause else exits[0]
        evidence = [f"{name}: {line}" for name, text in errors.items() for line in text.splitlines()[:6]]
        killed = [child for child in _exits(case) if child["code"] == -9 and f"{child['name']} " in cause]
        remedy = "see `dmesg`: the kernel kills with SIGKILL when memory is short; " if killed else "fix that, and "
        evidence += [*(_kills(case) if killed else []), *exits, *ends, *logs]
        return Finding("run_failed", f"the run has ended with an error: {cause}", evidence, f"{remedy}{_CONTINUE}")
    return Finding("finished", "the run has ended", ends, "nothing")


def stopping(case: Case) -> Iterator[Finding]:
    """A run that got a signal and saves its last checkpoint."""
    for process in case.role("launcher"):
        number = _signal(process)
        if process.is_running and number:
            ranks = [rank for rank in case.role("trainer") if rank.is_running]
            doing = [f"{r.name}{r.where}: {entry.get('text')}" for r in ranks for entry in r.parts("doing")[-1:]]
            verdict = (
                f"the run is being stopped by {number} ({_SIGNALS.get(number, 'a signal')}): ranks save a checkpoint"
            )
            remedy = (
                "wait (launcher.save_timeout_s is the limit); a second signal ends it at once, without a checkpoint"
            )
            yield Finding("stopping", verdict, doing, remedy)
            return


def dead(case: Case) -> Iterator[Finding]:
    """Processes that are gone although others of the run still live."""
    if not any(process.is_running and process.role in ("trainer", "launcher") for process in case.processes):
        return
    for process in case.processes:
        if process.is_dead:
            kind = _KINDS.get(process.role, "worker_dead")
            how = "was killed or has crashed" if process.exit_code is None else describe_exit(process.exit_code)
            evidence = [f"process {process.pid}{process.where} is gone; its last status is {process.age_s:.0f} s old"]
            evidence += [f"its log ends with: {line}" for line in case.logs.get(process.name, "").splitlines()[-2:]]
            evidence += _kills(case) if process.exit_code in (None, -9) else []
            yield Finding(kind, f"{process.name}{process.where} {how}", evidence, _REMEDIES[kind], (process.name,))


def lost_machines(case: Case) -> Iterator[Finding]:
    """Machines of which no process writes its status any more, while those of others do."""
    hosts: dict[str, list[Process]] = {}
    for process in case.processes:
        if not process.is_local and process.is_running:
            hosts.setdefault(process.host, []).append(process)
    silent = {host: all(p.is_silent for p in found) for host, found in hosts.items()}
    others_write = any(p.is_live or (not p.is_local and not p.is_silent) for p in case.processes if p.is_running)
    if silent and all(silent.values()) and not others_write:
        last = min((p for found in hosts.values() for p in found), key=lambda process: process.age_s)
        evidence = [f"the newest file is that of {last.name} on {last.host}, {last.age_s:.0f} s old"]
        verdict = f"no process of the run writes its status any more, on {', '.join(hosts)}: it was killed with all of "
        verdict += "its launchers, or this machine does not see the files"
        yield Finding("run_silent", verdict, evidence, f"see the scheduler (`sacct -j JOB`, `ray status`); {_CONTINUE}")
        return
    for host in (host for host, is_silent in silent.items() if is_silent):
        evidence = [f"{p.name}: its file is {p.age_s:.0f} s old; process {p.pid}" for p in hosts[host]]
        verdict = f"no process on {host} writes its status any more: that machine is down, or lost the shared folder"
        remedy = f"look at {host} (ping, `sinfo`, `ray status`). A lost trainer needs a new start with "
        remedy += "recover.mode=auto; lost servers are replaced by the launcher"
        yield Finding("machine_lost", verdict, evidence, remedy, tuple(p.name for p in hosts[host]))
    for process in (p for host, found in hosts.items() if not silent[host] for p in found if p.is_silent):
        evidence = [f"its file is {process.age_s:.0f} s old, others on {process.host} are newer"]
        verdict = f"{process.name} on {process.host} does not write its status any more: it was killed, or hangs"
        remedy = f"run `arealite doctor {case.run_dir}` on {process.host}: there it can see process {process.pid}"
        yield Finding("process_silent", verdict, evidence, remedy, (process.name,))


def _error(case: Case, process: Process) -> str:
    """Return why a process ended: what it noted, or what it printed before its training began."""
    lines = case.logs.get(process.name, "").splitlines() if (process.exit_code or 0) > 0 else []
    printed = next((line for line in reversed(lines) if line.startswith("error: ")), "")
    return str(process.part("facts").get("error") or printed.removeprefix("error: "))


def _signal(process: Process) -> str:
    """Return the signal that stopped the run by this process; empty without one.

    Servers beside a notebook have a launcher without ranks. That one is always ended by a signal.
    """
    error = str(process.part("facts").get("error", ""))
    if process.role == "trainer":
        return "SIGINT" if error.startswith("KeyboardInterrupt") else ""
    has_ranks = any(str(child.get("name")).startswith("rank") for child in process.parts("children"))
    return str(process.part("facts").get("signal", "")) if has_ranks else ""


def _exits(case: Case) -> list[dict[str, Any]]:
    """Return the children of launchers that have ended, the first one first."""
    children = [child for launcher in case.role("launcher") for child in launcher.parts("children")]
    ended = [child for child in children if isinstance(child.get("code"), int) and "name" in child]
    return sorted(ended, key=lambda child: float(child.get("time", 0)))


def _kills(case: Case) -> list[str]:
    count = case.memory.get("oom_kills", 0)
    return [f"the kernel has killed {count} processes of this container for memory since its start"] if count else []
