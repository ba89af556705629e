"""Who waits for whom: edges between processes, and a cycle if there is one."""

from typing import Any, NamedTuple

from arealite.doctor.case import Case, Process

# What episodes wait for, in the process that runs them.
EPISODE_KINDS = ("generate", "server", "reward", "tool", "environment")


class Edge(NamedTuple):
    """`waiter` waits for `target`, by the wait `wait`."""

    waiter: str
    target: str
    wait: dict[str, Any]


def find_edges(case: Case) -> list[Edge]:
    """Return an edge for every process that a wait is for."""
    edges = []
    for process in case.processes:
        if process.is_running and not process.is_stopped:
            for wait in process.waits:
                edges += [Edge(process.name, target, wait) for target in _targets(case, process, wait)]
    return edges


def _targets(case: Case, process: Process, wait: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for whom in wait.get("whom") or ():
        if whom == "ranks":
            others = [r for r in case.role("trainer") if r is not process and r.engine == process.engine]
            found += [rank.name for rank in others if not _is_in(rank, wait)]
        elif whom == "episodes":
            others = [process, *case.role("worker")]
            for wait_of in (w for other in others for w in other.waits if w.get("kind") in EPISODE_KINDS):
                found += _targets(case, process, wait_of)
        else:
            found.append(server_name(case, str(whom)))
    return list(dict.fromkeys(found))


def _is_in(rank: Process, wait: dict[str, Any]) -> bool:
    """Whether a rank has arrived at the same collective operation."""
    return any(own.get("kind") == "collective" and own.get("what") == wait.get("what") for own in rank.waits)


def server_name(case: Case, address: str) -> str:
    """Return the name of the server at this address; the address if it is not known."""
    named = {process.part("facts").get("address"): process.name for process in case.role("server")}
    return named.get(address, address)


def find_cycle(edges: list[Edge]) -> list[Edge]:
    """Return the edges of a cycle; empty without one."""
    outgoing: dict[str, list[Edge]] = {}
    for edge in edges:
        outgoing.setdefault(edge.waiter, []).append(edge)

    def follow(name: str, path: list[Edge]) -> list[Edge]:
        names = [edge.waiter for edge in path]
        if name in names:
            return path[names.index(name) :]
        for edge in outgoing.get(name, ()):
            found = follow(edge.target, [*path, edge])
            if found:
                return found
        return []

    return next((cycle for name in outgoing if (cycle := follow(name, []))), [])
