"""Writes the statistics of each step to stats.jsonl and, if enabled, to TensorBoard and services.

Training loops call `commit` once a step on every rank; only rank 0 writes. A line is on disk before `commit` returns,
so a crash loses no step. An evaluation has a line of its own, with the step at which it began; `arealite evaluate` adds
such lines while the run goes on.
"""

import json
import math
import os
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import AReaLiteError, ConfigError
from arealite.trainer.output.eval_report import set_names
from arealite.trainer.output.loggers import ServiceLogger, make_service_loggers
from arealite.utils.console import Column, show_message
from arealite.utils.process import rank
from arealite.utils.rundir import RunDir, write_file

# What is shown of steps of a run without rollouts.
SUPERVISED_COLUMNS = (
    Column("loss", "loss", "{:.4f}"),
    Column("accuracy", "accuracy", "{:.0%}", is_optional=True),
    Column("gradient", "grad_norm"),
    Column("learning rate", "lr", "{:.1e}"),
    Column("tokens/s", "tokens_per_s", "{:,.0f}"),
    Column("s/step", "time/step", "{:.1f}", is_optional=True),
)


class StatsLogger:
    """Writes `{"step": 3, "time": …, "reward": 0.5, …}`; values that are not finite become null."""

    def __init__(self, config: BaseExperimentConfig, run_dir: RunDir, tensorboard: Path | None = None):
        self.path = run_dir.stats_path
        self._writes = rank() == 0
        self._board: Any = None
        self.services: list[ServiceLogger] = []
        if not self._writes:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if config.stats_logger.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError(
                    "stats_logger.tensorboard=true needs TensorBoard: pip install 'arealite[tensorboard]'"
                ) from error
            self._board = SummaryWriter(str(tensorboard or run_dir.tensorboard))
        self.services = make_service_loggers(config, run_dir)

    def resume(self, step: int) -> None:
        """Drop the results of `step` and later steps, which run again."""
        if self._board is not None:
            # Its files are never rewritten: a mark in the new one makes readers drop these steps of earlier ones.
            self._board.close()
            self._board = type(self._board)(self._board.log_dir, purge_step=step)
        if not self._writes or not self.path.exists():
            return
        lines = self.path.read_text(errors="replace").splitlines()
        kept = [line for line in lines if _step_of(line) < step]
        try:
            write_file(self.path, "".join(f"{line}\n" for line in kept), private=False)
        except OSError as error:
            raise self._unwritable(error) from error
        missing = set(range(step)).difference(map(_step_of, kept))
        if missing:
            show_message(
                f"warning: {self.path} lacks {len(missing)} of the {step} steps so far (first: {min(missing) + 1}): "
                "it was damaged or cut short. The run goes on without them"
            )

    def commit(self, step: int, stats: dict[str, float]) -> None:
        """Write the statistics of one step."""
        if not self._writes:
            return
        values = {key: float(value) if math.isfinite(value) else None for key, value in stats.items()}
        try:
            line = json.dumps({"step": step, "time": round(time.time(), 3), **values}) + "\n"
            is_whole = _append(self.path, line.encode())
        except OSError as error:
            raise self._unwritable(error) from error
        if not is_whole:
            # No error: at the end of a run the model must still be saved, perhaps to another disk.
            show_message(f"warning: the disk is full: {self.path} lacks the statistics of step {step + 1}. Free space")
        finite = {key: value for key, value in values.items() if value is not None}
        if self._board is not None:
            for key, value in finite.items():
                self._board.add_scalar(key, value, step)
        for service in self.services:
            service.log(step, finite)

    def _unwritable(self, error: OSError) -> AReaLiteError:
        return AReaLiteError(
            f"cannot write {self.path}: {error.strerror}. Free space or fix the folder's permissions, then resume with "
            "recover.mode=auto"
        )

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        for service in self.services:
            service.close()


def _append(path: Path, line: bytes) -> bool:
    """Append a line; return whether all of it was written, which an almost full disk does not do."""
    # Not buffered: one write appends the line, also if another process writes to the file.
    with path.open("a+b", buffering=0) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                # A full disk or a crash has cut the last line short: this one must not become a part of it.
                line = b"\n" + line
        return file.write(line) == len(line)


def read_stats(run_dir: RunDir) -> list[dict[str, Any]]:
    """Return all steps so far in their order, each with the results of its evaluation.

    Step -1 is an evaluation before the first step. Of several evaluations of a set, all results are those of the last:
    others may have had more samples. A line that a crash cut short is left out, and so are values that are no numbers,
    which only other programs write.
    """
    if not run_dir.stats_path.exists():
        return []
    steps: dict[int, dict[str, Any]] = {}
    for line in run_dir.stats_path.read_text(errors="replace").splitlines():
        if math.isfinite(_step_of(line)):
            values: dict[str, Any] = {k: v for k, v in json.loads(line).items() if v is None or _is_number(v)}
            replaced = tuple(f"eval/{name}/" for name in set_names(values))
            before = {key: old for key, old in steps.get(values["step"], {}).items() if not key.startswith(replaced)}
            steps[values["step"]] = before | values
    return [steps[number] for number in sorted(steps)]


def _step_of(line: str) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf
    return step if _is_number(step) else math.inf


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def add_executor_stats(stats: dict[str, float], executor_stats: dict[str, float]) -> dict[str, float]:
    """Add the executor's statistics; its reward and lag stand in where the loss reports none."""
    names = {"reward": "reward_mean", "staleness/max": "lag_max"}
    known = {name: executor_stats[key] for name, key in names.items() if key in executor_stats}
    return {**known, **stats, **executor_stats}


def average_minibatches(stats: list[dict[str, float]]) -> dict[str, float]:
    """Average over minibatches; a statistic that only some have is averaged over those."""
    keys = dict.fromkeys(key for row in stats for key in row)
    present = {key: [row[key] for row in stats if key in row] for key in keys}
    picks = {"max": max, "min": min}
    return {key: picks.get(key.rsplit("/")[-1], fmean)(row) for key, row in present.items()}
