"""Sends statistics to Weights & Biases, SwanLab and trackio, beside stats.jsonl.

`StatsLogger` makes a `ServiceLogger` for each service that the configuration names. Calls run on a thread of their own,
so that a slow or unreachable service never delays training; the first failure is one warning, and the service gets
nothing more. The project is the experiment, the run is the trial; a resumed run continues the run of the service.
"""

import importlib
import logging
import queue
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from arealite.api.cli_args import BaseExperimentConfig
from arealite.launcher.checks import check_loggers
from arealite.utils.config import hide_secrets, public_yaml
from arealite.utils.console import show_message
from arealite.utils.rundir import RunDir, write_file

logger = logging.getLogger("arealite.loggers")
# Statistics that may wait for a slow service; more are dropped.
_MOST_WAITING = 10_000
# How long the end of a run waits for a service, and how long a service may take to open a run.
_CLOSE_TIMEOUT_S = 30.0
_INIT_TIMEOUT_S = 60.0


class RunInfo(NamedTuple):
    """How a run is called at a service. `id` is the same after the run was resumed."""

    project: str
    name: str
    id: str
    config: dict[str, Any]
    folder: Path


# Sends one step, and ends the run.
Calls = tuple[Callable[[int, dict[str, float]], object], Callable[[], object]]


def _open_wandb(module: Any, info: RunInfo, mode: str) -> Calls:
    settings = module.Settings(silent=True, init_timeout=_INIT_TIMEOUT_S)
    run = module.init(
        project=info.project, name=info.name, id=info.id, resume="allow", mode=mode, config=info.config,
        dir=str(info.folder), settings=settings,
    )  # fmt: skip
    # Evaluations come later than the step that they belong to, which the service's own counter does not allow.
    run.define_metric("*", step_metric="step")
    return lambda step, values: run.log({**values, "step": step}), run.finish


def _open_swanlab(module: Any, info: RunInfo, mode: str) -> Calls:
    run = module.init(
        project=info.project, name=info.name, id=info.id, resume="allow", mode=mode, config=info.config,
        log_dir=str(info.folder / "swanlab"),
    )  # fmt: skip
    return lambda step, values: run.log(values, step=step), run.finish


def _open_trackio(module: Any, info: RunInfo, mode: str) -> Calls:
    run = module.init(
        project=info.project, name=info.name, resume="allow", config=info.config,
        space_id=None if mode == "local" else mode, embed=False,
    )  # fmt: skip
    return lambda step, values: run.log(values, step=step), run.finish


_OPEN = {"wandb": _open_wandb, "swanlab": _open_swanlab, "trackio": _open_trackio}


def make_service_loggers(config: BaseExperimentConfig, run_dir: RunDir) -> list["ServiceLogger"]:
    """Return a logger for each service that `stats_logger` names; raises if its package is missing."""
    modes = {name: str(getattr(config.stats_logger, name)) for name in _OPEN}
    chosen = {name: mode for name, mode in modes.items() if mode != "off"}
    check_loggers(chosen)
    if not chosen:
        return []
    values = hide_secrets(yaml.safe_load(public_yaml(config)))
    info = RunInfo(config.experiment_name, config.trial_name, _run_id(run_dir), values, run_dir.path)
    return [ServiceLogger(name, info, mode) for name, mode in chosen.items()]


def _run_id(run_dir: RunDir) -> str:
    """Return the id of this run at services; a resumed run finds the one that it had."""
    file = run_dir.path / "logger_id"
    try:
        if file.exists() and (known := file.read_text(errors="replace").strip()).isalnum():
            return known
        new = uuid.uuid4().hex[:21]
        write_file(file, new, private=False)
    except OSError as error:
        raise run_dir.unwritable(error) from error
    return new


class ServiceLogger:
    """One service, on a thread of its own."""

    def __init__(self, name: str, info: RunInfo, mode: str):
        self.name, self.failed = name, False
        self._steps: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, args=(info, mode), name=f"log-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Queue the statistics of a step; never waits."""
        if self.failed:
            return
        try:
            self._steps.put_nowait((step, values))
        except queue.Full:
            self._give_up(f"it has not taken {_MOST_WAITING} steps")

    def close(self) -> None:
        """Send what is queued, and end the run; gives up after half a minute."""
        if self.failed:
            return
        try:
            self._steps.put_nowait(None)
        except queue.Full:
            return self._give_up(f"it has not taken {_MOST_WAITING} steps")
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._give_up(f"it did not end within {_CLOSE_TIMEOUT_S:.0f} s")

    def _run(self, info: RunInfo, mode: str) -> None:
        try:
            send, end = _OPEN[self.name](importlib.import_module(self.name), info, mode)
            while (item := self._steps.get()) is not None and not self.failed:
                send(*item)
            end()
        # Services raise whatever they like, and none of it may stop training.
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {str(error).strip()[:300]}")

    def _give_up(self, reason: str) -> None:
        if not self.failed:
            self.failed = True
            show_message(
                f"warning: statistics no longer go to {self.name} ({reason}). Training goes on; stats.jsonl has them"
            )
