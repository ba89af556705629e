"""How runs and processes ended, on this machine and on others, from hand-made statuses."""

import json
import os
import time
from pathlib import Path

import pytest

from arealite.doctor.case import Case
from arealite.doctor.collect import collect
from arealite.doctor.graph import find_edges
from arealite.doctor.report import render
from arealite.doctor.rules import diagnose
from arealite.utils.status.writer import pid_space
from tests.doctor.test_rules import ADDRESS, batch, completed, episodes, process, server, silent, wait


def launcher(name="node0", state=None, children=(), **facts):
    ended = {} if state else {"ended": "ended with code 1"}
    return process(name, "launcher", state, children=list(children), facts=facts, **ended)


def child(name, code=None, pid=100):
    return {"name": name, "pid": pid, "code": code, "time": 1.0}


def elsewhere(made, host="far", age_s=2.0):
    made.host, made.proc, made.is_live, made.age_s = host, None, False, age_s
    return made


def ended(name, **facts):
    return process(name, state=None, ended="ended", facts=facts)


def exited(made, code):
    made.exit_code = code
    return made


KILLED = "NodeFailure: rank0 was ended by SIGKILL after 3.0 s; its output is above"
ENDS = {
    "ctrl_c": ("run_stopped", "stopped by SIGINT", [launcher(signal="SIGINT", children=[child("rank0", 130)])]),
    "sigterm": (
        "run_stopped",
        "stopped by SIGTERM",
        [launcher(signal="SIGTERM", children=[child("server0", -15), child("rank0", 130)]), server(state=None)],
    ),
    "ctrl_c_without_launcher": ("run_stopped", "SIGINT", [ended("rank0", error="KeyboardInterrupt: ")]),
    "servers_of_a_notebook": (
        "finished",
        "has ended",
        [launcher(signal="SIGTERM", children=[child("server0", -15)]), ended("rank0")],
    ),
    "rank_killed": (
        "run_failed",
        "rank0 was ended by SIGKILL",
        [launcher(error=KILLED, children=[child("rank0", -9), child("server0", -15)]), process("rank0", state=None)],
    ),
    "error": ("run_failed", "DatasetError: no rows", [ended("rank0", error="DatasetError: no rows")]),
    "other_node": (
        "run_failed",
        "rank1 exited with code 1",
        [
            launcher(error="NodeFailure: node 1 failed"),
            launcher("node1", error="NodeFailure: rank1 exited with code 1"),
        ],
    ),
    "launcher_killed": ("run_killed", "node0 ended without a word", [process("node0", "launcher", None)]),
    "stopping": ("stopping", "by SIGTERM", [launcher(state="S", signal="SIGTERM", children=[child("rank0")])]),
    "machine_lost": (
        "machine_lost",
        "no process on far",
        [process("rank0"), elsewhere(process("rank1"), age_s=90.0), elsewhere(launcher("node1", "S"), age_s=95.0)],
    ),
    "remote_process_silent": (
        "process_silent",
        "rank1 on far",
        [process("rank0"), elsewhere(process("rank1"), age_s=90.0), elsewhere(launcher("node1", "S"))],
    ),
    "remote_rank_dead": (
        "rank_dead",
        "rank1 on far was ended by SIGSEGV",
        [process("rank0"), exited(elsewhere(process("rank1")), -11)],
    ),
    "all_machines_lost": (
        "run_silent",
        "on far, near",
        [elsewhere(process("rank0"), age_s=300.0), elsewhere(process("rank1"), "near", 305.0)],
    ),
    "remote_loop": ("loop_blocked", "rank0", [elsewhere(process("rank0", loops={"rollout": 80.0}))]),
}


@pytest.mark.parametrize("name", ENDS)
def test_how_it_ended(name):
    kind, text, processes = ENDS[name]
    case = Case(Path("/run"), 60.0, processes)
    findings = diagnose(case)
    assert findings[0].kind == kind and text in findings[0].verdict, render(case, findings)


def test_an_error_before_the_training_is_that_of_the_log():
    known = [launcher(error="NodeFailure: rank0 exited with code 2", children=[child("rank0", 2)]), ended("rank0")]
    case = Case(Path("/run"), 60.0, known, logs={"rank0": "loading\nerror: there is no such model"})
    assert "rank0 exited with code 2" in diagnose(case)[0].verdict
    exited(known[1], 2)
    assert diagnose(case)[0].verdict == "the run has ended with an error: there is no such model"
    finished = Case(Path("/run"), 60.0, [exited(ended("rank0"), 0)], logs={"rank0": "error: of an earlier attempt"})
    assert diagnose(finished)[0].kind == "finished"


def test_a_reward_that_hangs_differs_from_a_queue_of_slow_ones():
    def verdict(mean_s, age_s):
        made = completed(episodes(wait("reward", "mine", age_s=100.0, count=9)), "reward", mean_s, age_s)
        return diagnose(Case(Path("/run"), 60.0, [made]))[0].kind

    assert verdict(mean_s=80.0, age_s=1.0) == "reward_slow", "others ended after the same time"
    assert verdict(mean_s=0.5, age_s=1.0) == "reward_stuck", "one of many hangs"
    assert verdict(mean_s=80.0, age_s=200.0) == "reward_stuck", "none has ended for long"


def test_old_waits_of_a_silent_machine_are_no_cause():
    lost = elsewhere(process("rank1", waits=[wait("collective", "barrier #3", ["ranks"])]), age_s=90.0)
    assert diagnose(Case(Path("/run"), 60.0, [process("rank0"), lost]))[0].kind == "machine_lost"


def test_version_of_a_remote_server_counts_if_it_is_newer_than_the_update():
    trainer = completed(batch(version=3), "load", 0.1, age_s=2.0)
    kinds = [
        diagnose(Case(Path("/run"), 600.0, [trainer, elsewhere(server(), age_s=age_s)]))[0].kind for age_s in (4.0, 1.0)
    ]
    assert kinds == ["healthy", "version_skew"]


def test_updates_between_the_statuses_of_trainer_and_server_are_no_skew():
    def kind(held, load_s, trainer_s, server_s):
        trainer, made = completed(batch(version=3), "load", 0.1, age_s=load_s), server(weight_version=str(held))
        trainer.age_s, made.age_s = trainer_s, server_s
        return diagnose(Case(Path("/run"), 600.0, [trainer, made]))[0].kind

    # The trainer's status is a second old: it has trained two steps since.
    assert kind(5, load_s=0.3, trainer_s=1.0, server_s=0.1) == "healthy"
    assert kind(4, load_s=20.0, trainer_s=1.0, server_s=0.1) == "healthy"
    assert kind(4, load_s=20.0, trainer_s=0.1, server_s=1.0) == "version_skew"
    assert kind(9, load_s=20.0, trainer_s=1.0, server_s=0.1) == "version_skew"
    assert kind(2, load_s=0.3, trainer_s=1.0, server_s=0.1) == "version_skew"


def test_a_server_that_is_not_asked_yet_may_have_the_first_weights():
    for is_open, expected in ((False, "healthy"), (True, "version_skew")):
        trainer = batch(version=3)
        trainer.status["servers"] = [{"address": ADDRESS, "is_open": is_open}]
        assert diagnose(Case(Path("/run"), 600.0, [trainer, server()]))[0].kind == expected


def test_waits_of_a_stopped_rank_are_old():
    waits = [[wait("collective", f"sum #{number}", ["ranks"])] for number in (8, 3)]
    ranks = [process("rank0", waits=waits[0]), process("rank1", state="T", waits=waits[1])]
    (found,) = diagnose(Case(Path("/run"), 5.0, ranks))
    assert found.kind == "process_stopped"
    assert "for rank1, which does not come" in found.evidence[-1]


def test_ranks_of_engines_in_controller_mode_meet_their_own_engine():
    driver = process("rank0", waits=[wait("call", "actor.ppo_update", ["actor.rank0", "actor.rank1"])])
    stuck = process("actor.rank0", waits=[wait("collective", "barrier #3", ["ranks"])])
    late, critic = process("actor.rank1"), process("critic.rank0")
    case = Case(Path("/run"), 60.0, [driver, stuck, late, critic])
    finding = diagnose(case)[0]
    assert finding.kind == "collective_deadlock" and "for actor.rank1" in finding.verdict
    edges = {edge[:2] for edge in find_edges(case)}
    assert {("rank0", "actor.rank1"), ("actor.rank0", "actor.rank1")} <= edges
    assert ("actor.rank0", "critic.rank0") not in edges and case.trainer is driver
    assert silent(driver).age_s == 50.0


def test_pids_of_other_machines_and_containers_are_not_probed(tmp_path):
    """Both files name a pid that lives here: this process."""
    folder = tmp_path / "status"
    folder.mkdir()
    common = {"role": "trainer", "pid": os.getpid(), "started": 1.0, "run": str(tmp_path)}
    common |= {"written": time.time(), "clock": 1.0}
    own = os.uname().nodename
    for name, host, space in (("rank0", "far", pid_space()), ("rank1", own, "another container")):
        values = {**common, "name": name, "host": host, "pid_space": space}
        (folder / f"{name}.json").write_text(json.dumps(values))
    children = [child("rank1", -11, os.getpid())]
    node = {**common, "name": "node1", "role": "launcher", "host": own, "pid_space": "another container", "pid": 1}
    (folder / "node1.json").write_text(json.dumps({**node, "children": children}))
    case = collect(tmp_path, 60.0)
    assert len(case.processes) == 3 and all(p.proc is None and not p.stacks for p in case.processes)
    assert {p.name: p.exit_code for p in case.processes} == {"node1": None, "rank0": None, "rank1": -11}
    assert diagnose(case)[0].verdict == f"rank1 on {own} was ended by SIGSEGV"
