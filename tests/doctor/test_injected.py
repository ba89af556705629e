"""The doctor names the cause of twenty injected hangs and slow-downs of real processes.

The processes of all cases start at the same time, so that together they take little longer than one.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from arealite.doctor.collect import collect
from arealite.doctor.evidence import read_evidence
from arealite.doctor.report import render
from arealite.doctor.rules import diagnose
from arealite.utils.process import end_families
from tests import warm_python
from tests.doctor.cases import EXPECTED, NAMESPACE, OWN_NAMESPACE, enter
from tests.tiny_model import make_model

PATIENCE_S = 3.0
START_TIMEOUT_S = 180.0
REPRESENTATIVE = ("collective", "stuck_reward", "stopped_rank")


def start(name, run_dir, model):
    """Start the processes of a case."""
    command = ["-m", "tests.doctor.cases", name, str(run_dir), str(model)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if name in OWN_NAMESPACE:
        return subprocess.Popen([*NAMESPACE, sys.executable, *command], env=env)
    return warm_python.start(command, env=env)


def can_mount(tmp_path):
    """Whether this user may mount a file system in a namespace."""
    command = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def injected(names, tmp_path):
    """Start cases; yields the run directory of each once it has failed for long enough."""
    make_model(tmp_path / "model")
    started = {}
    try:
        for name in names:
            run_dir = tmp_path / name
            run_dir.mkdir()
            started[name] = start(name, run_dir, tmp_path / "model")
        deadline = time.monotonic() + START_TIMEOUT_S
        for name, process in started.items():
            while not (tmp_path / f"{name}.ready").exists():
                assert process.poll() is None and time.monotonic() < deadline, f"{name} did not start"
                time.sleep(0.05)
        yield {name: tmp_path / name for name in names}
    finally:
        for process in started.values():
            end_families([process.pid], 0.0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait(timeout=10)


def examine(run_dir):
    case = collect(run_dir, PATIENCE_S)
    read_evidence(case)
    return case, diagnose(case)


def first_verdict(run_dir, deadline):
    """Examine until something is found: before a wait is long enough there is nothing. The first verdict counts.

    Returns the seconds of the last examination, too.
    """
    while True:
        began = time.monotonic()
        case, findings = examine(run_dir)
        now = time.monotonic()
        if findings[0].kind != "healthy" or now > deadline:
            return case, findings, now - began
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_injected_hang_is_found(name, tmp_path):
    with injected([name], tmp_path) as run_dirs:
        case, findings, _ = first_verdict(run_dirs[name], time.monotonic() + 30)
    assert findings[0].kind == EXPECTED[name], render(case, findings)
    assert findings[0].evidence and findings[0].remedy
    others = [p for p in case.processes if p.proc and p.proc.state not in "T"]
    assert others and all("File" in process.stacks for process in others), render(case, findings)


@pytest.mark.slow
def test_the_thread_that_keeps_the_interpreter_lock_is_named(tmp_path):
    """The signal for stacks reaches the main thread, which only waits for the lock."""
    with injected(["gil"], tmp_path) as run_dirs:
        case, findings, _ = first_verdict(run_dirs["gil"], time.monotonic() + 60)
    assert findings[0].kind == EXPECTED["gil"], render(case, findings)
    assert "in match" in " ".join(findings[0].evidence), render(case, findings)


@pytest.mark.slow
def test_a_disk_that_is_really_full_is_found(tmp_path):
    if not can_mount(tmp_path):
        pytest.skip("mounting a small disk needs user namespaces")
    with injected(["full_disk"], tmp_path) as run_dirs:
        found = verdict_inside(run_dirs["full_disk"])
    assert found["kind"] == EXPECTED["full_disk"], found
    evidence = " ".join(found["evidence"])
    assert "a test file in" in evidence and "rank0: cannot write" in evidence and "0 MiB" in evidence, evidence


def verdict_inside(run_dir):
    """Run `arealite doctor` in the namespaces of a case; returns its first finding."""
    pid = int((run_dir.with_suffix(".ready")).read_text())
    command = [*enter(pid), sys.executable, "-m", "arealite.cli.doctor", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    return json.loads(done.stdout)["findings"][0]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_eighteen_of_twenty_injected_cases_are_found(tmp_path):
    names = [name for name in EXPECTED if name not in OWN_NAMESPACE or can_mount(tmp_path)]
    verdicts, seconds = {}, {}
    with injected(names, tmp_path) as run_dirs:
        deadline = time.monotonic() + 60
        for name in names:
            verdicts[name], seconds[name] = timed_verdict(name, run_dirs[name], deadline)
    wrong = {name: (verdicts.get(name), kind) for name, kind in EXPECTED.items() if verdicts.get(name) != kind}
    print(f"{len(EXPECTED) - len(wrong)} of {len(EXPECTED)}: {wrong}")
    print("seconds of a diagnosis: " + ", ".join(f"{name} {took_s:.1f}" for name, took_s in seconds.items()))
    assert len(wrong) <= 2, wrong


def timed_verdict(name, run_dir, deadline):
    """Return the first verdict, and the seconds of the examination that found it."""
    if name in OWN_NAMESPACE:
        began = time.monotonic()
        kind = verdict_inside(run_dir)["kind"]
        return kind, time.monotonic() - began
    _, findings, took_s = first_verdict(run_dir, deadline)
    return findings[0].kind, took_s
