"""Recover checkpoints: everything a run needs to go on after a crash, in `recover/`.

A checkpoint is written in `recover/writing`, with a checksum of each file, and renamed to `recover/step000123` when it is whole; the one before it is kept.
So a crash at any moment, or a full disk, leaves the last good one, and one that is damaged later is noticed and the one before it taken. Training loops
call `maybe_save` after each step and `load` at the start.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from arealite.api.cli_args import RecoverConfig
from arealite.api.engine_api import TrainEngine
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import SaveLoadMeta, Stat, StepInfo
from arealite.trainer.saver import Frequency, on_all_ranks
from arealite.utils.console import show_message
from arealite.utils.distributed import all_reduce_stats, barrier, broadcast_json, rank, world_size
from arealite.utils.rundir import RunDir

_STATE = "state.json"
_SUMS = "sums-"
_CHUNK_BYTES = 1 << 24


class Recover:
    """Saves and restores named engines (weights, optimizer, schedule) and parts of one run.

    A part has a small state, kept as JSON (the data loader, the rollout's counters): `state_dict`, `load_state_dict`.
    """

    def __init__(
        self,
        config: RecoverConfig,
        run_dir: RunDir,
        engines: Mapping[str, TrainEngine],
        parts: Mapping[str, Any] | None = None,
    ):
        self.config = config
        self.folder = run_dir.recover
        self.engines = engines
        self.parts = parts or {}
        self.frequency = Frequency(config)

    def load(self) -> StepInfo | None:
        """Restore the newest checkpoint and return the last step it holds; None for a fresh start."""
        if self.config.mode == "disabled":
            return None
        path = self._newest_good()
        if path is None:
            if self.config.mode == "resume":
                raise CheckpointError(
                    f"recover.mode=resume, but there is no complete checkpoint in {self.folder}: check experiment_name and "
                    "trial_name, or set recover.mode=auto to start afresh"
                )
            return None
        state = json.loads((path / _STATE).read_text())
        self._match(state, str(path))
        for name, engine in self.engines.items():
            engine.load(SaveLoadMeta(f"{path}/{name}", "dcp", with_optim=True))
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        return StepInfo(**state["step"])

    def _newest_good(self) -> Path | None:
        """The newest checkpoint whose files are as they were written; each rank looks at its share of them."""
        # Rank 0 lists them: other machines may see a shared folder a moment later.
        paths = [Path(path) for path in broadcast_json(list(map(str, complete(self.folder))))]
        for path in paths:
            damaged = _damaged_files(path)
            share = all_reduce_stats({"damaged": Stat(torch.tensor(float(bool(damaged))))})
            if share["damaged"] == 0:
                for other in paths[: paths.index(path)] if rank() == 0 else ():
                    other.rename(other.with_name(other.name.replace("step", "damaged")))
                return path
            if damaged:
                show_message(
                    f"warning: the recover checkpoint {path} is damaged ({damaged[0]}): looking for the one before it"
                )
        if paths:
            raise CheckpointError(
                f"all {len(paths)} recover checkpoints in {self.folder} are damaged: mend the disk and restore them from a backup, or delete "
                "them to start afresh (exported weights are in checkpoints/)"
            )
        return None

    def maybe_save(self, info: StepInfo) -> bool:
        """Save if it is time. Called by all ranks after each step."""
        if self.config.mode == "disabled" or not self.frequency.is_due(info):
            return False
        self.save(info)
        return True

    def save(self, info: StepInfo) -> None:
        """Save now. The newest checkpoint stays beside this one; those before it make room first."""
        writing = self.folder / "writing"
        what = f"the recover checkpoint {writing}"
        with on_all_ranks(what):
            if rank() == 0:
                for old in (writing, *complete(self.folder)[1:]):
                    shutil.rmtree(old, ignore_errors=True)
                writing.mkdir(parents=True)
        with on_all_ranks(what):
            for name, engine in self.engines.items():
                engine.save(SaveLoadMeta(str(writing / name), "dcp", with_optim=True))
        files = sorted(p for p in writing.rglob("*") if p.is_file())[rank() :: world_size()]
        barrier()  # nobody lists what the next lines make
        with on_all_ranks(what):
            sums = {str(file.relative_to(writing)): _checksum(file) for file in files}
            (writing / f"{_SUMS}{rank()}.json").write_text(json.dumps(sums))
        with on_all_ranks(what):
            if rank() == 0:
                self._finish(writing, info)

    def _finish(self, writing: Path, info: StepInfo) -> None:
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        state = {"step": asdict(info), "engines": list(self.engines), "parts": parts}
        with (writing / _STATE).open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        own = json.dumps({_STATE: _checksum(writing / _STATE)})
        (writing / f"{_SUMS}{_STATE}").write_text(own)
        final = self.folder / f"step{info.global_step + 1:06d}"
        shutil.rmtree(final, ignore_errors=True)  # an earlier attempt that got as far
        writing.rename(final)

    def _match(self, state: dict[str, Any], path: str) -> None:
        for kind, want in (("engines", self.engines), ("parts", self.parts)):
            missing = set(want) - set(state[kind])
            if missing:
                raise CheckpointError(
                    f"{path} was written by another kind of run: it lacks the {kind} {', '.join(sorted(missing))}"
                )


def complete(folder: Path) -> list[Path]:
    """Checkpoints that were finished, the newest first."""
    named = [p for p in folder.glob("step*") if p.name.removeprefix("step").isdecimal()]
    found = [p for p in named if (p / _STATE).is_file()]  # a copy, `step000004.bak`, is none
    return sorted(found, key=lambda p: int(p.name.removeprefix("step")), reverse=True)


def _damaged_files(path: Path) -> list[str]:
    """Those of this rank's share that are not as they were written."""
    try:
        json.loads((path / _STATE).read_text())
        lists = [json.loads(file.read_text()) for file in path.glob(f"{_SUMS}*.json")]
    except (OSError, ValueError) as error:
        return [f"{_STATE} cannot be read: {error}"]
    sums = sorted({name: value for part in lists for name, value in part.items()}.items())
    mine = sums[rank() :: world_size()]
    return [name for name, value in mine if _checksum(path / name) != value]


def _checksum(file: Path) -> int | None:
    """CRC-32; None if it cannot be read."""
    value = 0
    try:
        with file.open("rb") as handle:
            while chunk := handle.read(_CHUNK_BYTES):
                value = zlib.crc32(chunk, value)
    except OSError:
        return None
    return value
