"""Findings about waits: collectives, weights, servers, network, rewards, tools, admission."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from arealite.doctor.case import Case, Finding, Process
from arealite.doctor.graph import EPISODE_KINDS, find_cycle, find_edges, server_name
from arealite.doctor.rules_processes import main_place, top_lines

_REWARD = "give the reward a timeout (reward_timeout_s), look at its stack, or call its service by hand"
# A server is slow if it makes fewer tokens a second for each request than a third of the others.
_SLOW_SHARE = 1 / 3
# A wait is like others that have ended if those took more than this share of it.
_SAME_SIZE = 0.2
# Since the last update, for versions of trainer and servers to be comparable: both are written every second.
_SETTLED_S = 2.0
# KV blocks that are free in a full cache.
_FULL_SHARE = 0.05


def collectives(case: Case) -> Iterator[Finding]:
    # Engines of controller mode have groups of their own.
    engines = dict.fromkeys(process.engine for process, _ in case.long_waits("collective"))
    for engine in engines:
        yield _collective(case, engine, "collective")
    # Ranks publish weights together, too.
    for engine in dict.fromkeys(p.engine for p, _ in case.long_waits("publish") if p.engine not in engines):
        if not _all_publish(case, engine):
            yield _collective(case, engine, "publish")


def _all_publish(case: Case, engine: str) -> bool:
    """Whether all ranks of an engine publish their weights: what hangs then is the way to the servers."""
    ranks = [rank for rank in case.role("trainer") if rank.engine == engine]
    return all(any(wait.get("kind") == "publish" for wait in rank.waits) for rank in ranks)


def _collective(case: Case, engine: str, kind: str) -> Finding:
    waiting = [(p, w) for p, w in case.long_waits(kind) if p.engine == engine]
    names = {wait["what"] for _, wait in waiting}
    evidence = [f"{p.name}{p.where} has waited {w['age_s']:.0f} s in {w['what']}" for p, w in waiting]
    ranks = [rank for rank in case.role("trainer") if rank.engine == engine]
    missing = [rank for rank in ranks if rank.name not in {p.name for p, _ in waiting}]
    for rank in missing:
        doing = "; ".join(entry.get("text", "") for entry in rank.parts("doing")) or "something else"
        place = "".join(f"; {line}" for line in main_place(rank) or top_lines(rank)[:1])
        evidence.append(f"{rank.name}{rank.where} is not in it: {doing}{place}")
    if len(names) > 1:
        verdict = "ranks wait in different collective operations, each for the others: a deadlock"
        remedy = "all ranks must make the same calls in the same order: look for a branch that depends on the rank or "
        remedy += "on its data, where the stacks differ"
        return Finding("collective_deadlock", verdict, evidence, remedy, tuple(rank.name for rank in ranks))
    if missing:
        who = ", ".join(f"{rank.name}{rank.where}" for rank in missing)
        verdict = f"ranks wait in {names.pop()} for {who}, which does not come: a deadlock if it waits for them"
        remedy = f"see what {who} does (its stack is below)"
        return Finding("collective_deadlock", verdict, evidence, remedy, tuple(rank.name for rank in missing))
    verdict = f"all ranks are in {names.pop()}, and it does not end: the network between them, or NCCL, hangs"
    remedy = "check the network (NCCL_DEBUG=INFO, GLOO_SOCKET_IFNAME)"
    return Finding("collective_stuck", verdict, evidence, remedy, tuple(rank.name for rank in ranks))


def cycles(case: Case) -> Iterator[Finding]:
    edges = [edge for edge in find_edges(case) if edge.wait["age_s"] >= case.patience_s]
    cycle = find_cycle(edges)
    if cycle:
        evidence = [f"{e.waiter} waits for {e.target}: {e.wait.get('what')} ({e.wait['age_s']:.0f} s)" for e in cycle]
        names = " → ".join([*(edge.waiter for edge in cycle), cycle[0].waiter])
        verdict, remedy = f"processes wait for each other: {names}", "stop the run; report the cycle"
        yield Finding("cycle", verdict, evidence, remedy, tuple(edge.waiter for edge in cycle))


def network(case: Case) -> Iterator[Finding]:
    """Servers that live and do not answer."""
    for process, wait in case.long_waits("generate", "load", "server"):
        # Requests for which no server is open wait for any of them.
        for address in wait.get("whom") or case.health:
            problem = case.health.get(address, "")
            server = _server_at(case, address)
            if not problem or (server and (server.is_dead or not _answers(server))):
                continue
            evidence = [f"{process.name} has waited {wait['age_s']:.0f} s for {address}", f"health check: {problem}"]
            if server:
                evidence.append(f"{server.name} lives: its event loop answers, {_requests(server)} requests run")
                verdict = f"the network to {server.name} ({address}) is dead: the server lives, no answer comes through"
                remedy = "check firewall, proxy variables (no_proxy), routes and the server's address (server.host)"
                yield Finding("network_dead", verdict, evidence, remedy, (server.name,))
            else:
                verdict = f"the server at {address} does not answer: it has died, or the network to it"
                yield Finding("server_unreachable", verdict, evidence, "see its log and its machine", (address,))
            return


def weight_update(case: Case) -> Iterator[Finding]:
    for process, wait in case.long_waits("load", "publish"):
        if wait["kind"] == "publish" and not _all_publish(case, process.engine):
            continue
        address = next(iter(wait.get("whom") or ()), "")
        evidence = [
            f"{process.name} has waited {wait['age_s']:.0f} s: {wait['kind']} {wait.get('what')} {address}".strip()
        ]
        server = _server_at(case, address)
        if server:
            engine = server.part("engine")
            evidence.append(
                f"{server.name}: version {engine.get('weight_version')}, paused {engine.get('paused')}, updating "
                f"{engine.get('is_updating')}, present step {engine.get('step_s')} s"
            )
            evidence += [f"{server.name} is in {line}" for line in top_lines(server)[:2]]
        who = f"{server_name(case, address)} does not load" if address else f"{process.name} does not publish"
        verdict = f"a weight update hangs: {who} {wait.get('what')}"
        remedy = "see that process's log and stack; the disk or /dev/shm between trainer and server; "
        remedy += "rollout.weight_update=disk is the simplest way, rollout.setup_timeout_s the deadline"
        blamed = server_name(case, address) if address else process.name
        yield Finding("weight_update_stuck", verdict, evidence, remedy, (blamed,))
        return


def version_skew(case: Case) -> Iterator[Finding]:
    trainer = case.collector
    version = trainer.part("executor").get("version") if trainer else None
    if trainer is None or version is None or any(w.get("kind") in ("load", "publish") for w in trainer.waits):
        return
    if trainer.is_stopped:
        # Its version is that of its last status; updates may have followed.
        return
    settled_s = float((trainer.part("completed").get("load") or {}).get("age_s", float("inf")))
    is_asked = {entry.get("address"): entry.get("is_open") for entry in trainer.parts("servers")}
    for server in case.role("server"):
        held = server.part("engine").get("weight_version")
        # What it wrote before the last update says nothing.
        is_newer = server.is_running and not server.is_stopped and server.age_s < settled_s + trainer.age_s
        # A server that has just started, and catches up.
        is_starting = is_asked and not is_asked.get(server.part("facts").get("address"))
        # The trainer may have updated it since its own status was written.
        ahead = int(str(held)) - int(version) if str(held).isdigit() else 0
        is_later = ahead > 0 and (settled_s < _SETTLED_S or (ahead == 1 and server.age_s < trainer.age_s))
        if is_newer and held is not None and not is_starting and not is_later and str(held) != str(int(version)):
            evidence = [f"the trainer is at version {version:.0f}, {server.name}{server.where} holds {held}"]
            verdict = (
                f"{server.name} generates with other weights than the trainer's: version {held}, not {version:.0f}"
            )
            remedy = "it missed an update, or somebody else changes its weights: restart it, so that it catches up"
            yield Finding("version_skew", verdict, evidence, remedy)


def kv_full(case: Case) -> Iterator[Finding]:
    for server in case.role("server"):
        engine = server.part("engine")
        total, free, waits = engine.get("total_blocks") or 0, engine.get("free_blocks") or 0, engine.get("waiting") or 0
        if server.is_running and total and waits and free <= _FULL_SHARE * total and not engine.get("paused"):
            evidence = [
                f"{free} of {total} KV blocks are free, {engine.get('running')} requests run, {waits} wait, "
                f"{engine.get('preemptions')} preemptions so far"
            ]
            verdict = f"{server.name} has no KV memory left: requests wait for others to end"
            remedy = "raise server.max_total_tokens or server.mem_fraction, add servers, or lower "
            remedy += "rollout.max_concurrent_rollouts or gconfig.max_new_tokens"
            yield Finding("kv_full", verdict, evidence, remedy)


def slow_server(case: Case) -> Iterator[Finding]:
    servers = [server for server in case.role("server") if server.is_running and not server.is_stopped]
    for server in servers:
        step_s = float(server.part("engine").get("step_s") or 0) + server.age_s
        if server.part("engine").get("step_s") and step_s >= case.patience_s:
            evidence = [f"its present step has taken {step_s:.0f} s", *(f"in {line}" for line in top_lines(server)[:2])]
            verdict = f"the engine of {server.name} hangs in a step"
            remedy = "restart it: the trainer continues its requests elsewhere"
            yield Finding("server_stuck", verdict, evidence, remedy, (server.name,))
    rates = {}
    for server in servers:
        running = server.part("engine").get("running") or 0
        if running and server.tokens_per_s is not None:
            rates[server.name] = server.tokens_per_s / running
    for name, rate in rates.items():
        usual = median(other for key, other in rates.items() if key != name) if len(rates) > 1 else 0
        if rate < _SLOW_SHARE * usual:
            evidence = [f"{key}: {other:.1f} tokens/s for each request" for key, other in rates.items()]
            verdict = f"{name} is {usual / max(rate, 1e-3):.0f} times slower than the other servers"
            remedy = "look at its GPU (clock, temperature, another process) or its cores (OMP_NUM_THREADS); restart it "
            remedy += "elsewhere: its requests continue on other servers"
            yield Finding("server_slow", verdict, evidence, remedy, (name,))
    for entry in case.collector.parts("servers") if case.collector else ():
        if entry.get("slow"):
            verdict = f"{server_name(case, entry['address'])} is much slower than the other servers"
            remedy = "look at its network (a saturated or broken link) and at its machine; or stop it: its requests "
            remedy += "continue on other servers"
            evidence = [f"{entry['address']}: {entry['slow']}"]
            yield Finding("server_slow", verdict, evidence, remedy, (server_name(case, entry["address"]),))


def stuck_data(case: Case) -> Iterator[Finding]:
    for process, wait in case.long_waits("data"):
        evidence = [f"{process.name}{process.where} has waited {wait['age_s']:.0f} s for {wait.get('what')}"]
        evidence += main_place(process)
        verdict = "the dataloader does not return the next rows: no new episode starts"
        remedy = "look at the line above: a file server, a hub or a lock of your own dataset. Copy the data to a local "
        remedy += "file, or give what it waits for a timeout"
        yield Finding("data_stuck", verdict, evidence, remedy, (process.name,))
        return


def stuck_parts(case: Case) -> Iterator[Finding]:
    """Rewards, tools and environments that do not return."""
    remedies = {
        "reward": _REWARD,
        "tool": "give the tool a timeout (tool_timeout_s), and look at its stack",
        "environment": "give the environment a timeout, and look at its stack",
    }
    for process, wait in case.long_waits(*remedies):
        if _is_queue(case, process, wait):
            continue
        kind = wait["kind"]
        name = f"{kind} {wait.get('what')}".strip()
        evidence = [f"{process.name}{process.where}: {wait['count']} in {name}, the oldest for {wait['age_s']:.0f} s"]
        evidence.append(_describe_completed(process, kind))
        workers = [p for p in case.processes if p.role == "job" and p.proc]
        evidence += [f"worker process {p.pid} is in {line}" for p in workers for line in top_lines(p)[:1]][:3]
        verdict = f"{name} does not return: the episodes that called it wait"
        name = f"{'tool' if kind == 'environment' else kind}_stuck"
        yield Finding(name, verdict, evidence, remedies[kind], (process.name,))
        return


def slow_parts(case: Case) -> Iterator[Finding]:
    """Rewards or tools for which most episodes wait, and which return."""
    what = {"reward": "rewards are", "tool": "tools are", "environment": "environments are"}
    for process, batch in case.long_waits("batch"):
        waits = [(p, w) for p in (process, *case.role("worker")) for w in p.waits if w.get("kind") in EPISODE_KINDS]
        counts = {kind: sum(w["count"] for _, w in waits if w["kind"] == kind) for kind in EPISODE_KINDS}
        kind = max(what, key=lambda name: counts[name])
        of_kind = [(p, w) for p, w in waits if w["kind"] == kind]
        is_stuck = any(w["age_s"] >= case.patience_s and not _is_queue(case, p, w) for p, w in of_kind)
        if is_stuck or counts[kind] <= sum(counts.values()) / 2:
            continue
        evidence = [f"{process.name}{process.where} has waited {batch['age_s']:.0f} s for {batch.get('what')}"]
        evidence.append(f"{counts[kind]} of {sum(counts.values())} episodes that wait are in a {kind}")
        evidence += [_describe_completed(p, kind) for p in {p.name: p for p, _ in of_kind}.values()][:3]
        verdict = f"{what[kind]} the bottleneck: episodes are generated faster than their {kind}s return"
        remedy = "more workers (RewardPool(num_workers=…)), a coroutine for services, a cheaper check first"
        yield Finding(f"{'tool' if kind == 'environment' else kind}_slow", verdict, evidence, remedy)


def _is_queue(case: Case, process: Process, wait: dict[str, Any]) -> bool:
    """Whether a long wait is one of many that end: others ended just now, after a time of the same size."""
    done = process.part("completed").get(wait["kind"]) or {}
    since_s = float(done.get("age_s", float("inf"))) + process.age_s
    return since_s < case.patience_s and float(done.get("mean_s", 0)) > _SAME_SIZE * wait["age_s"]


def _describe_completed(process: Process, kind: str) -> str:
    done = process.part("completed").get(kind)
    if not done:
        return f"no {kind} has ended yet in {process.name}"
    since_s = float(done.get("age_s", 0)) + process.age_s
    took = f"they took {float(done.get('mean_s', 0)):.1f} s"
    return f"{done.get('count')} have ended in {process.name}, the last one {since_s:.0f} s ago; {took}"


def nothing_admitted(case: Case) -> Iterator[Finding]:
    for process, batch in case.long_waits("batch"):
        executor = process.part("executor")
        # Without rows nothing can be admitted.
        has_rows = not any(wait.get("kind") == "data" and wait["age_s"] >= case.patience_s for wait in process.waits)
        if executor.get("running") == 0 and has_rows:
            evidence = [f"{process.name} has waited {batch['age_s']:.0f} s for {batch.get('what')}"]
            keys = ("buffered", "batch_size", "queued", "capacity", "version", "max_staleness", "is_paused")
            evidence.append(", ".join(f"{key} {executor.get(key)}" for key in keys))
            if executor.get("is_paused"):
                cause, remedy = "the executor is paused", "call rollout.resume()"
            elif (executor.get("capacity") or 0) <= 0:
                cause = "the staleness limit admits none"
                remedy = "call update_weights (or set_version) after each step, or raise rollout.max_head_offpolicyness"
            else:
                cause, remedy = "none is queued", "submit more rows, or check the data loader"
            verdict = f"the trainer waits for episodes, and none runs: {cause}"
            yield Finding("nothing_admitted", verdict, evidence, remedy)


def stuck_agent(case: Case) -> Iterator[Finding]:
    """Episodes that wait in code of the user, in nothing that the package knows."""
    for process in case.processes:
        episodes = process.part("executor").get("episodes") or []
        known = sum(
            w["count"] for w in process.waits if w.get("kind") in EPISODE_KINDS and w["age_s"] >= case.patience_s
        )
        old = [e for e in episodes if float(e.get("age_s", 0)) + process.age_s >= case.patience_s]
        if process.is_running and len(old) > known:
            evidence = [str(e.get("place")) for e in old]
            verdict = "episodes wait in the workflow's or agent's own code"
            remedy = (
                "look at the line above: give what it awaits a timeout; rollout.episode_timeout_s is the last resort"
            )
            yield Finding("agent_stuck", verdict, evidence, remedy, (process.name,))


def _server_waits(case: Case) -> Iterator[tuple[Process, dict[str, Any]]]:
    yield from case.long_waits("generate", "load")


def _server_at(case: Case, address: str) -> Process | None:
    return next((p for p in case.role("server") if p.part("facts").get("address") == address), None)


def _answers(server: Process) -> bool:
    """Whether the server's own event loop runs."""
    loops_run = all(lag < 3 for lag in server.part("loops").values())
    return server.is_running and not server.is_stopped and loops_run and server.age_s < 10


def _requests(server: Process) -> int:
    return server.part("engine").get("running") or 0
