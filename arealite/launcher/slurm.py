"""Runs a job on a Slurm cluster.

    python -m arealite.launcher.slurm SCRIPT.py --config FILE.yaml cluster.n_nodes=4 key=value… [--dry-run]

Writes a batch script (slurm.sh in the run directory), submits it, and shows rank 0's output until the job ends. Ctrl+C
saves a checkpoint and ends the job, a second one cancels it at once. One task per node runs `arealite.launcher.node`. A
requeued or preempted job resumes with `recover.mode=auto`, and ends without; a failed one is submitted again up to
`recover.retries` times. Flags of sbatch pass through `launcher.slurm` (`launcher.slurm.partition=gpu`).
`--dry-run` prints the batch script.
"""

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

from arealite.api.config_field import check_text
from arealite.api.errors import AReaLiteError, ConfigError
from arealite.launcher.checks import check_job
from arealite.launcher.job import Job, LogFollower, StopEvent
from arealite.launcher.launch_config import read_launch_config
from arealite.launcher.local import command_line, run_attempts, show_plan
from arealite.launcher.supervisor import INTERRUPTED
from arealite.utils.activity import activity
from arealite.utils.config import run_main
from arealite.utils.process import tail
from arealite.utils.rundir import write_file

_CLIENT_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 1.0
# The job goes on while Slurm's controller restarts.
_CONTROLLER_TIMEOUT_S = 600.0
_FAILED = {"FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "NODE_FAIL"}
# What `scontrol` says of a job that ended more than MinJobAge ago (by default five minutes).
_UNKNOWN_JOB = "Invalid job id"
_ENDED = {"COMPLETED", "CANCELLED", "PREEMPTED", "REVOKED", *_FAILED}
# Flags of sbatch that would contradict the placement of a job, and what to do instead.
_REFUSED_FLAGS = {
    "array": "it would start the run several times in one run directory: start each with its own trial_name",
    "nodes": "the launcher sets the number of nodes: set cluster.n_nodes",
    "ntasks": "the launcher starts one task on each node, and that the ranks: set allocation_mode",
    "ntasks_per_node": "the launcher starts one task on each node, and that the ranks: set allocation_mode",
}


class SlurmError(AReaLiteError):
    """A Slurm command failed, or its controller did not answer."""


def launch(script: str | Path, argv: list[str], dry_run: bool = False) -> int:
    """Submit `script` as a Slurm job and wait for its end; returns the exit code."""
    config = read_launch_config(str(script), argv)
    job = Job.on_cluster(config, script, argv)
    _check_flags(config.launcher.slurm)
    if dry_run:
        more = f"\n\n{job.run_dir.path / 'slurm.sh'}:\n{batch_script(job)}"
        return show_plan(job, servers_run_here=False, more=more)
    check_job(job, servers_run_here=False)
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no `sbatch` here: run this on a login node of a Slurm cluster")
    _check_earlier_job(job)
    return run_attempts(job, _submit)


def _check_flags(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        reason = _REFUSED_FLAGS.get(key.replace("-", "_"))
        if reason is not None and value is not None and value is not False:
            raise ConfigError(f"launcher.slurm.{key}={value} cannot be used: {reason}")


def _check_earlier_job(job: Job) -> None:
    """Raise if an earlier job of this run has not ended. One that is queued holds no lock."""
    path = _job_id_path(job)
    if not path.exists():
        return
    job_id = path.read_text().strip()
    try:
        shown = _client("scontrol", "show", "job", "--oneliner", job_id)
    except SlurmError as error:
        if _UNKNOWN_JOB in str(error):
            return
        raise
    state = _read_state(shown)[0]
    # After a reset of the cluster the number may be that of another job.
    if str(job.run_dir.path) in shown and state not in _ENDED:
        raise ConfigError(
            f"Slurm job {job_id} of {job.run_dir.path} is {state}: wait for its end, stop it (scancel {job_id}), "
            "or use another trial_name"
        )


def _job_id_path(job: Job) -> Path:
    return job.run_dir.path / "slurm.id"


def _submit(job: Job) -> int:
    path = job.run_dir.path / "slurm.sh"
    path.write_text(batch_script(job))
    job_id = _client("sbatch", "--parsable", str(path)).split(";")[0]
    write_file(_job_id_path(job), job_id, private=False)
    print(f"Slurm job {job_id}", flush=True)
    job.announce()
    return _wait_for_end(job, job_id)


def batch_script(job: Job) -> str:
    """Return the script for sbatch."""
    config, given = job.config, dict(job.config.launcher.slurm)
    flags: dict[str, Any] = {
        "job_name": f"{config.experiment_name}-{config.trial_name}",
        "nodes": len(job.devices),
        "ntasks_per_node": 1,
        # sbatch replaces %j, and any other letter after a %, also in the names of folders.
        "output": f"{str(job.run_dir.logs).replace('%', '%%')}/slurm-%j.log",
        "open_mode": "append",
    }
    if "requeue" not in given:
        # Started again from nothing, a run would replace its own results, also the checkpoint that it has just saved.
        flags["no_requeue" if config.recover.mode == "disabled" else "requeue"] = True
    if job.on_gpu:
        flags["gres"] = f"gpu:{len(job.devices[0])}"
    wrapper = given.pop("wrap", "")
    containers = {key: given.pop(key) for key in list(given) if key.startswith("container")}
    flags |= given
    node = [sys.executable, "-m", "arealite.launcher.node", str(job.path)]
    srun = ["srun", "--kill-on-bad-exit=1", "--label", *_flags(containers)]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {_quote(flag)}" for flag in _flags(flags)]
    lines += [
        "",
        "# One task per node starts that node's servers and trainer ranks, and ends with them.",
        "# scancel, preemption and requeueing leave no process behind.",
        "set -u",
        f"cd {shlex.quote(str(Path.cwd()))}",
        " ".join(filter(None, [shlex.join(srun), wrapper, shlex.join(node)])),
    ]
    return "\n".join(lines) + "\n"


def _flags(values: Mapping[str, Any]) -> list[str]:
    names = {f"--{key.replace('_', '-')}": value for key, value in values.items()}
    return [
        name if value is True else f"{name}={value}"
        for name, value in names.items()
        if value is not None and value is not False
    ]


def _quote(flag: str) -> str:
    """Quote a flag as sbatch reads it: between double quotes a backslash escapes."""
    check_text("a flag of sbatch", flag)
    if shlex.quote(flag) == flag:
        return flag
    escaped = flag.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def _wait_for_end(job: Job, job_id: str) -> int:
    """Show rank 0's output until the job has ended or a signal cancels it. Returns the exit code."""
    output = LogFollower(job.run_dir.logs / "rank0.log")
    silent_since, state, is_stopping = None, "PENDING", False
    log = _log_path(job, job_id)
    waiting = activity.doing(lambda: output.describe_start(f"Slurm job {job_id} is {state}", log))
    with StopEvent() as stop, waiting:
        while True:
            activity.tick()
            stop.wait(_POLL_INTERVAL_S)
            if is_stopping:
                # The event is set: wait by the clock.
                time.sleep(_POLL_INTERVAL_S)
            output.copy()
            if stop.count == 1 and state == "RUNNING" and not is_stopping:
                is_stopping = True
                job.ask_to_stop(stop.number)
            elif stop.is_set() and not (is_stopping and stop.count == 1):
                print(f"cancelling Slurm job {job_id}", file=sys.stderr, flush=True)
                _client("scancel", "--full", job_id)
                return 128 + stop.number
            try:
                state, code = _state(job_id)
            except SlurmError as error:
                silent_since = _tolerate_silence(error, job_id, silent_since)
                continue
            silent_since = None
            if state in _ENDED:
                output.copy()
                if is_stopping and state == "FAILED" and code in INTERRUPTED:
                    print(f"Slurm job {job_id} has ended", flush=True)
                    return 128 + stop.number
                return _report(job, job_id, state, code)


def _tolerate_silence(error: SlurmError, job_id: str, since: float | None) -> float:
    """Warn that the state is unknown; raise after a long time. Returns when the silence began."""
    if _UNKNOWN_JOB in str(error):
        raise SlurmError(
            f"Slurm no longer knows job {job_id}: it ended while this launcher did not ask, so its exit code is not "
            "known; see its logs in the run directory"
        ) from error
    if since is None:
        print(f"warning: {error}\nSlurm job {job_id} goes on, asking again", file=sys.stderr, flush=True)
        return time.monotonic()
    if time.monotonic() - since < _CONTROLLER_TIMEOUT_S:
        return since
    with contextlib.suppress(SlurmError):
        _client("scancel", "--full", job_id)
    raise SlurmError(
        f"the state of Slurm job {job_id} was unknown for {_CONTROLLER_TIMEOUT_S / 60:.0f} minutes, so it was "
        f"cancelled (if `squeue -j {job_id}` still shows it: `scancel {job_id}`). The last error: {error}"
    ) from error


def _log_path(job: Job, job_id: str) -> Path:
    """Return the log of the batch script; `launcher.slurm.output` may have set another."""
    given = job.config.launcher.slurm.get("output")
    return Path(job.cwd, str(given).replace("%j", job_id)) if given else job.run_dir.logs / f"slurm-{job_id}.log"


def _report(job: Job, job_id: str, state: str, code: int) -> int:
    print(f"Slurm job {job_id}: {state}", flush=True)
    if state == "COMPLETED":
        return 0
    log = _log_path(job, job_id)
    lines = (f"  | {line}" for line in tail(log, 30).splitlines())
    print(f"the last lines of {log}:", *lines, sep="\n", file=sys.stderr)
    return 128 + signal.SIGTERM if state == "CANCELLED" else code or 1


def _state(job_id: str) -> tuple[str, int]:
    """Ask the controller for (state, exit code) of the job."""
    return _read_state(_client("scontrol", "show", "job", "--oneliner", job_id))


def _read_state(shown: str) -> tuple[str, int]:
    fields = dict(part.split("=", 1) for part in shown.split() if "=" in part)
    return fields.get("JobState", "UNKNOWN"), int(fields.get("ExitCode", "0:0").split(":")[0])


def _client(*command: str) -> str:
    """Run a Slurm command; raises `SlurmError` if it fails or does not answer in time."""
    try:
        result = subprocess.run(command, text=True, capture_output=True, timeout=_CLIENT_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"`{shlex.join(command)}` did not answer within {_CLIENT_TIMEOUT_S:.0f} s: is slurmctld running?"
        ) from error
    if result.returncode != 0:
        raise SlurmError(f"`{shlex.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout.strip()


main = command_line("slurm", launch, __doc__)

if __name__ == "__main__":
    run_main(main)
