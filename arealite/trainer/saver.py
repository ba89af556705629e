"""Saves Hugging Face checkpoints under `checkpoints/`, as often as the configuration says.

`Frequency` decides when, the same on all ranks; the evaluator and the recover checkpoints use it too.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from arealite.api.cli_args import FreqConfig
from arealite.api.engine_api import TrainEngine
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import SaveLoadMeta, Stat, StepInfo
from arealite.utils.distributed import all_reduce_stats, broadcast_json, rank
from arealite.utils.rundir import RunDir


class Frequency:
    """Decides when something is due: every n epochs, steps or seconds. All ranks ask once a step."""

    def __init__(self, config: FreqConfig):
        self.config = config
        self._last_time = time.monotonic()

    def is_due(self, info: StepInfo) -> bool:
        config = self.config
        due = bool(config.freq_steps and (info.global_step + 1) % config.freq_steps == 0)
        if config.freq_epochs and info.is_last_in_epoch:
            due = due or (info.epoch + 1) % config.freq_epochs == 0
        if config.freq_secs:
            # Rank 0 decides: clocks differ between ranks, and saving is a collective.
            due = broadcast_json(due or time.monotonic() - self._last_time >= config.freq_secs)
        if due:
            self._last_time = time.monotonic()
        return due


class Saver:
    """Writes `checkpoints/step000100` after 100 steps: a complete model folder, with the tokenizer."""

    def __init__(self, config: FreqConfig, run_dir: RunDir, engine: TrainEngine, tokenizer: Any = None):
        self.frequency = Frequency(config)
        self.folder = run_dir.checkpoints
        self.engine = engine
        self.tokenizer = tokenizer

    def maybe_save(self, info: StepInfo, is_last: bool = False) -> Path | None:
        """Save if it is due, and after the last step in any case. Returns the path."""
        return self.save(info) if self.frequency.is_due(info) or is_last else None

    def save(self, info: StepInfo) -> Path:
        """Save now. All ranks call it."""
        path = self.folder / f"step{info.global_step + 1:06d}"
        with on_all_ranks(f"the checkpoint {path}"):
            self.folder.mkdir(parents=True, exist_ok=True)
        with on_all_ranks(f"the checkpoint {path}"):
            self.engine.save(SaveLoadMeta(str(path), "hf"))
        with on_all_ranks(f"the checkpoint {path}"):
            if self.tokenizer is not None and rank() == 0:
                self.tokenizer.save_pretrained(path)
        return path


@contextmanager
def on_all_ranks(what: str) -> Iterator[None]:
    """Run a part of writing `what`: an OSError on one rank becomes a CheckpointError on all.

    Otherwise the other ranks would wait for the one that failed.
    """
    failure = ""
    try:
        yield
    except OSError as error:
        failure = str(error.strerror or error)
    share = all_reduce_stats({"failed": Stat(torch.tensor(float(bool(failure))))})
    if share["failed"]:
        reason = failure or "another rank failed, see its log"
        raise CheckpointError(f"could not write {what}: {reason}; earlier ones are untouched")
