"""The local launcher with real processes: what it starts, what it says, and that it leaves nothing behind."""

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arealite.api.errors import ConfigError
from arealite.launcher.local import launch
from arealite.launcher.supervisor import ChildSpec, Supervisor
from arealite.utils.names import FileNames
from arealite.utils.network import free_port
from arealite.utils.process import end_families
from arealite.utils.rundir import RunDir
from tests.launcher.conftest import carriers, wait_until_gone

RUN = Path("runs/e/t")


@pytest.fixture(autouse=True)
def no_orphans(work):
    yield
    assert carriers(work) == []


def start(argv: list[str], **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "arealite.launcher.local", "script.py", *argv],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(*paths: Path, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not appear"
        time.sleep(0.02)


def test_a_run_from_start_to_end(work, arguments, capfdbinary):
    assert launch("script.py", arguments()) == 0
    out = capfdbinary.readouterr().out.decode()
    logs = {path.name: path.read_text() for path in (RUN / "logs").iterdir()}
    assert set(logs) == {"rank0.log", "rank1.log", "server0.log", "server1.log"}
    assert "rank 0 of 2 servers 127.0.0.1:" in logs["rank0.log"] and "rank 1 of 2" in logs["rank1.log"]
    assert "rank 0 of 2" in out and "rank 1 of 2" not in out, "only rank 0 speaks on the console"
    assert "2 sglang server(s) ready" in out
    assert "allocation_mode: sglang.d2+d2" in (RUN / "config.yaml").read_text()


@pytest.mark.parametrize("dies", [False, True])
def test_one_gpu_is_shared_through_mps(work, arguments, dies):
    """The daemon is a stand-in: there is no GPU. It ends with the run, and its folder too; a run without it goes on."""
    daemon = work / "bin" / "nvidia-cuda-mps-control"
    daemon.parent.mkdir()
    end = "exit 3" if dies else "exec sleep 600"
    daemon.write_text(f'#!/bin/sh\necho "$1 $CUDA_MPS_PIPE_DIRECTORY" > mps\n{end}\n')
    daemon.chmod(0o755)
    path = f"{daemon.parent}:{os.environ['PATH']}"
    mode = arguments("tokenizer_path=wait", mode="sglang.d1+d1")
    process = start(mode, CUDA_VISIBLE_DEVICES="GPU-8932f937", PATH=path, TMPDIR=str(work))
    wait_for(work / "up0", work / "mps")
    flag, folder = (work / "mps").read_text().split()
    assert flag == "-f" and Path(folder).is_dir()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert f"devices GPU-8932f937 mps {folder}" in out and ("share the GPUs by time slices" in out) is dies
    assert f"starts {folder}" in (RUN / "logs" / "server0.log").read_text()
    wait_until_gone(work)  # the watchdog, which clears the folder away
    assert not Path(folder).exists()


def test_the_first_failure_ends_everything_and_is_shown(work, arguments):
    process = start(arguments("tokenizer_path=raise"))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank1 exited with code 1" in out and "  | RuntimeError: rank one has a problem" in out


def test_a_server_that_dies_while_starting_shows_its_last_lines(work, arguments):
    process = start(arguments(), FAKE_SERVER="dies")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a server died while it was starting" in out and "cannot load the model: no such file" in out
    assert not (RUN / "logs" / "rank0.log").exists(), "no rank is started without servers"


def test_a_server_that_never_answers_meets_a_named_deadline(work, arguments):
    process = start(arguments("rollout.setup_timeout_s=1"), FAKE_SERVER="hangs")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "waited 1 s (rollout.setup_timeout_s) for server0 to answer" in out
    assert "the fake server starts" in out


def kill_a_server(work: Path) -> None:
    victim = next(p for p in Path("/proc").iterdir() if p.name.isdigit() and is_server(p, work))
    os.kill(int(victim.name), signal.SIGKILL)


def test_a_killed_server_is_started_again_elsewhere(work, arguments):
    process = start(arguments("tokenizer_path=wait"))
    wait_for(work / "up0", work / "up1")
    (names,) = (RUN / "names").glob("*-0")
    before = FileNames(names).list("servers/")
    kill_a_server(work)
    deadline = time.monotonic() + 60
    while len(after := FileNames(names).list("servers/")) < 2 or after == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.poll() is None, "the run went on"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert "was ended by SIGKILL" in out and "starting server" in out
    assert len(set(before.values()) & set(after.values())) == 1, "never at its old address"


def test_servers_that_keep_dying_end_the_run(work, arguments):
    process = start(arguments("tokenizer_path=wait", "launcher.server_restarts=0"))
    wait_for(work / "up0", work / "up1")
    kill_a_server(work)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "servers died 1 times (launcher.server_restarts=0): server" in out


def is_server(entry: Path, work: Path) -> bool:
    try:
        command = (entry / "cmdline").read_bytes().split(b"\0")
        return command[1:2] == [b"server.py"] and os.readlink(entry / "cwd") == str(work)
    except OSError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_end_everything(work, arguments, number, code):
    argv = arguments("tokenizer_path=wait", "recover.mode=auto", "recover.retries=1")
    process = start(argv)
    wait_for(work / "up0", work / "up1")
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code and f"ended by {number.name}: ending 4 processes" in out


def test_a_second_run_in_the_same_folder_is_refused_and_waits_for_what_a_killed_one_left(work, arguments):
    first = start(arguments("tokenizer_path=wait"))
    wait_for(work / "up0", work / "up1")
    config = (RUN / "config.yaml").read_text()
    second = start(arguments("seed=5"))
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 2 and f"another run uses {work / RUN} (process {first.pid} " in out
    assert (RUN / "config.yaml").read_text() == config
    first.kill()
    first.communicate()
    assert launch("script.py", arguments()) == 0


def test_kill_9_of_the_launcher_leaves_nothing(work, arguments):
    process = start(arguments("tokenizer_path=wait"))
    wait_for(work / "up0", work / "up1")
    assert len(carriers(work)) >= 9, "launcher, watchdog, servers, ranks and their children"
    segment = RunDir(work / RUN).shared_weights
    segment.write_text("what a trainer leaves that has no time to clean up")
    process.kill()
    process.communicate()
    wait_until_gone(work)
    deadline = time.monotonic() + 10
    while segment.exists():
        assert time.monotonic() < deadline, f"{segment} was left behind"
        time.sleep(0.05)


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_restart_after_a_rank_was_killed(work, arguments, capfdbinary, number):
    argv = arguments(f"tokenizer_path={number}", "recover.mode=auto", "recover.retries=1")
    assert launch("script.py", argv) == 0
    captured = capfdbinary.readouterr()
    end = "exited with code 130" if number == "SIGINT" else f"was ended by {number}"
    assert end in captured.err.decode()
    assert b"starting again from the recover checkpoint (restart 1 of 1)" in captured.out
    assert "attempt 1" in (RUN / "logs" / "rank0.log").read_text()


def test_what_would_fail_again_is_not_started_again(work, arguments, capfdbinary):
    argv = arguments("tokenizer_path=refuse", "recover.mode=auto", "recover.retries=3", mode="d2")
    assert launch("script.py", argv) == 2
    told = b"".join(capfdbinary.readouterr())  # by rank 0, or by the launcher if rank 1 ended first
    assert b"error: no rows" in told and b"starting again" not in told


def test_retries_run_out(work, arguments):
    argv = arguments("tokenizer_path=raise", "recover.mode=auto", "recover.retries=1", mode="d2")
    assert launch("script.py", argv) == 1


TABLE_SCRIPT = """
from arealite.utils.console import ProgressTable
with ProgressTable(2) as table:
    print("noise")
    table.update(1, {"reward": 0.75})
"""


def test_rank_0_draws_its_table_on_the_terminal_of_the_launcher(work):
    (work / "script.py").write_text(TABLE_SCRIPT)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "arealite.launcher.local", "script.py", "allocation_mode=d1"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how the end of a pseudo-terminal is told
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    assert process.wait(60) == 0, shown.decode()
    assert "0.750" in shown.decode() and "2/2" in shown.decode() and "noise" not in shown.decode()
    assert "noise" in Path("runs/run/trial/logs/rank0.log").read_text()


def test_a_full_disk_costs_the_log_and_not_the_run(capfdbinary):
    command = [sys.executable, "-c", "print('hello')"]
    with Supervisor(1) as supervisor:
        child = supervisor.start(ChildSpec("a", command, Path("/dev/full"), echo=True))
        assert supervisor.wait(60) == [child] and child.code == 0
    out = capfdbinary.readouterr().out.decode()
    assert "hello" in out and "cannot write /dev/full: No space left on device" in out


def test_nothing_starts_when_the_configuration_is_wrong(work, arguments):
    with pytest.raises(ConfigError, match=r"did you mean actor.optimizer.lr\?"):
        launch("script.py", arguments("actor.optimizer.lrr=1"))
    with pytest.raises(ConfigError, match="there is no script"):
        launch("absent.py", arguments())
    with pytest.raises(ConfigError, match=r"cluster\.n_nodes=2"):
        launch("script.py", arguments("cluster.n_nodes=2"))
    with pytest.raises(ConfigError, match="trial_name='' becomes a folder"):
        launch("script.py", arguments("trial_name="))
    assert not Path("runs").exists()


def test_dry_run_starts_nothing(work, arguments, capsys):
    assert launch("script.py", arguments("sglang.mem_fraction_static=0.5"), dry_run=True) == 0
    out = capsys.readouterr().out
    assert "server 1: node 0" in out and "rank 1: node 0" in out and "--mem-fraction-static 0.5" in out
    assert not Path("runs").exists()


def test_servers_that_already_run_are_used(work, arguments, capfdbinary):
    """No server is started, and the ranks get the addresses."""
    port = free_port()
    flags = ["--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen([sys.executable, "server.py", *flags], stdout=subprocess.DEVNULL) as server:
        assert launch("script.py", arguments(f"rollout.server_addrs=[127.0.0.1:{port}]", mode="sglang.d4+d1")) == 0
        end_families([server.pid], 5)
    out = capfdbinary.readouterr().out.decode()
    assert f"servers 127.0.0.1:{port} attempt 0" in out and "ready in" not in out
    assert {path.name for path in (RUN / "logs").iterdir()} == {"rank0.log"}


def test_servers_that_do_not_run_are_named(work, arguments, capfd):
    argv = arguments(
        f"rollout.server_addrs=[127.0.0.1:{free_port()}]", "rollout.setup_timeout_s=1", mode="sglang.d1+d1"
    )
    assert launch("script.py", argv) == 1
    captured = capfd.readouterr()
    assert captured.out.count("waiting for running servers: 127.0.0.1:") == 1
    assert "waited 1 s (rollout.setup_timeout_s) for the running servers of rollout.server_addrs" in captured.err
    assert "Connection refused" in captured.err and not (RUN / "logs" / "rank0.log").exists()


def test_a_taken_port_is_named(work, arguments, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert launch("script.py", arguments(f"server.port={port}", mode="sglang.d1+d1")) == 1
    assert f"port {port} on 127.0.0.1 is taken" in capfd.readouterr().err


def test_command_line(work):
    run = [sys.executable, "-m", "arealite.launcher.local"]
    assert subprocess.run([*run, "--help"], capture_output=True).returncode == 0
    bad = subprocess.run([*run, "script.py", "nonsense=1"], capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stderr.startswith("error: unknown key 'nonsense'")


def test_what_cannot_be_started_is_one_message(work, arguments, capfd):
    assert launch("script.py", arguments("sglang.command=/no/such/program")) == 1
    said = capfd.readouterr().err
    assert "error: cannot start server0: " in said and "/no/such/program" in said, said
    log = RUN / "logs" / "server0.log"
    log.unlink()
    log.mkdir()
    assert launch("script.py", arguments()) == 1
    assert "error: cannot start server0: [Errno 21] Is a directory" in capfd.readouterr().err
