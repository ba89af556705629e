"""Checks a job's configuration and this machine's files before any process starts.

All launchers call `check_job`, also for `--dry-run`, so that a job that passes a dry run does not fail later for one of
these reasons.
"""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from arealite.api.alloc_mode import AllocationMode
from arealite.api.backends import BACKENDS
from arealite.api.dataset_args import DATA_FILES, GENERATED
from arealite.api.errors import AllocationError, ConfigError
from arealite.launcher.job import Job
from arealite.launcher.launch_config import LaunchConfig
from arealite.launcher.script_check import check_source, rehearse
from arealite.launcher.servers import check_installed
from arealite.utils.memory.model_size import read_model_size
from arealite.utils.model_config import check_layout_of, check_model


def check_job(job: Job, servers_run_here: bool) -> None:
    """Raise `ConfigError` for the first problem. `servers_run_here`: in this Python environment."""
    config = job.config
    mode = job.placement().mode
    _check_allocation(config, mode)
    if mode.gen_backend is not None:
        BACKENDS[mode.gen_backend].check(config)
        if servers_run_here and not config.server_addrs:
            check_installed(config, mode.gen_backend)
    for key, path in config.model_paths.items():
        try:
            check_model(path)
            if mode.train is not None and key in config.stages_per_rank:
                check_layout_of(path, mode.train, config.stages_per_rank[key], key in config.low_bit_paths)
                _check_tensor(path, mode.train.tensor)
        except ConfigError as error:
            raise type(error)(f"{key}: {error}") from error
    for key, path in config.dataset_paths.items():
        _check_dataset(config, key, path)
    runs_elsewhere = _runs_elsewhere(config)
    check_source(config, job.script, runs_here=not runs_elsewhere)
    if not runs_elsewhere:
        check_loggers(config.logger_packages)


def rehearse_job(job: Job) -> None:
    """For a dry run: raise what the script would raise before its engines start."""
    if not _runs_elsewhere(job.config):
        rehearse(job)


def check_loggers(names: Iterable[str]) -> None:
    """Raise if the package of a service that statistics are sent to is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"stats_logger.{name} needs its package: pip install 'arealite[{name}]'")


def _runs_elsewhere(config: LaunchConfig) -> bool:
    """Whether ranks run in a container or another environment than this one."""
    return any(key == "wrap" or key.startswith("container") for key in config.launcher.slurm)


def _check_allocation(config: LaunchConfig, mode: AllocationMode) -> None:
    if config.server_addrs and mode.gen_backend is None:
        raise ConfigError(
            f"rollout.server_addrs names servers, but allocation_mode={config.allocation_mode} does not name their "
            f"kind: write for example sglang.d1+{config.allocation_mode}"
        )
    if config.server_addrs and config.launcher.max_servers:
        raise ConfigError(
            "launcher.max_servers adds servers, but rollout.server_addrs names running ones: set only one"
        )


def _check_tensor(path: str, tensor: int) -> None:
    """Raise if tensor ranks cannot divide the model; what a hub name holds may not be known yet."""
    size = read_model_size(path) if tensor > 1 else None
    if size is not None and (problem := size.untrainable(tensor)):
        raise AllocationError(problem)
    if size is not None and (part := size.undivided(tensor)):
        raise AllocationError(
            f"t{tensor} does not divide the model's {part}: use a divisor of it, or t1 and more of d or c"
        )


def _check_dataset(config: LaunchConfig, key: str, path: str) -> None:
    """Raise if a dataset is not there, or comes from the hub and the package for that is missing."""
    local = Path(path).expanduser()
    is_local = path.startswith(("/", ".", "~"))
    if config.reads_datasets:
        is_local = is_local or path.endswith(DATA_FILES)
    if local.exists() or path.startswith(GENERATED):
        return
    if is_local:
        raise ConfigError(f"there is no dataset at {path} ({key}): give a file or a folder")
    if config.reads_datasets and not _runs_elsewhere(config) and importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"{key}={path} is not a local path, and datasets from the hub need the package `datasets`: "
            "pip install 'arealite[hub]', or give a .jsonl file"
        )
