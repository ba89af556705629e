"""Writes the statistics of each step to stats.jsonl and, if enabled, to TensorBoard files.

Training loops call `commit` once a step on every rank; only rank 0 writes. A line is on disk before `commit` returns,
so a crash loses no step.
"""

import json
import math
import time
from typing import Any

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import AReaLiteError, ConfigError
from arealite.utils.process import rank
from arealite.utils.rundir import RunDir, write_file


class StatsLogger:
    """Writes `{"step": 3, "time": …, "reward": 0.5, …}`; values that are not finite become null."""

    def __init__(self, config: BaseExperimentConfig, run_dir: RunDir):
        self.path = run_dir.stats_path
        self._writes = rank() == 0
        self._board: Any = None
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
            self._board = SummaryWriter(str(run_dir.tensorboard))

    def resume(self, step: int) -> None:
        """Drop the lines of `step` and later steps, which run again."""
        if not self._writes or not self.path.exists():
            return
        lines = self.path.read_text(errors="replace").splitlines()
        kept = "".join(f"{line}\n" for line in lines if _step_of(line) < step)
        try:
            write_file(self.path, kept, private=False)
        except OSError as error:
            raise self._unwritable(error) from error

    def commit(self, step: int, stats: dict[str, float]) -> None:
        """Write the statistics of one step."""
        if not self._writes:
            return
        values = {key: float(value) if math.isfinite(value) else None for key, value in stats.items()}
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, "time": round(time.time(), 3), **values}) + "\n")
        except OSError as error:
            raise self._unwritable(error) from error
        if self._board is not None:
            for key, value in values.items():
                if value is not None:
                    self._board.add_scalar(key, value, step)

    def _unwritable(self, error: OSError) -> AReaLiteError:
        return AReaLiteError(
            f"cannot write {self.path}: {error.strerror}. Free space or fix the folder's permissions, then resume with "
            "recover.mode=auto"
        )

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def read_stats(run_dir: RunDir) -> list[dict[str, Any]]:
    """Return all steps so far, without a line that a crash cut short."""
    if not run_dir.stats_path.exists():
        return []
    lines = run_dir.stats_path.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if math.isfinite(_step_of(line))]


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        # The line was cut short by a crash, or is damaged.
        return math.inf
