import errno
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from arealite.utils.process import MARK_ENV, end_families, find_family, process_table, raise_file_limit, tail

DAEMON = """
import subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
if sys.argv[1] == "stay":
    time.sleep(600)
"""

# Becomes a program whose many arguments take the kernel a while to set up.
LOADING = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_STACK, (1 << 26, resource.getrlimit(resource.RLIMIT_STACK)[1]))
os.execvpe("sh", ["sh", "-c", "sleep 600", *["x"] * 550_000], {**os.environ, sys.argv[1]: sys.argv[2]})
"""


def start(mode: str, mark: str | None = None) -> tuple[subprocess.Popen, int]:
    env = {**os.environ, **({MARK_ENV: mark} if mark else {})}
    command = [sys.executable, "-c", DAEMON, mode]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def alive(pid: int) -> bool:
    return pid in process_table() and not process_table()[pid].zombie


def test_a_family_includes_children_that_made_their_own_session():
    process, daemon = start("stay")
    assert {info.pid for info in find_family([process.pid])} == {process.pid, daemon}
    assert end_families([process.pid], grace_s=0.5) == 2
    assert process.wait() == -signal.SIGTERM and not alive(daemon)


def test_a_daemon_whose_parent_is_gone_is_found_by_its_mark():
    process, daemon = start("leave", mark="mark-of-this-test")
    process.wait()
    assert alive(daemon)
    end_families([], grace_s=0.2, marks=["mark-of-this-test"])
    assert not alive(daemon)


def test_a_process_that_is_loading_its_program_is_found_by_its_mark():
    """It has no environment until then."""
    for number in range(5):
        mark = f"mark-{number}-of-process-{os.getpid()}"
        process = subprocess.Popen([sys.executable, "-c", LOADING, MARK_ENV, mark], start_new_session=True)
        environment = Path(f"/proc/{process.pid}/environ")
        try:
            # First the interpreter is loaded, which has no mark yet.
            while not environment.read_bytes():
                pass
            while (text := environment.read_bytes()) and mark.encode() not in text:
                pass
            assert process.pid in {info.pid for info in find_family([], [mark])}
        finally:
            end_families([process.pid], grace_s=0.0)
            process.wait()


def test_a_process_that_ends_on_sigterm_is_not_waited_for():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    # The test's own timeout is less than the grace period.
    end_families([process.pid], grace_s=600)
    assert process.wait() == -signal.SIGTERM


def test_a_process_that_ends_during_the_search_is_no_error(monkeypatch):
    """Older kernels report EINVAL for a leader that has ended before the rest of its session."""

    def report_invalid(pid: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    process, daemon = start("stay")
    monkeypatch.setattr(os, "pidfd_open", report_invalid)
    end_families([process.pid], grace_s=0.0)
    monkeypatch.undo()
    process.wait()
    end = time.monotonic() + 60
    while alive(daemon):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_die_with_parent():
    inner = (
        "import os, time; from arealite.utils.process import die_with_parent; die_with_parent(os.getppid());"
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}]).wait()"
    parent = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    end_of_child = os.pidfd_open(child)
    parent.kill()
    parent.wait()
    assert select.select([end_of_child], [], [], 60)[0]
    os.close(end_of_child)
    assert parent.stdout.read() == ""
    assert not alive(child)


def test_tail(tmp_path):
    log = tmp_path / "a.log"
    assert tail(log) == "(no log)"
    log.write_text("old\n")
    size = log.stat().st_size
    assert tail(log, since=size) == "(the log is empty)"
    log.write_text("old\n" + "".join(f"{i}\n" for i in range(100)))
    assert tail(log, 3, since=size).split() == ["97", "98", "99"]


def test_the_file_limit_is_raised_and_inherited():
    """Commands raise it at their start; children inherit it."""
    code = (
        "import resource, subprocess, sys; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard));"
        "from arealite.utils.config import run_main;"
        "child = 'import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])';"
        "run_main(lambda argv: subprocess.run([sys.executable, '-c', child]).returncode, [])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def test_the_file_limit_is_never_lowered():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_file_limit(16) == before[0]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
