"""On a Slurm cluster: `python -m arealite.launcher.slurm script.py --config file.yaml cluster.n_nodes=4 … [--dry-run]`.

Writes a batch script one can read (slurm.sh in the run directory), submits it, and follows rank 0's output until the job ends; Ctrl+C cancels the
job. One task per node runs `arealite.launcher.node`. A requeued or preempted job runs the same script again and, with `recover.mode=auto`, resumes; one that
failed is submitted again (`recover.retries`).
Flags of sbatch pass through `launcher.slurm` (`launcher.slurm.partition=gpu`).
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arealite.api.errors import AReaLiteError, ConfigError
from arealite.launcher.job import Follower, Job, Stop
from arealite.launcher.launch_config import read_launch_config
from arealite.launcher.local import command_line, run_attempts
from arealite.utils.config import run_main
from arealite.utils.process import tail

_CLIENT_TIMEOUT_S = 60.0
_LOOK_INTERVAL_S = 1.0
# A controller that restarts is away for a while; the job runs on without it.
_SILENCE_S = 600.0
_FAILED = {"FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "NODE_FAIL"}
_ENDED = {"COMPLETED", "CANCELLED", "PREEMPTED", "REVOKED", *_FAILED}
# Keys of launcher.slurm that are not sbatch's.
_OURS = ("wrap",)


class NoAnswer(AReaLiteError):
    """A Slurm command failed, or its controller did not answer."""


def launch(script: str | Path, argv: list[str], dry_run: bool = False) -> int:
    """Submit `script` as a Slurm job and wait for its end; returns the exit code."""
    config = read_launch_config(str(script), argv)
    job = Job.on_cluster(config, script, argv)
    if dry_run:
        print(f"{job.describe()}\n\n{job.run_dir.path / 'slurm.sh'}:\n{batch_script(job)}")
        return 0
    job.placement()
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no `sbatch` here: run this on a login node of a Slurm cluster")
    try:
        return run_attempts(job, _submit)
    finally:
        for folder in job.run_dir.names.glob(f"{job.id}-*"):  # of every requeueing
            shutil.rmtree(folder, ignore_errors=True)


def _submit(job: Job) -> int:
    path = job.run_dir.path / "slurm.sh"
    path.write_text(batch_script(job))
    job_id = _client("sbatch", "--parsable", str(path)).split(";")[0]
    print(f"Slurm job {job_id}, run directory {job.run_dir.path}", flush=True)
    return _follow(job, job_id)


def batch_script(job: Job) -> str:
    """The script that sbatch gets."""
    config, given = job.config, dict(job.config.launcher.slurm)
    flags: dict[str, Any] = {
        "job_name": f"{config.experiment_name}-{config.trial_name}",
        "nodes": len(job.devices),
        "ntasks_per_node": 1,
        "output": f"{job.run_dir.logs}/slurm-%j.log",
        "open_mode": "append",
        "requeue": True,
    }
    if job.on_gpu:
        flags["gres"] = f"gpu:{len(job.devices[0])}"
    flags |= {k: v for k, v in given.items() if k not in _OURS and not k.startswith("container")}
    containers = {k: v for k, v in given.items() if k.startswith("container")}
    node = [sys.executable, "-m", "arealite.launcher.node", str(job.path)]
    srun = ["srun", "--kill-on-bad-exit=1", "--label", *_flags(containers)]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {_quote(flag)}" for flag in _flags(flags)]
    lines += [
        "",
        "# One task per node: it starts that node's servers and trainer ranks and ends with them.",
        "# Ends are passed on: scancel, preemption and requeueing leave no process behind.",
        "set -u",
        f"cd {shlex.quote(str(Path.cwd()))}",
        " ".join([shlex.join(srun), given.get("wrap", ""), shlex.join(node)]).replace("  ", " "),
    ]
    return "\n".join(lines) + "\n"


def _flags(values: Mapping[str, Any]) -> list[str]:
    shown = []
    for key, value in values.items():
        name = "--" + key.replace("_", "-")
        if value is True:
            shown.append(name)
        elif value is not False and value is not None:
            shown.append(f"{name}={value}")
    return shown


def _quote(flag: str) -> str:
    """As sbatch reads it: in its quotes, unlike in a shell's single ones, a backslash escapes."""
    if shlex.quote(flag) == flag:
        return flag
    escaped = flag.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


# ---------------------------------------------------------------------------------------------- following


def _follow(job: Job, job_id: str) -> int:
    """Copy rank 0's output to the console until the job has ended; a signal cancels the job."""
    shown = Follower(job.run_dir.logs / "rank0.log")
    silent_since = None
    with Stop() as stop:
        while True:
            stop.wait(_LOOK_INTERVAL_S)
            shown.copy()
            if stop.is_set():
                print(f"cancelling Slurm job {job_id}", file=sys.stderr, flush=True)
                _client("scancel", "--full", job_id)
                return 128 + stop.number
            try:
                state, code = _state(job_id)
            except NoAnswer as error:
                silent_since = _bear(error, job_id, silent_since)
                continue
            silent_since = None
            if state in _ENDED:
                shown.copy()
                return _report(job, job_id, state, code)


def _bear(error: NoAnswer, job_id: str, since: float | None) -> float:
    """Nothing is known of the job: most likely it runs, and only a long silence ends it. Returns since when there is silence."""
    if since is None:
        print(f"warning: {error}\nSlurm job {job_id} goes on, asking again", file=sys.stderr, flush=True)  # fmt: skip
        return time.monotonic()
    if time.monotonic() - since < _SILENCE_S:
        return since
    with contextlib.suppress(NoAnswer):
        _client("scancel", "--full", job_id)
    raise NoAnswer(
        f"nothing was heard of Slurm job {job_id} for {_SILENCE_S / 60:.0f} minutes; it was told to end (if `squeue -j {job_id}` still "
        f"shows it: `scancel {job_id}`). The last answer: {error}"
    ) from error


def _report(job: Job, job_id: str, state: str, code: int) -> int:
    print(f"Slurm job {job_id}: {state}", flush=True)
    if state == "COMPLETED":
        return 0
    log = job.run_dir.logs / f"slurm-{job_id}.log"
    lines = (f"  | {line}" for line in tail(log, 30).splitlines())
    print(f"the last lines of {log}:", *lines, sep="\n", file=sys.stderr)
    return 128 + signal.SIGTERM if state == "CANCELLED" else code or 1


def _state(job_id: str) -> tuple[str, int]:
    """(state, exit code) as the controller tells it."""
    answer = _client("scontrol", "show", "job", "--oneliner", job_id)
    fields = dict(part.split("=", 1) for part in answer.split() if "=" in part)
    return fields.get("JobState", "UNKNOWN"), int(fields.get("ExitCode", "0:0").split(":")[0])


def _client(*command: str) -> str:
    """Run a Slurm command; a controller that does not answer is an error, not an endless wait."""
    try:
        result = subprocess.run(command, text=True, capture_output=True, timeout=_CLIENT_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(
            f"`{shlex.join(command)}` did not answer within {_CLIENT_TIMEOUT_S:.0f} s: is slurmctld running?"
        ) from error
    if result.returncode != 0:
        raise NoAnswer(f"`{shlex.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout.strip()


if __name__ == "__main__":
    run_main(command_line("slurm", launch, __doc__))
