"""Saves Hugging Face checkpoints under `checkpoints/`, as often as the configuration says.

`Frequency` decides when, the same on all ranks; the evaluator and the recover checkpoints use it too.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from arealite.api.cli_args import FreqConfig
from arealite.api.engine_api import TrainEngine
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import SaveLoadMeta, StepInfo
from arealite.utils.distributed import broadcast_json, is_on_any_rank, rank
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

    def maybe_save(self, info: StepInfo) -> Path | None:
        """Save if it is due. Returns the path."""
        return self.save(info) if self.frequency.is_due(info) else None

    def save(self, info: StepInfo, folder: Path | None = None) -> Path:
        """Save now, under `folder` if one is given. All ranks call it."""
        path = self.path(info) if folder is None else folder / self.path(info).name
        aside = path.with_name(f"{path.name}.tokenizer")
        with on_all_ranks(f"the checkpoint {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.tokenizer is not None and rank() == 0:
                _save_tokenizer(self.tokenizer, aside)
        with on_all_ranks(f"the checkpoint {path}"):
            self.engine.save(SaveLoadMeta(str(path), "hf"))
        with on_all_ranks(f"the checkpoint {path}"):
            if self.tokenizer is not None and rank() == 0:
                _move_files(aside, path)
        return path

    def save_last(self, info: StepInfo, make_room: Callable[[], bool]) -> Path:
        """Save after the last step; if that fails, make room, then save outside of the run directory.

        Raises `CheckpointError` if the model is not in the run directory at the end; the message says where it is.
        """
        try:
            return self.save(info)
        except CheckpointError as error:
            failure = error
        if make_room():
            try:
                return self.save(info)
            except CheckpointError as error:
                failure = error
        for folder in broadcast_json(_other_folders()):
            scratch = broadcast_json(_make_scratch(folder) if rank() == 0 else None)
            if scratch is None:
                continue
            try:
                path = self.save(info, Path(scratch))
            except CheckpointError:
                if rank() == 0:
                    shutil.rmtree(scratch, ignore_errors=True)
                continue
            raise CheckpointError(f"{failure}. The trained model is in {path}: move it before that folder is cleaned")
        raise CheckpointError(
            f"{failure}. The trained model could not be written to another folder either: free space and run the same "
            "command again, it goes on from the newest recover checkpoint"
        )

    def path(self, info: StepInfo) -> Path:
        """Return where the checkpoint of this step is saved."""
        return self.folder / f"step{info.global_step + 1:06d}"


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer to a new folder; raises `OSError` if that fails."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # The tokenizers library raises the base class, and no other, when it cannot write.
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error


def _move_files(source: Path, target: Path) -> None:
    """Move all files of a folder into another one, and remove the first."""
    for file in [file for file in source.rglob("*") if file.is_file()]:
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        file.replace(place)
    shutil.rmtree(source)


def _other_folders() -> list[str]:
    """Return folders outside of the run directory that may have room, at most one on each file system."""
    found: dict[int, str] = {}
    for name in (os.environ.get("TMPDIR", "/tmp"), "/tmp", "/var/tmp", os.path.expanduser("~"), "/dev/shm"):
        if os.path.isdir(name):
            found.setdefault(os.stat(name).st_dev, name)
    return list(found.values())


def _make_scratch(folder: str) -> str | None:
    """Make a folder that only this user can read; None if that is not possible."""
    try:
        return tempfile.mkdtemp(prefix="arealite-model-", dir=folder)
    except OSError:
        return None


@contextmanager
def on_all_ranks(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a part of writing `what`: an OSError on one rank becomes a CheckpointError on all.

    Otherwise the other ranks would wait for the one that failed.
    """
    failure = ""
    try:
        yield
    except OSError as error:
        failure = str(error.strerror or error)
    if is_on_any_rank(bool(failure), group):
        reason = failure or "another rank failed, see its log"
        raise CheckpointError(f"could not write {what}: {reason}; earlier ones are untouched")
