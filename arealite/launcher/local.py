"""Everything on this machine: `python -m arealite.launcher.local script.py --config file.yaml key=value… [--dry-run]`.

Starts the inference servers that `allocation_mode` asks for, waits until they are healthy, starts the trainer ranks and watches. The first
failure ends everything (or, with `recover.retries`, starts it again from the recover checkpoint); nothing outlives the launcher.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from arealite.api.errors import ConfigError
from arealite.launcher.job import Job
from arealite.launcher.launch_config import LaunchConfig, read_launch_config
from arealite.launcher.node import run_node
from arealite.launcher.placement import local_slots
from arealite.launcher.servers import require_installed
from arealite.launcher.supervisor import INTERRUPTED
from arealite.utils.config import REFUSED, run_main


def launch(script: str | Path, argv: list[str], dry_run: bool = False) -> int:
    """Run `script` (a file, or a module's dotted name) with what its configuration asks for; returns the exit code."""
    config = read_launch_config(str(script), argv)
    if (config.cluster.n_nodes or 1) > 1:
        raise ConfigError(
            f"cluster.n_nodes={config.cluster.n_nodes}, but the local launcher runs on one machine: use "
            "arealite.launcher.ray or arealite.launcher.slurm, or set cluster.n_nodes=1"
        )
    job = Job(config, str(script), argv, *local_slots(config))
    if dry_run:
        print(job.describe())
        return 0
    placement = job.placement()  # refused here, before anything is written
    _require_paths(config)
    require_installed(config, placement.mode.gen_backend)
    print(f"run directory: {job.run_dir.path}", flush=True)
    return run_attempts(job, lambda attempt: run_node(attempt, node=0))


def _require_paths(config: LaunchConfig) -> None:
    """A path that is not there is named at once, not after a server took a minute to start."""
    here, model_path = ("/", ".", "~"), config.model_path
    if model_path.startswith(here) and not Path(model_path).is_dir():
        raise ConfigError(
            f"there is no model folder {model_path} (actor.path, model.path or server.model_path): give one with "
            "config.json and weights, or a hub name such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    for key in ("train_dataset.path", "valid_dataset.path"):
        path = str(OmegaConf.select(OmegaConf.create(config.resolved_yaml), key) or "")
        if path.startswith(here) and not Path(path).expanduser().exists():
            raise ConfigError(f"there is no dataset at {path} ({key}): give a file or a folder")


def run_attempts(job: Job, run: Callable[[Job], int]) -> int:
    """Run a job, and again after a failure that may pass, as often as `recover.retries` says. Used by all launchers that restart by themselves."""
    retries = job.config.recover.retries
    for number in range(retries + 1):
        attempt = replace(job, attempt=number)
        attempt.save()
        try:
            code = run(attempt)
        finally:
            shutil.rmtree(attempt.names_folder, ignore_errors=True)
        if code in (0, REFUSED, *INTERRUPTED) or number == retries:
            return code
        which = f"restart {number + 1} of {retries}"
        print(f"starting again from the recover checkpoint ({which})", flush=True)
    raise AssertionError("unreachable")


def command_line(name: str, launch: Callable[..., int], doc: str | None) -> Callable[..., int]:
    """The `main` of a launcher's module: SCRIPT, its arguments, and --dry-run."""

    def main(argv: list[str]) -> int:
        if not argv or argv[0] in ("-h", "--help"):
            usage = f"usage: python -m arealite.launcher.{name} SCRIPT.py [--config FILE.yaml]... [key=value]... [--dry-run]"
            print(f"{usage}\n\n{doc}")
            return 0 if argv else 2
        arguments = [argument for argument in argv[1:] if argument != "--dry-run"]
        return launch(argv[0], arguments, dry_run="--dry-run" in argv)

    return main


if __name__ == "__main__":
    run_main(command_line("local", launch, __doc__))
