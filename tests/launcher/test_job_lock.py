"""The lock of a run directory between attempts of one job: processes of the attempt before may still be ending."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from arealite.api.cli_args import ClusterConfig
from arealite.api.errors import ConfigError, WaitTimeout
from arealite.launcher import job as job_module
from arealite.launcher.job import Job
from arealite.launcher.launch_config import LaunchConfig
from arealite.launcher.local import run_attempts

# A node that still runs: it holds the lock until its input ends.
HOLDER = """
import sys
from arealite.launcher.job import Job
with Job.load(sys.argv[1]).lock():
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def job(tmp_path) -> Job:
    config = LaunchConfig("e", "t", allocation_mode="d1", cluster=ClusterConfig(fileroot=str(tmp_path)))
    config.recover.retries = 1
    return Job(config, "script.py", [], [[0]], False)


@pytest.fixture
def start_holder() -> Iterator[Callable[[Job], subprocess.Popen]]:
    started = []

    def start(job: Job) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLDER, str(job.path)]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(holder)
        assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        return holder

    yield start
    for holder in started:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_the_next_attempt_waits_for_a_node_that_is_still_ending(job, start_holder, monkeypatch):
    holders, messages = [], []

    def note(text: str, **_: object) -> None:
        messages.append(text)
        if "still ending" in text:
            holders[0].stdin.close()

    def run(attempt: Job) -> int:
        if attempt.attempt == 0:
            holders.append(start_holder(attempt))
        return 1 - attempt.attempt

    monkeypatch.setattr(job_module, "print", note, raising=False)
    assert run_attempts(job, run) == 0
    (message,) = messages
    assert message.startswith("waiting for processes of this job that are still ending (process ")
    assert f"process {holders[0].pid} on " in message


def test_a_node_that_never_ends_is_named_and_is_no_error_of_the_configuration(job, start_holder, monkeypatch):
    monkeypatch.setattr(job_module, "_ENDING_S", 0.0)
    job.config.launcher.stop_timeout_s, job.config.setup_timeout_s = 0.1, 0.5
    job.save()
    holder = start_holder(job)
    with pytest.raises(WaitTimeout, match=rf"have not ended within 0 s .*process {holder.pid} .*resume with: ") as info:
        job.save()
    assert not isinstance(info.value, ConfigError)


def test_another_job_is_refused_at_once(job, start_holder):
    job.save()
    holder = start_holder(job)
    other = Job(job.config, "script.py", [], [[0]], False)
    with pytest.raises(ConfigError, match=rf"another run uses .*\(process {holder.pid} on .* of job {job.id}\)"):
        other.save()


@pytest.mark.parametrize("content", ["", "process x on {host}", "process 99999999999999999999 on {host}", "\x1b[2J\0"])
def test_a_damaged_lock_file_names_no_process_that_runs(job, start_holder, monkeypatch, content):
    monkeypatch.setattr(job_module, "_ENDING_S", 0.0)
    job.config.launcher.stop_timeout_s = 0.1
    job.save()
    start_holder(job)
    (job.run_dir.path / "lock").write_text(content.format(host=os.uname().nodename))
    with pytest.raises(ConfigError, match="another run uses"):
        job.save()
