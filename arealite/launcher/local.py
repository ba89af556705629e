"""Runs a job on this machine.

    python -m arealite.launcher.local SCRIPT.py --config FILE.yaml key=value… [--dry-run]

Starts the inference servers that `allocation_mode` names and the trainer ranks, which load their model meanwhile, and
watches both. The first failure ends everything; with `recover.retries` the job starts again from the recover
checkpoint. No process outlives the launcher.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.launcher.checks import check_job, rehearse_job
from arealite.launcher.job import Job, name_checkpoint
from arealite.launcher.launch_config import read_launch_config
from arealite.launcher.memory import NO_ROOM, describe_memory
from arealite.launcher.node import run_node
from arealite.launcher.output import lasting_output
from arealite.launcher.placement import local_slots
from arealite.launcher.supervisor import INTERRUPTED
from arealite.utils.config import COLLAPSED, REFUSED, run_main
from arealite.utils.startup import launch_began


def launch(script: str | Path, argv: list[str], dry_run: bool = False, began: float | None = None) -> int:
    """Run `script` (a file, or the dotted name of a module) with its servers; returns the exit code.

    `began`: from when on the time until the first update counts (`time.time()`); by default from this call.
    """
    began = time.time() if began is None else began
    config = read_launch_config(str(script), argv)
    if (config.cluster.n_nodes or 1) > 1:
        raise ConfigError(
            f"cluster.n_nodes={config.cluster.n_nodes}, but the local launcher runs on one machine: use "
            "arealite.launcher.ray or arealite.launcher.slurm, or set cluster.n_nodes=1"
        )
    job = Job(config, str(script), argv, *local_slots(config), began=began)
    if dry_run:
        return show_plan(job, servers_run_here=True)
    check_job(job, servers_run_here=True)
    job.announce()
    return run_attempts(job, lambda attempt: run_node(attempt, node=0))


def show_plan(job: Job, servers_run_here: bool, more: str = "") -> int:
    """Print what a job would start and how much memory it needs; run the same checks as a real start."""
    print(job.describe() + more, flush=True)
    check_job(job, servers_run_here)
    memory = describe_memory(job, runs_here=servers_run_here)
    print(memory, flush=True)
    rehearse_job(job)
    end = "the memory will not suffice (see above)" if NO_ROOM in memory else "no error was found"
    print(f"dry run: nothing was started, and {end}", flush=True)
    return 0


@lasting_output()
def run_attempts(job: Job, run: Callable[[Job], int]) -> int:
    """Run a job, again after a failure that may pass (`recover.retries`). Returns the exit code."""
    retries = job.config.recover.retries
    for number in range(retries + 1):
        attempt = replace(job, attempt=number)
        attempt.save()
        try:
            code = run(attempt)
        finally:
            # All of them: Slurm may have started this attempt several times, with numbers that the next one gets, too.
            for folder in job.run_dir.names.glob(f"{job.id}-*"):
                shutil.rmtree(folder, ignore_errors=True)
        name_checkpoint(job, code)
        if code in (0, REFUSED, COLLAPSED, *INTERRUPTED) or number == retries:
            return code
        print(f"starting again from the recover checkpoint (restart {number + 1} of {retries})", flush=True)
    raise AssertionError("unreachable")


def _examples(name: str) -> str:
    lines = ("--config run.yaml actor.path=/models/mine", "--config run.yaml --dry-run", "--help actor")
    return "\n".join(["examples:", *(f"  arealite launch {name} train.py {line}" for line in lines)])


def command_line(name: str, launch: Callable[..., int], doc: str | None) -> Callable[[list[str]], int]:
    """Make the `main` of a launcher's module, which reads SCRIPT, its arguments and --dry-run."""

    def main(argv: list[str]) -> int:
        if not argv or argv[0] in ("-h", "--help"):
            arguments = "SCRIPT.py [--config FILE.yaml]... [key=value]... [--dry-run]"
            print(f"usage: arealite launch {name} {arguments}\n\n{(doc or '').strip()}\n\n{_examples(name)}")
            return 0 if argv else 2
        if argv[0].startswith("-") or "=" in argv[0]:
            given = argv[0].partition("=")[0]
            raise ConfigError(f"the script comes before {given}: arealite launch {name} SCRIPT.py [arguments]")
        arguments = [argument for argument in argv[1:] if argument != "--dry-run"]
        return launch(argv[0], arguments, dry_run="--dry-run" in argv)

    return main


def _launch_command(script: str, argv: list[str], dry_run: bool) -> int:
    """Launch for a command, which began with its process."""
    return launch(script, argv, dry_run, launch_began())


main = command_line("local", _launch_command, __doc__)

if __name__ == "__main__":
    run_main(main)
