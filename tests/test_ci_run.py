"""The script of continuous integration, with programs that only record and fail as a test wants."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launcher.conftest import find_leftovers

ROOT = Path(__file__).parents[1]
# `make docs` and `make test ARGS="--failed-to FILE ..."`.
MAKE = """#!/usr/bin/env bash
[[ "$*" == *" test "* ]] || exit 0
if [ -e hang ]; then : > up; exec sleep 600; fi
if [ -e pass ]; then exit 0; fi
last=${*: -1}
file=${last#*--failed-to }
printf 'tests/a.py::test_fails\\ntests/b.py::test_is_flaky\\n' > "${file%% *}"
exit 1
"""
# `python -m pytest -q -m '' --failed-to FILE @FILE`; the linters pass.
PYTHON = """#!/usr/bin/env bash
[ "$2" = pytest ] || exit 0
cp again "$7"
exit 1
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name, text in {
        ".ci/run": (ROOT / ".ci" / "run").read_text(),
        "bin/make": MAKE,
        ".venv/bin/python": PYTHON,
        "bin/apt-get": "#!/bin/sh\n",
        "scripts/setup": "#!/bin/sh\n",
        "scripts/servers/install-vllm-cpu": "#!/bin/sh\n",
        "scripts/servers/install-sglang-cpu": "#!/bin/sh\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "again").write_text("tests/a.py::test_fails\n")
    return tmp_path


def start(clone: Path, *arguments: str) -> subprocess.Popen:
    env = {**os.environ, "PATH": f"{clone / 'bin'}:{os.environ['PATH']}"}
    return subprocess.Popen(
        [".ci/run", *arguments], cwd=clone, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("fails_again", [True, False])
def test_tests_that_needed_a_second_attempt_are_listed_at_the_end(clone, fails_again):
    if not fails_again:
        (clone / "again").write_text("")
    process = start(clone, "quick")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == fails_again, out
    listed, _, durations = out.partition("--- needed a second attempt: \n")[2].partition("--- durations\n")
    assert listed == "tests/a.py::test_fails\n" * (not fails_again) + "tests/b.py::test_is_flaky\n", out
    parts = [line.split(maxsplit=2)[2] for line in durations.splitlines()[:-1]]
    linters = ["ruff check", "ruff format", "documentation", "pyright"]
    assert parts[0] == "set-up" and [part for part in parts if part in linters] == linters
    # The linters run beside the tests.
    tests = [part for part in parts[1:] if part not in linters]
    assert tests == ["default tests", "default tests, second attempt"]


@pytest.mark.parametrize("passes", [True, False])
def test_slow_and_real_tests_start_if_the_default_tests_pass(clone, passes):
    if passes:
        (clone / "pass").touch()
    process = start(clone)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == (not passes), out
    parts = [line.split(maxsplit=2)[2] for line in out.partition("--- durations\n")[2].splitlines()[:-1]]
    after = parts[parts.index("default tests") + 1 :]
    servers, beside = ["vLLM and SGLang", "Chromium"], {"slow tests", "Slurm and Ray"}
    assert [part for part in after if part in servers] == servers * passes, out
    assert beside & set(after) == (beside if passes else set()) and find_leftovers(clone) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_everything(clone, number):
    (clone / "hang").touch()
    process = start(clone, "quick")
    deadline = time.monotonic() + 60
    while not (clone / "up").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, out
    assert "*** failed after" in out and find_leftovers(clone) == []


def test_no_part_starts_after_the_limit_of_all(clone):
    script = clone / ".ci" / "run"
    text = script.read_text()
    assert text.count("\nTOTAL_S=5100\n") == 1
    script.write_text(text.replace("\nTOTAL_S=5100\n", "\nTOTAL_S=0\n"))
    process = start(clone, "quick")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 124 and "*** set-up: not started, all parts together have taken" in out
