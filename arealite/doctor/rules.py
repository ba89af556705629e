"""All rules, the most certain causes first: the first finding is the verdict."""

from collections.abc import Callable, Iterable

from arealite.doctor import rules_ends as ends
from arealite.doctor import rules_processes as processes
from arealite.doctor import rules_waits as waits
from arealite.doctor.case import Case, Finding
from arealite.doctor.causes import each_cause_once

RULES: tuple[Callable[[Case], Iterable[Finding]], ...] = (
    processes.full_disk,
    processes.stopped,
    processes.gil_held,
    processes.memory_pressure,
    processes.loop_blocked,
    ends.dead,
    ends.lost_machines,
    waits.network,
    waits.collectives,
    waits.cycles,
    waits.weight_update,
    waits.version_skew,
    waits.kv_full,
    waits.slow_server,
    waits.stuck_data,
    waits.stuck_parts,
    waits.slow_parts,
    waits.nothing_admitted,
    waits.stuck_agent,
    ends.stopping,
    processes.long_step,
    processes.status_lag,
)


def diagnose(case: Case) -> list[Finding]:
    """Return all findings; there is always one."""
    if not case.processes:
        return [_no_status(case)]
    found = [finding for rule in RULES for finding in rule(case)]
    # A killed worker is replaced: it is rarely why a run hangs.
    found.sort(key=lambda finding: finding.kind == "worker_dead")
    found = each_cause_once(case, found)
    running = [process for process in case.processes if process.is_running and process.role != "job"]
    if not running:
        end = ends.over(case)
        # On a full disk processes cannot write how they ended.
        is_clean = end.kind in ("finished", "run_stopped")
        return [*(() if is_clean else processes.full_disk(case)), end]
    return found or [_healthy(case)]


def _no_status(case: Case) -> Finding:
    evidence = [f"{name}: {text.splitlines()[-1]}" for name, text in case.logs.items() if text.strip()]
    verdict = "no process of this run has written a status: it is older than this command, or has not started"
    return Finding("no_status", verdict, evidence, "what logs, events and the machine say is below")


def _healthy(case: Case) -> Finding:
    trainer = case.trainer
    facts = trainer.part("facts") if trainer else {}
    step = f", step {facts['step'] + 1} of {facts['total_steps']}" if "step" in facts and "total_steps" in facts else ""
    verdict = f"nothing is wrong: no wait is longer than {case.patience_s:g} s{step}"
    return Finding("healthy", verdict, [], "nothing; for a slow run see `arealite report` and trace.json")
