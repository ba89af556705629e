"""Says each cause once: drops findings that only follow from another one.

A stopped rank is also missing in a collective operation, and a dead server also does not load weights. Such a finding
is one line in the evidence of its cause.
"""

from arealite.doctor.case import Case, Finding
from arealite.doctor.graph import find_edges

# How far a finding is from the cause: one may follow from another of a lower number about the same processes.
_DISTANCE = {
    **dict.fromkeys(("process_stopped", "launcher_stopped", "gil_held", "io_blocked"), 0),
    **dict.fromkeys(("rank_dead", "server_dead", "worker_dead", "launcher_dead", "machine_lost", "process_silent"), 0),
    **dict.fromkeys(("loop_blocked", "network_dead", "server_unreachable"), 1),
    **dict.fromkeys(("data_stuck", "reward_stuck", "tool_stuck", "agent_stuck", "weight_update_stuck"), 2),
    **dict.fromkeys(("server_stuck", "server_slow"), 3),
    **dict.fromkeys(("collective_deadlock", "collective_stuck"), 4),
    **dict.fromkeys(("cycle", "step_long"), 5),
}
# From here on the processes may only wait for the one at fault.
_WAITS = 4
_DISK = ("disk_full", "disk_unwritable")


def each_cause_once(case: Case, found: list[Finding]) -> list[Finding]:
    """Return the findings that follow from no other one; these name what follows from them."""
    kept, following = [], []
    for finding in found:
        cause = _cause(case, finding, found)
        if cause is None:
            kept.append(finding)
        else:
            following.append((finding, cause))
    for finding, cause in following:
        # Of a chain of causes the first one is left.
        while (next_cause := _cause(case, cause, found)) is not None:
            cause = next_cause
        cause.evidence.append(f"from this follows: {finding.verdict}")
    return kept


def _cause(case: Case, finding: Finding, found: list[Finding]) -> Finding | None:
    """Return the finding from which this one follows, or None."""
    if finding.kind == "status_lag":
        return next((other for other in found if other.kind in _DISK), None)
    distance = _DISTANCE.get(finding.kind, 0)
    nearer = [other for other in found if _DISTANCE.get(other.kind, distance) < distance]
    blamed = {name: other for other in reversed(nearer) for name in other.blames}
    causes = [_first_blamed(case, name, blamed, distance) for name in finding.blames]
    # One rank that is stopped inside of a collective operation holds all of them.
    is_explained = any(causes) if finding.kind == "collective_stuck" else all(causes)
    return next((cause for cause in causes if cause), None) if is_explained else None


def _first_blamed(case: Case, name: str, blamed: dict[str, Finding], distance: int) -> Finding | None:
    """Return the finding that blames a process, or one for which it waits."""
    if name in blamed or distance < _WAITS:
        return blamed.get(name)
    seen, todo = {name}, [name]
    edges = [edge for edge in find_edges(case) if edge.wait["age_s"] >= case.patience_s]
    while todo:
        waiter = todo.pop()
        if waiter in blamed:
            return blamed[waiter]
        targets = {edge.target for edge in edges if edge.waiter == waiter} - seen
        seen |= targets
        todo += sorted(targets)
    return None
