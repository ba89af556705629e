"""The local launcher with real processes: what it starts and prints, and that it leaves no process behind."""

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from arealite.api.errors import ConfigError
from arealite.launcher import local
from arealite.launcher.job import LogFollower
from arealite.launcher.local import launch
from arealite.launcher.supervisor import ChildSpec, Supervisor
from arealite.utils import startup
from arealite.utils.activity import activity
from arealite.utils.names import FileNames
from arealite.utils.network import free_port
from arealite.utils.process import end_families
from arealite.utils.rundir import RunDir
from arealite.utils.startup import LAUNCHED_ENV
from tests import warm_python
from tests.launcher.conftest import diagnosis, find_leftovers, wait_until_gone

RUN = Path("runs/e/t")


@pytest.fixture(autouse=True)
def no_orphans(work):
    yield
    assert find_leftovers(work) == []


COMMAND = ["-m", "arealite.launcher.local", "script.py"]
OUTPUT = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def start(argv: list[str], **env: str) -> warm_python.WarmProcess:
    """Start a launcher by a fork. What it starts is forked, too, so command lines in /proc are those of the server."""
    return warm_python.start([*COMMAND, *argv], env={**os.environ, **env}, cwd=os.getcwd(), **OUTPUT)


def start_new(argv: list[str]) -> subprocess.Popen:
    """Start a launcher in a new interpreter, for tests that find processes by their command lines."""
    return subprocess.Popen([sys.executable, *COMMAND, *argv], text=True, **OUTPUT)


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
    assert "rank 0 of 2" in out and "rank 1 of 2" not in out, "only rank 0 prints to the console"
    assert "2 sglang server(s) ready" in out
    assert "allocation_mode: sglang.d2+d2" in (RUN / "config.yaml").read_text()


def test_the_start_counts_from_the_process_of_a_command_and_from_the_call_of_a_script(work, arguments, monkeypatch):
    jobs = []
    monkeypatch.setattr(local, "run_attempts", lambda job, run: jobs.append(job) or 0)
    monkeypatch.setattr(startup, "_has_launched", False)
    called = time.time()
    launch("script.py", arguments())
    for _ in range(2):
        local.main(["script.py", *arguments()])
    script, command, second = (float(job.rank_env([], "here:1", 1)[LAUNCHED_ENV]) for job in jobs)
    # Commands that run one after the other in a process, as the stages of an example do, do not count each other.
    assert command == startup.process_began() < called <= script <= second


def test_a_server_that_loads_is_named_until_it_answers(work, arguments, monkeypatch, capfd):
    """The server is ready only after the launcher has said several times that it waits for it."""
    lines = []

    def show(line: str) -> None:
        lines.append(line)
        if sum("whose log ends with: the fake server starts" in line for line in lines) == 3:
            (work / "loaded").touch()

    monkeypatch.setenv("FAKE_SERVER", "loads")
    monkeypatch.setattr(activity, "interval_s", 0.0)
    monkeypatch.setattr(activity, "_show", show)
    assert launch("script.py", arguments(mode="sglang.d1+d1")) == 0
    assert lines[0].startswith("… waiting for 1 of 1 servers: server0 at 127.0.0.1:")
    assert "starting 1 sglang server(s): 127.0.0.1:" in capfd.readouterr().out


def test_a_launcher_elsewhere_says_what_it_waits_for_until_rank_0_prints(tmp_path, capsys):
    """As the Ray and Slurm launchers do."""
    output, node_log = LogFollower(tmp_path / "rank0.log"), tmp_path / "node0.log"
    assert output.describe_start("job 7 is PENDING", node_log).startswith("job 7 is PENDING; rank 0 has not started")
    node_log.write_text("a\nstarting 1 sglang server(s)\n")
    assert output.describe_start("job 7 is RUNNING", node_log).endswith(
        "node0.log ends with: starting 1 sglang server(s)"
    )
    output.path.write_text("reading the data\n")
    output.copy()
    assert output.describe_start("job 7 is RUNNING", node_log) == "" and "reading" in capsys.readouterr().out


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_gpu_is_shared_through_mps(work, arguments, dies):
    """A fake daemon: there is no GPU. It ends with the run, and so does its folder. If it dies, the run goes on."""
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
    # The watchdog removes the folder.
    wait_until_gone(work)
    assert not Path(folder).exists()


def test_the_first_failure_ends_everything_and_is_shown(work, arguments):
    process = start(arguments("tokenizer_path=raise", mode="sglang.d1+d2"))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank1 exited with code 1" in out and "  | RuntimeError: rank one has a problem" in out
    kind, verdict = diagnosis(work / RUN)
    assert kind == "run_failed" and "rank1 exited with code 1" in verdict


def test_ranks_start_while_servers_load(work, arguments):
    """The fake server answers only after a rank has run."""
    process = start(arguments("tokenizer_path=load", "rollout.setup_timeout_s=60"), FAKE_SERVER="loads")
    assert process.stdout is not None
    # The launcher must have asked the servers before the ranks end.
    assert any("2 sglang server(s) ready" in line for line in process.stdout)
    (work / "finish").touch()
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0, out


def test_a_server_that_dies_while_starting_shows_its_last_lines(work, arguments):
    process = start(arguments(mode="sglang.d1+d1"), FAKE_SERVER="dies")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a server died while it was starting" in out and "cannot load the model: no such file" in out
    wait_until_gone(work)


def test_a_server_that_measures_free_memory_starts_before_the_ranks_on_its_gpu(work, arguments):
    process = start(arguments(mode="sglang.d1+d1"), FAKE_SERVER="dies", CUDA_VISIBLE_DEVICES="GPU-8932f937")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out
    assert not (RUN / "logs" / "rank0.log").exists()


def test_a_server_that_refuses_its_model_is_started_once(work, arguments):
    recover = ("recover.mode=auto", "recover.retries=2")
    process = start(arguments(*recover, mode="sglang.d1+d1"), FAKE_SERVER="refuses")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert Path("starts").read_text() == "starts\n"
    # The rank may have printed a line before it was ended.
    assert "error: server0 cannot start: \\x1b[31mconfig.json is broken\ufffd\n" in out, out


def test_a_server_that_never_answers_is_an_error_after_the_deadline(work, arguments):
    process = start(arguments("rollout.setup_timeout_s=4", mode="sglang.d1+d1"), FAKE_SERVER="hangs")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "waited 4 s (rollout.setup_timeout_s) for server0 to answer" in out
    assert "the fake server starts" in out


def kill_a_server(work: Path) -> None:
    victim = next(p for p in Path("/proc").iterdir() if p.name.isdigit() and is_server(p, work))
    os.kill(int(victim.name), signal.SIGKILL)


def test_a_killed_server_is_restarted_at_a_new_address(work, arguments):
    process = start_new(arguments("tokenizer_path=wait", mode="sglang.d2+d1"))
    wait_for(work / "up0")
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
    assert len(set(before.values()) & set(after.values())) == 1, "the restarted server has a new address"


def test_every_run_has_a_key_that_no_file_or_command_line_shows(work, arguments):
    process = start_new(arguments("tokenizer_path=wait", mode="sglang.d1+d1"))
    wait_for(work / "up0")
    key_path = RunDir(RUN).key_path
    key = key_path.read_bytes()
    assert len(key) >= 32 and stat.S_IMODE(key_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(key_path.parent.stat().st_mode) == 0o700
    commands = [read(p / "cmdline") for p in Path("/proc").iterdir() if p.name.isdigit()]
    assert not [command for command in commands if key in command]
    # SGLang reads its key from a file of flags. The launcher overwrites what it prints within a moment.
    wanted = {RUN / "private" / "api_key", RUN / "private" / "server_flags.yaml"}
    deadline = time.monotonic() + 30
    while (holders := {path for path in RUN.rglob("*") if path.is_file() and key in path.read_bytes()}) != wanted:
        assert time.monotonic() < deadline, holders
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert key.decode() not in out
    assert "api_key='" + "*" * len(key) in (RUN / "logs" / "server0.log").read_text(), "the server printed it"


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_stopped_watchdog_does_not_keep_the_launcher(work, arguments):
    process = start_new(arguments("tokenizer_path=wait", mode="sglang.d1+d1"))
    wait_for(work / "up0")
    watchdogs = [p for p in Path("/proc").iterdir() if p.name.isdigit() and is_watchdog(p, work)]
    assert len(watchdogs) == 1
    os.kill(int(watchdogs[0].name), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, out
    wait_until_gone(work)


def test_a_watchdog_that_does_not_end_is_killed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("arealite.launcher.supervisor._REAP_TIMEOUT_S", 0.1)
    with Supervisor(0.1) as supervisor:
        supervisor._watchdog, watchdog = subprocess.Popen(["sleep", "600"], **PIPES), supervisor._watchdog
        supervisor.remove_at_end(tmp_path / "file")
        (tmp_path / "file").touch()
        watchdog.communicate(timeout=60)
    assert "the watchdog process does not end: killing it" in capsys.readouterr().out
    assert not (tmp_path / "file").exists()


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0, "start_new_session": True}


def is_watchdog(entry: Path, work: Path) -> bool:
    try:
        return b"launcher.watchdog" in read(entry / "cmdline") and os.readlink(entry / "cwd") == str(work)
    except OSError:
        return False


def test_servers_that_keep_dying_end_the_run(work, arguments):
    process = start_new(arguments("tokenizer_path=wait", "launcher.server_restarts=0", mode="sglang.d1+d1"))
    wait_for(work / "up0")
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


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_signals_end_everything(work, arguments, number):
    argv = arguments("tokenizer_path=wait", "recover.mode=auto", "recover.retries=1")
    process = start(argv)
    wait_for(work / "up0", work / "up1")
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    # Ranks get SIGINT first, and may have ended by themselves.
    assert process.returncode == 128 + number and re.search(rf"ended by {number.name}: ending [2-4] processes", out)
    kind, verdict = diagnosis(work / RUN)
    assert kind == "run_stopped" and f"stopped by {number.name}" in verdict


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("local", signal.SIGTERM),
        pytest.param("torchrun", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("torchrun", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_the_first_signal_lets_ranks_save_and_names_the_command_that_resumes(work, arguments, launcher, number):
    argv = arguments("tokenizer_path=save", "recover.mode=auto", "recover.retries=1", mode="sglang.d1+d2")
    command = [sys.executable, "-m", f"arealite.launcher.{launcher}", "script.py", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(work / "up0", work / "up1")
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, out
    assert f"the newest recover checkpoint is {work / RUN / 'recover' / 'step000003'}" in out
    resume = next(line for line in out.splitlines() if line.startswith("resume with: "))
    expected = [*(a for a in command if a != "recover.mode=auto"), "recover.mode=auto"]
    assert shlex.split(resume.removeprefix("resume with: ")) == expected
    assert "attempt 1" not in out, "ranks are not started again"


def test_ranks_that_never_finish_saving_are_ended(work, arguments):
    process = start(arguments("tokenizer_path=hang", "launcher.save_timeout_s=1", mode="d1"))
    wait_for(work / "up0")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "ranks still run after launcher.save_timeout_s" in out and (work / "asked").exists()


def test_a_second_run_in_the_same_folder_is_refused_and_waits_for_processes_of_a_killed_one(work, arguments):
    first = start(arguments("tokenizer_path=wait", mode="d1"))
    wait_for(work / "up0")
    config = (RUN / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=rf"another run uses {work / RUN} \(process {first.pid} "):
        launch("script.py", arguments("seed=5", mode="d1"))
    assert (RUN / "config.yaml").read_text() == config
    first.kill()
    first.communicate()
    assert launch("script.py", arguments(mode="d1")) == 0


def test_kill_9_of_the_launcher_leaves_nothing(work, arguments):
    process = start(arguments("tokenizer_path=wait"))
    wait_for(work / "up0", work / "up1")
    assert len(find_leftovers(work)) >= 9, "launcher, watchdog, servers, ranks and their children"
    segment = RunDir(work / RUN).shared_weights
    segment.write_text("left by a trainer that was killed")
    process.kill()
    process.communicate()
    wait_until_gone(work)
    assert diagnosis(work / RUN)[0] == "run_killed"
    deadline = time.monotonic() + 10
    while segment.exists():
        assert time.monotonic() < deadline, f"{segment} was left behind"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "mode"),
    [("SIGKILL", "sglang.d1+d1"), ("SIGINT", "d1"), pytest.param("SIGTERM", "d1", marks=pytest.mark.slow)],
)
def test_restart_after_a_rank_was_killed(work, arguments, capfdbinary, number, mode):
    argv = arguments(f"tokenizer_path={number}", "recover.mode=auto", "recover.retries=1", mode=mode)
    assert launch("script.py", argv) == 0
    captured = capfdbinary.readouterr()
    end = "exited with code 130" if number == "SIGINT" else f"was ended by {number}"
    assert end in captured.err.decode()
    assert b"starting again from the recover checkpoint (restart 1 of 1)" in captured.out
    assert "attempt 1" in (RUN / "logs" / "rank0.log").read_text()


def test_a_permanent_error_is_not_retried(work, arguments, capfdbinary):
    argv = arguments("tokenizer_path=refuse", "recover.mode=auto", "recover.retries=3", mode="d2")
    assert launch("script.py", argv) == 2
    # Rank 0 prints the error, or the launcher does if rank 1 ended first.
    output = b"".join(capfdbinary.readouterr())
    assert b"error: no rows" in output and b"starting again" not in output


def test_retries_run_out(work, arguments):
    argv = arguments("tokenizer_path=raise", "recover.mode=auto", "recover.retries=1", mode="d2")
    assert launch("script.py", argv) == 1


TERMINAL_SCRIPT = """
import os
print("noise")
os.write(int(os.environ["AREALITE_TTY_FD"]), b"table")
"""


TABLE_SCRIPT = """
from arealite.utils.console import ProgressTable
with ProgressTable(2) as table:
    table.update(1, {"reward": 0.75})
print("noise")
"""


@pytest.mark.parametrize(
    ("script", "expected"), [(TERMINAL_SCRIPT, "table"), pytest.param(TABLE_SCRIPT, "0.750", marks=pytest.mark.slow)]
)
def test_rank_0_draws_on_the_terminal_of_the_launcher(work, script, expected):
    (work / "script.py").write_text(script)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "arealite.launcher.local", "script.py", "allocation_mode=d1"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    # A pseudo-terminal reports its end as an OSError.
    with contextlib.suppress(OSError):
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    assert process.wait(60) == 0, shown.decode()
    assert expected in shown.decode() and "noise" in shown.decode()
    log = Path("runs/run/trial/logs/rank0.log").read_text()
    assert log.endswith("noise\n") and "\x1b" not in log, "the live table is not in the log"


def test_output_without_a_last_line_end_gets_one(tmp_path, capfd):
    """A progress bar: an error, or the output of the next attempt, begins a line of its own."""
    log = tmp_path / "a.log"
    for text in ("50%|", "all of it\n", "50%|"):
        with Supervisor(1) as supervisor:
            child = supervisor.start(ChildSpec("a", [sys.executable, "-c", f"print({text!r}, end='')"], log, echo=True))
            while child.code is None:
                supervisor.wait(5)
    assert log.read_text() == capfd.readouterr().out == "50%|\nall of it\n50%|\n"


def test_a_full_disk_loses_log_lines_and_not_the_run(capfdbinary):
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


def test_a_program_or_log_that_cannot_be_opened_is_one_message(work, arguments, capfd):
    assert launch("script.py", arguments("sglang.command=/no/such/program")) == 1
    error = capfd.readouterr().err
    assert "error: cannot start server0: " in error and "/no/such/program" in error
    log = RUN / "logs" / "server0.log"
    log.unlink()
    log.mkdir()
    assert launch("script.py", arguments()) == 1
    assert "error: cannot start server0: [Errno 21] Is a directory" in capfd.readouterr().err


def test_a_dashboard_beside_the_run_ends_with_it(work, arguments):
    process = start(arguments("tokenizer_path=until", "dashboard=0"))
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("dashboard: "))
    address, _, token = line.split()[1].partition("?token=")
    request = urllib.request.Request(f"{address}api/runs", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        (run,) = json.load(response)["runs"]
    assert run["path"] == str(work / RUN) and run["live"]
    wait_for(Path("up0"))
    Path("finish").touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "dashboard" not in output, "it ends without a word"


def test_a_run_goes_on_without_its_dashboard(work, arguments):
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(arguments("tokenizer_path=until", f"dashboard={taken.getsockname()[1]}"))
        assert process.stdout is not None
        next(line for line in process.stdout if "the run goes on without its dashboard" in line)
        Path("finish").touch()
        assert process.wait(60) == 0
        process.stdout.close()
