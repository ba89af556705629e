"""Every rule on hand-made snapshots, and what the command does with bad input."""

import errno
import json
import os
import time
from pathlib import Path

import pytest

from arealite.api.errors import ConfigError
from arealite.cli import doctor
from arealite.doctor.case import HERE, Case, Proc, Process
from arealite.doctor.collect import collect
from arealite.doctor.graph import find_cycle, find_edges
from arealite.doctor.machine import write_probe
from arealite.doctor.report import render
from arealite.doctor.rules import diagnose
from arealite.utils.status.writer import Status

ADDRESS = "10.0.0.1:30000"


def wait(kind, what="", whom=(), age_s=100.0, count=1):
    return {"kind": kind, "what": what, "whom": list(whom), "age_s": age_s, "count": count, "deadline_s": None}


def process(name, role="trainer", state="S", waits=(), **status):
    known = {"waits": list(waits), "interval_s": 1.0, "facts": {}, "loops": {}, **status}
    known |= {"rank": int(name[4:])} if name.startswith("rank") else {}
    proc = None if state is None else Proc(state)
    return Process(name, role, 100, HERE, 0.0, known, proc, is_live=state is not None)


def server(name="server0", state="S", **engine):
    values = {"running": 1, "waiting": 0, "free_blocks": 50, "total_blocks": 100, "weight_version": "0", **engine}
    return process(name, "server", state, engine=values, facts={"address": ADDRESS if name == "server0" else name})


def batch(**executor):
    values = {"running": 4, "version": 0, "capacity": 2, "is_paused": False, "episodes": [], **executor}
    return process("rank0", waits=[wait("batch", "the next batch", ["episodes"])], executor=values)


def episodes(*waits):
    made = batch()
    made.status["waits"] += waits
    return made


def silent(made, age_s=50.0):
    made.age_s = age_s
    return made


def rated(name, rate):
    made = server(name)
    made.tokens_per_s = rate
    return made


def late(made):
    made.file_age_s = 100.0
    return made


def completed(made, kind, mean_s, age_s=1.0):
    made.status["completed"] = {kind: {"count": 9, "mean_s": mean_s, "age_s": age_s}}
    return made


def waits_for_data(made):
    made.status["waits"].append(wait("data", "the next rows of the dataloader"))
    return made


CASES = {
    "healthy": [process("rank0")],
    "collective_deadlock": [
        process("rank0", waits=[wait("collective", "barrier #3", ["ranks"])]),
        process("rank1", waits=[wait("collective", "all-gather #3", ["ranks"])]),
    ],
    "collective_stuck": [
        process("rank0", waits=[wait("collective", "barrier #3", ["ranks"])]),
        process("rank1", waits=[wait("collective", "barrier #3", ["ranks"])]),
    ],
    "cycle": [
        process("rank0", waits=[wait("call", "x", ["rank1"])]),
        process("rank1", waits=[wait("share", "y", ["rank0"])]),
    ],
    "process_stopped": [process("rank0"), process("rank1", state="T")],
    "launcher_stopped": [process("rank0"), process("node0", "launcher", "T")],
    "rank_dead": [process("rank0"), process("rank1", state=None)],
    "server_dead": [process("rank0"), server(state=None)],
    "worker_dead": [process("rank0"), process("worker-1", "worker", None)],
    "gil_held": [silent(process("rank0", state="R"))],
    "io_blocked": [silent(process("rank0", state="D"))],
    "loop_blocked": [process("rank0", loops={"rollout": 80.0})],
    "weight_update_stuck": [process("rank0", waits=[wait("load", "version 3", [ADDRESS])]), server()],
    "version_skew": [batch(version=3), server()],
    "kv_full": [server(free_blocks=1, waiting=5), process("rank0")],
    "server_slow": [rated("server0", 5.0), rated("server1", 90.0), rated("server2", 100.0), process("rank0")],
    "server_stuck": [server(step_s=90.0), process("rank0")],
    "reward_stuck": [episodes(wait("reward", "mine"))],
    "tool_stuck": [episodes(wait("tool", "browser"))],
    "reward_slow": [episodes(wait("reward", "mine", age_s=2.0, count=9))],
    "tool_slow": [completed(episodes(wait("tool", "browser", count=9)), "tool", mean_s=60.0)],
    "nothing_admitted": [batch(running=0, is_paused=True)],
    "data_stuck": [waits_for_data(batch(running=0, capacity=0, buffered=12))],
    "step_long": [process("rank0", pace={"age_s": 90.0, "longest_s": 10.0}, facts={"step": 4})],
    "agent_stuck": [batch(episodes=[{"id": "1", "age_s": 90.0, "place": "episode 1 waits in act"}])],
    "status_lag": [late(process("rank0"))],
    "finished": [process("rank0", state=None, ended="ended")],
    "run_killed": [process("rank0", state=None)],
    "no_status": [],
}


@pytest.mark.parametrize("kind", CASES)
def test_verdict(kind):
    case = Case(Path("/run"), 60.0, CASES[kind])
    findings = diagnose(case)
    assert findings[0].kind == kind, render(case, findings)
    assert findings[0].verdict in render(case, findings)


def in_barrier(name):
    return process(name, waits=[wait("collective", "barrier #3", ["ranks"])])


def loads():
    return process("rank0", waits=[wait("load", "version 3", [ADDRESS])])


ONE_CAUSE = {
    "a rank that is stopped": ("process_stopped", [in_barrier("rank0"), process("rank1", state="T")]),
    "one that is stopped in the barrier": ("process_stopped", [in_barrier("rank0"), in_barrier("rank1")]),
    "a rank that is dead": ("rank_dead", [in_barrier("rank0"), process("rank1", state=None)]),
    "a rank whose loop is blocked": ("loop_blocked", [in_barrier("rank0"), process("rank1", loops={"rollout": 80.0})]),
    "a rank that waits for a reward": ("reward_stuck", [episodes(wait("reward", "mine")), in_barrier("rank1")]),
    "ranks in different operations": ("collective_deadlock", CASES["collective_deadlock"]),
    "a server that is dead": ("server_dead", [loads(), server(state=None)]),
    "and a rank that waits for another one": ("server_dead", [loads(), in_barrier("rank1"), server(state=None)]),
    "an engine that hangs in a step": ("weight_update_stuck", [loads(), server(step_s=90.0)]),
    "a server that holds the GIL": ("gil_held", [loads(), silent(server(state="R", step_s=90.0))]),
}


@pytest.mark.parametrize("name", ONE_CAUSE)
def test_what_follows_from_a_cause_is_no_finding_of_its_own(name):
    kind, processes = ONE_CAUSE[name]
    if name == "one that is stopped in the barrier":
        processes[1].proc = Proc("T")
    (found,) = diagnose(Case(Path("/run"), 60.0, processes))
    assert found.kind == kind and sum("from this follows: " in line for line in found.evidence) >= 1


def test_causes_of_their_own_are_findings_of_their_own():
    dead = [in_barrier("rank0"), process("rank1", state=None), process("node0", "launcher", "T")]
    case = Case(Path("/run"), 60.0, dead)
    assert [found.kind for found in diagnose(case)] == ["launcher_stopped", "rank_dead"]
    # The reward does not wait for the dead server.
    case = Case(Path("/run"), 60.0, [episodes(wait("reward", "mine")), server(state=None)])
    assert [found.kind for found in diagnose(case)] == ["server_dead", "reward_stuck"]
    full = late(process("rank0"))
    full.status["problem"] = "OSError: No space left on device"
    case = Case(Path("/run"), 60.0, [full], probe_error="No space left on device")
    assert [found.kind for found in diagnose(case)] == ["disk_full"]


def test_network_disk_and_memory():
    lost = episodes(wait("generate", "", [ADDRESS]))
    case = Case(Path("/run"), 60.0, [lost, server()], health={ADDRESS: "timed out"})
    assert diagnose(case)[0].kind == "network_dead"
    closed = episodes(wait("server", "an open server", []))
    case = Case(Path("/run"), 60.0, [closed, server()], health={ADDRESS: "timed out"})
    assert diagnose(case)[0].kind == "network_dead", "requests go to a server until it fails its health checks"
    case = Case(Path("/run"), 60.0, [lost], health={ADDRESS: "refused"})
    assert diagnose(case)[0].kind == "server_unreachable"
    case = Case(Path("/run"), 60.0, [process("rank0")], probe_error="No space left on device")
    assert diagnose(case)[0].kind == "disk_full"
    case = Case(Path("/run"), 60.0, [process("rank0")], memory={"total": 100 << 30, "available": 1 << 30})
    assert diagnose(case)[0].kind == "memory_pressure"


def test_a_directory_that_only_the_doctor_cannot_write_is_no_cause():
    refused = {"probe_error": "Permission denied", "is_probe_refused": True}

    def kinds(*processes):
        return [found.kind for found in diagnose(Case(Path("/run"), 60.0, list(processes), **refused))]

    failed = process("rank0", state=None, ended="ended", facts={"error": "ValueError: wrong"})
    assert kinds(failed) == ["run_failed"]
    assert kinds(process("rank0")) == ["healthy"]
    assert kinds(process("rank0", problem="cannot write rank0.json: Permission denied"))[0] == "disk_unwritable"
    old = process("rank0")
    old.file_age_s = 50.0
    assert kinds(old)[0] == "disk_unwritable"
    assert kinds(old, process("rank1"))[0] != "disk_unwritable"


def test_what_refuses_the_probe_is_told_from_a_broken_disk(tmp_path, monkeypatch):
    def refuse(self, data):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    for number, is_refused in ((errno.EACCES, True), (errno.EROFS, True), (errno.ENOSPC, False), (errno.EIO, False)):
        case = Case(tmp_path, 60.0)
        write_probe(case)
        assert (case.probe_error, case.is_probe_refused) == (os.strerror(number), is_refused)


def test_a_rank_that_does_not_publish_with_the_others_is_named():
    ranks = [process("rank0"), process("rank1", waits=[wait("publish", "weights of version 5")])]
    ranks[
        0
    ].stacks = 'Current thread 0x1 (most recent call first):\n  File "a.py", line 3 in f\n  File "b.py", line 4 in g\n'
    (found,) = diagnose(Case(Path("/run"), 60.0, ranks))
    assert found.kind == "collective_deadlock" and "for rank0, which does not come" in found.verdict
    assert found.evidence[-1].endswith('its main thread is in File "a.py", line 3 in f ← File "b.py", line 4 in g')
    alone = process("rank0", waits=[wait("publish", "weights of version 5")])
    assert [found.kind for found in diagnose(Case(Path("/run"), 60.0, [alone]))] == ["weight_update_stuck"]


@pytest.mark.parametrize(
    "pace",
    [{"age_s": 50.0, "longest_s": 1.0}, {"age_s": 200.0, "longest_s": 50.0}, {"age_s": 500.0, "longest_s": None}],
)
def test_steps_that_are_long_by_nature_are_healthy(pace):
    assert diagnose(Case(Path("/run"), 60.0, [process("rank0", pace=pace)]))[0].kind == "healthy"


def test_a_main_thread_that_waits_for_something_known_is_not_in_a_long_step():
    waiting = process("rank0", waits=[wait("batch", age_s=2.0) | {"thread": "MainThread"}])
    waiting.status["pace"] = {"age_s": 900.0, "longest_s": 1.0}
    assert diagnose(Case(Path("/run"), 60.0, [waiting]))[0].kind == "healthy"


def test_a_stopped_process_is_not_blamed_for_something_else():
    """What it wrote before it was stopped is no evidence that it lives, is slow or has other weights."""
    lost, stopped = episodes(wait("generate", "", [ADDRESS])), server(state="T", step_s=90.0)
    case = Case(Path("/run"), 60.0, [lost, stopped], health={ADDRESS: "timed out"})
    assert [found.kind for found in diagnose(case)] == ["process_stopped"]
    rates = [rated("server0", 0.0), rated("server1", 90.0), rated("server2", 100.0)]
    rates[0].proc = Proc("T")
    assert [found.kind for found in diagnose(Case(Path("/run"), 60.0, [*rates, process("rank0")]))] == [
        "process_stopped"
    ]
    trainer = batch(version=3)
    trainer.proc = Proc("T")
    assert [found.kind for found in diagnose(Case(Path("/run"), 60.0, [trainer, server()]))] == ["process_stopped"]


def test_a_run_that_died_of_a_full_disk():
    dead, ended = process("rank0", state=None), process("rank0", state=None, ended="ended")
    full = {"disks": [{"path": "/run", "free": 0, "free_inodes": 0.5}], "probe_error": "No space left on device"}
    assert [found.kind for found in diagnose(Case(Path("/run"), 60.0, [dead], **full))] == ["disk_full", "run_killed"]
    assert [found.kind for found in diagnose(Case(Path("/run"), 60.0, [ended], **full))] == ["finished"]


def test_a_server_behind_a_slow_link_is_named():
    trainer = batch()
    trainer.status["servers"] = [{"address": ADDRESS, "slow": "a health check takes 2 s"}, {"address": "b", "slow": ""}]
    findings = [f for f in diagnose(Case(Path("/run"), 60.0, [trainer, server()])) if f.kind == "server_slow"]
    assert [(f.verdict, f.evidence) for f in findings] == [
        ("server0 is much slower than the other servers", [f"{ADDRESS}: a health check takes 2 s"])
    ]


def test_waits_for_episodes_lead_to_their_servers():
    case = Case(Path("/run"), 60.0, [episodes(wait("generate", "", [ADDRESS])), server()])
    assert ("rank0", "server0") in [edge[:2] for edge in find_edges(case)]
    assert not find_cycle(find_edges(case))


def test_damaged_and_foreign_files_are_one_note_each(tmp_path, capsys):
    folder = tmp_path / "status"
    folder.mkdir()
    good = {
        "name": "rank0",
        "role": "trainer",
        "pid": 2**22 + 7,
        "host": "elsewhere",
        "started": 1.0,
        "run": str(tmp_path),
    }
    good |= {"written": time.time(), "clock": 1.0, "waits": "none", "loops": [], "facts": None}
    bad = {
        "cut": json.dumps(good)[:40],
        "list": "[1]",
        "empty": "",
        "deep": "[" * 100_000,
        "text": '{"name": 1, "pid": "x"}',
    }
    for name, text in bad.items():
        (folder / f"{name}.json").write_text(text)
    (folder / "binary.json").write_bytes(os.urandom(200))
    (folder / "rank0.json").write_text(json.dumps(good))
    case = collect(tmp_path, 60.0)
    assert [made.name for made in case.processes] == ["rank0"]
    assert len([note for note in case.notes if "is no status" in note]) == 6
    assert any("elsewhere cannot be read from here" in note for note in case.notes)
    assert doctor.main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["kind"] == "healthy"


def test_processes_of_other_runs_that_name_this_one_are_not_its_own(tmp_path):
    # A replay of it, and a run whose name begins like its name.
    run_dir = tmp_path / "läufe" / "run"
    run_dir.mkdir(parents=True)
    for other in (run_dir / "replays" / "1", run_dir.with_name("run-2")):
        status = Status()
        status.begin(other, "rank0", "trainer", has_thread=False)
        try:
            assert not collect(run_dir, 60.0).processes
            link = tmp_path / "link"
            link.symlink_to(other)
            assert [(made.name, made.is_live) for made in collect(link, 60.0).processes] == [("rank0", True)]
            link.unlink()
        finally:
            status.end()


def test_a_run_without_status_and_wrong_arguments(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text("error: the model is gone\n")
    (tmp_path / "run.sqlite").write_text("no database")
    assert doctor.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "[no_status]" in out and "the model is gone" in out and "cannot read the events" in out
    with pytest.raises(ConfigError, match="above 0"):
        doctor.main([str(tmp_path), "--patience", "-1"])
    with pytest.raises(ConfigError, match="needs a run directory"):
        doctor.main([str(tmp_path / "nothing"), "--json"])
