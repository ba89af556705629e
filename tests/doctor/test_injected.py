"""The doctor names the cause of twenty injected hangs and slow-downs of real processes.

The processes of all cases start at the same time, so that together they take little longer than one.
"""

import contextlib
import os
import signal
import time

import pytest

from arealite.doctor.collect import collect
from arealite.doctor.evidence import read_evidence
from arealite.doctor.report import render
from arealite.doctor.rules import diagnose
from arealite.utils.process import end_families
from tests import warm_python
from tests.doctor.cases import EXPECTED
from tests.tiny_model import make_model

PATIENCE_S = 3.0
START_TIMEOUT_S = 180.0
REPRESENTATIVE = ("collective", "stuck_reward", "stopped_rank")


@contextlib.contextmanager
def injected(names, tmp_path):
    """Start cases; yields the run directory of each once it has failed for long enough."""
    make_model(tmp_path / "model")
    started = {}
    try:
        for name in names:
            run_dir = tmp_path / name
            run_dir.mkdir()
            command = ["-m", "tests.doctor.cases", name, str(run_dir), str(tmp_path / "model")]
            started[name] = warm_python.start(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
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
    """Examine until something is found: before a wait is long enough there is nothing. The first verdict counts."""
    while True:
        case, findings = examine(run_dir)
        if findings[0].kind != "healthy" or time.monotonic() > deadline:
            return case, findings
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_injected_hang_is_found(name, tmp_path):
    with injected([name], tmp_path) as run_dirs:
        case, findings = first_verdict(run_dirs[name], time.monotonic() + 30)
    assert findings[0].kind == EXPECTED[name], render(case, findings)
    assert findings[0].evidence and findings[0].remedy
    others = [p for p in case.processes if p.proc and p.proc.state not in "T"]
    assert others and all("File" in process.stacks for process in others), render(case, findings)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_eighteen_of_twenty_injected_cases_are_found(tmp_path):
    with injected([*EXPECTED], tmp_path) as run_dirs:
        deadline = time.monotonic() + 60
        verdicts = {name: first_verdict(run_dirs[name], deadline)[1][0].kind for name in EXPECTED}
    wrong = {name: (verdicts[name], kind) for name, kind in EXPECTED.items() if verdicts[name] != kind}
    print(f"{len(EXPECTED) - len(wrong)} of {len(EXPECTED)}: {wrong}")
    assert len(wrong) <= 2, wrong
