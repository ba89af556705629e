"""A launcher whose output cannot be written goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from arealite.launcher.output import lasting_output
from tests.launcher.conftest import wait_until_gone
from tests.launcher.test_local import COMMAND, RUN, wait_for


def test_ranks_save_their_checkpoint_although_nobody_reads_the_output(work, arguments):
    """Ctrl+C ends `tee` at once, and the launcher gets the same signal."""
    argv = arguments("tokenizer_path=save", "recover.mode=auto", mode="d1")
    process = subprocess.Popen([sys.executable, *COMMAND, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(work / "up0")
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert (work / RUN / "recover" / "step000003").is_dir()
    wait_until_gone(work)


def test_a_run_whose_reader_has_gone_is_restarted_and_ends(work, arguments):
    """What was printed is in the log of rank 0."""
    argv = arguments("tokenizer_path=SIGKILL", "recover.mode=auto", "recover.retries=1", mode="d1")
    process = subprocess.Popen([sys.executable, *COMMAND, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"run directory")
    process.stdout.close()
    assert process.wait(60) == 0
    assert "attempt 1" in (RUN / "logs" / "rank0.log").read_text()


def test_a_launcher_may_be_started_without_output(work, arguments):
    without = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, *COMMAND]
    assert subprocess.run([*without, *arguments(mode="d1")]).returncode == 0
    assert "rank 0 of 1" in (RUN / "logs" / "rank0.log").read_text()


def test_a_launcher_whose_output_is_on_a_full_disk_says_so_once_and_runs(work, arguments):
    with open("/dev/full", "w") as full:
        command = [sys.executable, *COMMAND, *arguments(mode="d1")]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("warning: cannot write the output: No space left on device. The run goes on") == 1
    assert "rank 0 of 1" in (RUN / "logs" / "rank0.log").read_text()


def test_output_comes_back_with_the_space(tmp_path, monkeypatch):
    file = (tmp_path / "out").open("w")
    with file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        kept = os.dup(file.fileno())
        with lasting_output():
            print("one", flush=True)
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, file.fileno())
            print("two", flush=True)
            os.dup2(kept, file.fileno())
            print("three", flush=True)
        assert sys.stdout is file
    os.close(full)
    os.close(kept)
    assert Path(tmp_path / "out").read_text() == "one\nthree\n"
