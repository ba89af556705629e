"""Programs that start as forks, whoever starts them (`tests/warm_start`)."""

import os
import subprocess
import sys

from tests import warm_start
from tests.warm_python import ROOT
from tests.warm_start.sitecustomize import find_command


def test_programs_that_import_torch_run_as_forks():
    script, worker = str(ROOT / "examples/arealite/demo.py"), "/lib/ray/_private/workers/default_worker.py"
    for command in (["-m", "arealite.cli.serve", "a=b"], [script, "-m"], [worker, "--node"]):
        assert find_command(["python", "-u", *command]) == command
    for command in (["-m", "pytest", script], ["-c", script], ["/lib/ray/dashboard/dashboard.py", script], []):
        assert find_command(["python", *command]) is None


def test_a_fork_has_the_output_and_the_exit_code_of_its_program():
    command = [sys.executable, "-m", "arealite.cli.main", "no_such_key=1"]
    env = {**os.environ, **warm_start.environment()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no_such_key" in done.stderr, done
