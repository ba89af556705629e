"""The Slurm launcher on a real Slurm of four nodes on this machine."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arealite.api.errors import AllocationError, ConfigError
from arealite.launcher import slurm
from arealite.launcher.slurm import launch
from tests.launcher.conftest import diagnosis, wait_until_gone
from tests.launcher.slurm_cluster import SlurmCluster

# Slow tests run beside these.
pytestmark = pytest.mark.timeout(300)

RUN = Path("runs/e/t")


def start(slurm_cluster: SlurmCluster, argv: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "arealite.launcher.slurm", "script.py", *argv],
        env={**os.environ, **slurm_cluster.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def on_cpu(arguments, *more: str, mode: str) -> list[str]:
    return arguments("server.device=cpu", "actor.device=cpu", *more, mode=mode)


def wait_for(condition, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def test_the_batch_script_can_be_read(work, arguments, capsys):
    argv = arguments(
        "cluster.n_nodes=16",
        "cluster.n_gpus_per_node=8",
        "train_dataset.batch_size=32",
        "recover.mode=auto",
        "launcher.slurm={partition: gpu, time: '24:00:00', container_image: nvcr.io/x, wrap: nice}",
        mode="sglang.d96p1t1+d32p1t1",
    )
    assert launch("script.py", argv, dry_run=True) == 0
    out = capsys.readouterr().out
    for line in (
        "--nodes=16",
        "--gres=gpu:8",
        "--partition=gpu",
        "--time=24:00:00",
        "--requeue",
        "--ntasks-per-node=1",
    ):
        assert f"#SBATCH {line}\n" in out
    assert "srun --kill-on-bad-exit=1 --label --container-image=nvcr.io/x nice " in out
    assert "server 95: node 11 gpu 7" in out and "rank 31: node 15 gpu 7" in out
    assert not Path("runs").exists()


def test_values_with_spaces_are_quoted_in_the_batch_script(work, arguments, capsys):
    argv = arguments("cluster.fileroot=my  runs", 'launcher.slurm.comment=a "b" \\ c\'s')
    assert launch("script.py", argv, dry_run=True) == 0
    out = capsys.readouterr().out
    assert f'#SBATCH "--output={work}/my  runs/e/t/logs/slurm-%j.log"\n' in out
    assert f"arealite.launcher.node '{work}/my  runs/e/t/job.json'\n" in out
    assert '#SBATCH "--comment=a \\"b\\" \\\\ c\'s"\n' in out


def test_a_job_that_cannot_resume_is_not_requeued(work, arguments, capsys):
    """It would start again from nothing and replace its results."""
    assert launch("script.py", arguments(), dry_run=True) == 0
    assert "#SBATCH --no-requeue\n" in capsys.readouterr().out
    assert launch("script.py", arguments("launcher.slurm.requeue=true"), dry_run=True) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --requeue\n" in out and "no-requeue" not in out


def test_sbatch_expands_nothing_in_the_path_of_the_run(work, arguments, capsys):
    assert launch("script.py", arguments("cluster.fileroot=at 50%j"), dry_run=True) == 0
    out = capsys.readouterr().out
    assert f'#SBATCH "--output={work}/at 50%%j/e/t/logs/slurm-%j.log"\n' in out
    assert f"arealite.launcher.node '{work}/at 50%j/e/t/job.json'\n" in out


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("array=0-3", "start each with its own trial_name"),
        ("nodes=2", "set cluster.n_nodes"),
        ("ntasks=8", "set allocation_mode"),
        ("ntasks-per-node=8", "set allocation_mode"),
    ],
)
def test_flags_that_contradict_the_placement_are_refused(work, arguments, flag, reason):
    with pytest.raises(ConfigError, match=f"launcher.slurm.{flag} .*{reason}"):
        launch("script.py", arguments(f"launcher.slurm.{flag}"))
    assert not Path("runs").exists()


def test_a_plan_that_does_not_fit_is_refused(work, arguments):
    argv = arguments("cluster.n_nodes=2", "cluster.n_gpus_per_node=4", mode="sglang.d12p1t1+d4p1t1")
    with pytest.raises(AllocationError, match=r"needs 16 devices .* but there are 8 \(2 node\(s\): 4 \+ 4\)"):
        launch("script.py", argv)


@pytest.fixture
def clients(work, monkeypatch):
    """Fake commands of Slurm: each `scontrol` runs the next line of the file `answers`, in the end always the last."""
    (work / "bin").mkdir()
    scripts = {
        "sbatch": "echo 7",
        "scancel": "echo cancelled >> cancelled",
        "scontrol": "n=$(cat asked 2>/dev/null || echo 1); echo $((n + 1)) > asked\n"
        'eval "$({ sed -n "${n}p" answers; tail -1 answers; } | head -1)"',
    }  # fmt: skip
    for name, text in scripts.items():
        (work / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (work / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{work / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_POLL_INTERVAL_S", 0.01)
    return work


def test_a_run_whose_job_is_still_queued_is_not_started_again(clients, arguments):
    """It would move the results away that the queued job is going to continue, and replace its configuration."""
    argv = on_cpu(arguments, mode="sglang.d2+d2")
    (clients / "answers").write_text("echo JobState=COMPLETED")
    assert launch("script.py", argv) == 0
    config = (clients / RUN / "job.json").read_text()
    shown = f"Command={clients / RUN}/slurm.sh"
    (clients / "answers").write_text(f"echo JobState=PENDING {shown}")
    with pytest.raises(ConfigError, match=r"Slurm job 7 of .*/runs/e/t is PENDING: .*scancel 7"):
        launch("script.py", argv)
    assert (clients / RUN / "job.json").read_text() == config
    for end in (f"JobState=CANCELLED {shown}", "JobState=RUNNING Command=of/another"):
        (clients / "asked").unlink()
        (clients / "answers").write_text(f"echo {end}\necho JobState=COMPLETED")
        assert launch("script.py", argv) == 0
    (clients / "asked").unlink()
    (clients / "answers").write_text(f"{FORGOTTEN}\necho JobState=COMPLETED")
    assert launch("script.py", argv) == 0


def test_a_job_that_is_submitted_again_meets_no_names_of_a_requeued_one(clients, arguments):
    """The requeued start has the number of the next attempt, and its names say that it has failed."""
    requeued = 'mkdir -p runs/e/t/names/$(grep -o \'"id": "[0-9a-f]*\' runs/e/t/job.json | tail -c 13)-1'
    listed = "ls runs/e/t/names >> seen"
    lines = [f"{requeued}; {listed}; echo JobState=FAILED ExitCode=1:0", f"{listed}; echo JobState=COMPLETED"]
    (clients / "answers").write_text("\n".join([*lines, ""]))
    argv = on_cpu(arguments, "recover.mode=auto", "recover.retries=1", mode="sglang.d2+d2")
    assert launch("script.py", argv) == 0
    assert re.fullmatch(r"[0-9a-f]{12}-1\n", (clients / "seen").read_text())


AWAY = "echo 'Unable to contact slurm controller' >&2; exit 1"
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


def test_a_job_goes_on_while_the_controller_is_away(clients, arguments, capsys):
    """The job's names, without which its nodes end, are kept meanwhile."""
    kept = "ls runs/e/t/names >> seen"
    running = f"mkdir -p runs/e/t/names/x; {kept}; echo JobState=RUNNING ExitCode=0:0"
    lines = [running, f"{kept}; {AWAY}", f"{kept}; {AWAY}", running, "echo JobState=COMPLETED"]
    (clients / "answers").write_text("\n".join(lines))
    assert launch("script.py", on_cpu(arguments, mode="sglang.d2+d2")) == 0
    captured = capsys.readouterr()
    assert "Slurm job 7: COMPLETED" in captured.out
    assert captured.err.count("Slurm job 7 goes on") == 1, "one warning"
    assert (clients / "seen").read_text().split() == ["x"] * 4
    assert not (clients / "cancelled").exists()


def test_a_controller_that_stays_away_is_an_error(clients, arguments, monkeypatch):
    monkeypatch.setattr(slurm, "_CONTROLLER_TIMEOUT_S", 0.0)
    (clients / "answers").write_text(AWAY)
    with pytest.raises(slurm.SlurmError, match=r"the state of Slurm job 7 was unknown .*Unable to contact"):
        launch("script.py", on_cpu(arguments, mode="sglang.d2+d2"))
    assert (clients / "cancelled").exists()


def test_a_job_that_slurm_has_forgotten_is_not_waited_for(clients, arguments):
    """The launcher was suspended for longer than Slurm keeps jobs that have ended."""
    (clients / "answers").write_text(f"echo JobState=RUNNING\n{FORGOTTEN}")
    with pytest.raises(slurm.SlurmError, match="no longer knows job 7"):
        launch("script.py", on_cpu(arguments, mode="sglang.d2+d2"))
    assert not (clients / "cancelled").exists()


def test_the_log_of_a_failed_job_is_shown_where_the_user_put_it(clients, arguments, capsys):
    (clients / "answers").write_text("echo the node is on fire > log-7.txt; echo JobState=FAILED ExitCode=1:0\n")
    argv = on_cpu(arguments, "launcher.slurm.output=log-%j.txt", mode="sglang.d2+d2")
    assert launch("script.py", argv) == 1
    shown = capsys.readouterr().err
    assert f"the last lines of {clients}/log-7.txt:\n  | the node is on fire" in shown


@pytest.mark.parametrize("state", ["NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"])
def test_every_final_state_ends_the_wait(clients, arguments, state):
    end = f"echo JobState={state} ExitCode=0:0"
    (clients / "answers").write_text(f"echo JobState=RUNNING\n{end}\necho JobState=COMPLETED")
    assert launch("script.py", on_cpu(arguments, mode="sglang.d2+d2")) == 1


@pytest.mark.slurm
def test_a_job_outlives_a_restart_of_the_controller(work, arguments, slurm_cluster):
    argv = on_cpu(arguments, "cluster.n_gpus_per_node=2", "tokenizer_path=until", mode="sglang.d1+d1")
    process = start(slurm_cluster, argv)
    wait_for((work / "up0").exists)
    with slurm_cluster.without_controller():
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any("goes on, asking again" in line for line in lines)
    (work / "finish").touch()
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and "COMPLETED" in out, out
    wait_until_gone(work, 30)


@pytest.mark.slurm
def test_a_job_over_four_nodes(work, arguments, slurm_cluster):
    # Three nodes generate, one trains.
    sizes, spaces = ("cluster.n_nodes=4", "cluster.n_gpus_per_node=2"), "cluster.fileroot=my runs"
    comment = 'launcher.slurm.comment=a "b" \\ c\'s'
    argv = on_cpu(arguments, *sizes, spaces, comment, mode="sglang.d6p1t1+d2p1t1")
    process = start(slurm_cluster, argv)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert "rank 0 of 2" in out and "COMPLETED" in out
    (addresses,) = re.findall(r"rank 0 of 2 servers (\S+)", out)
    assert len(set(addresses.split(","))) == 6
    shown = slurm_cluster.client("scontrol", "show", "job", re.findall(r"Slurm job (\d+)", out)[0])
    assert 'Comment=a "b" \\ c\'s' in shown and "/my runs/e/t/logs/slurm-" in shown
    wait_until_gone(work, 30)


@pytest.mark.slurm
def test_a_failing_rank_fails_the_job_and_is_shown(work, arguments, slurm_cluster):
    argv = on_cpu(
        arguments, "cluster.n_nodes=2", "cluster.n_gpus_per_node=2", "tokenizer_path=raise", mode="sglang.d2+d2"
    )
    process = start(slurm_cluster, argv)
    out, _ = process.communicate(timeout=240)
    assert process.returncode not in (0, None)
    assert "FAILED" in out and "rank one has a problem" in out
    wait_until_gone(work, 30)


def cancel(work, arguments, slurm_cluster, does, how) -> tuple[int, str]:
    """Run ranks that do as told, cancel the job once both are up, and return exit code and output of the launcher."""
    argv = on_cpu(
        arguments, "cluster.n_nodes=2", "cluster.n_gpus_per_node=2", f"tokenizer_path={does}", mode="sglang.d2+d2"
    )
    process = start(slurm_cluster, argv)
    wait_for(lambda: (work / "up0").exists() and (work / "up1").exists())
    if how == "ctrl-c":
        process.send_signal(signal.SIGINT)
    else:
        slurm_cluster.client("scancel", "--user=root")
    out, _ = process.communicate(timeout=240)
    return process.returncode, out


@pytest.mark.slurm
@pytest.mark.parametrize("how", ["ctrl-c", "scancel"])
def test_cancelling_leaves_nothing(work, arguments, slurm_cluster, how):
    code, out = cancel(work, arguments, slurm_cluster, "wait", how)
    assert code == (130 if how == "ctrl-c" else 143), out
    assert ("stopping: a checkpoint is saved" if how == "ctrl-c" else "CANCELLED") in out
    wait_until_gone(work, 30)


@pytest.mark.slurm
@pytest.mark.parametrize("how", ["ctrl-c", "scancel"])
def test_a_cancelled_job_saves_a_checkpoint_and_names_the_command_that_resumes(work, arguments, slurm_cluster, how):
    _, out = cancel(work, arguments, slurm_cluster, "save", how)
    kind, verdict = diagnosis(work / RUN)
    assert kind == "run_stopped" and ("SIGINT" if how == "ctrl-c" else "SIGTERM") in verdict
    assert (work / "runs/e/t/recover/step000003").exists(), out
    assert "resume with: " in out and "-m arealite.launcher.slurm script.py" in out and "recover.mode=auto" in out
    wait_until_gone(work, 30)


@pytest.mark.slurm
def test_a_requeued_job_goes_on(work, arguments, slurm_cluster):
    sizes = ("cluster.n_nodes=2", "cluster.n_gpus_per_node=2")
    argv = on_cpu(arguments, *sizes, "tokenizer_path=requeue", "recover.mode=auto", mode="sglang.d2+d2")
    process = start(slurm_cluster, argv)
    wait_for(lambda: (work / "up0").exists())
    job_id = slurm_cluster.client("squeue", "-h", "-o", "%i").strip()
    slurm_cluster.client("scontrol", "requeue", job_id)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert "attempt 0" in out and "attempt 1" in out and "COMPLETED" in out
    wait_until_gone(work, 30)


@pytest.mark.slurm
def test_a_failed_job_is_submitted_again(work, arguments, slurm_cluster):
    argv = on_cpu(
        arguments,
        "tokenizer_path=SIGKILL",
        "recover.mode=auto",
        "recover.retries=1",
        "cluster.n_gpus_per_node=2",
        mode="sglang.d1+d1",
    )
    process = start(slurm_cluster, argv)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert "FAILED" in out and "attempt 1" in out and "COMPLETED" in out
    wait_until_gone(work, 30)
