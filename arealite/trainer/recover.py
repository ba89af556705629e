"""Recover checkpoints: everything that a run needs to continue after a crash, in `recover/`.

A checkpoint is written to `recover/writing`, with a checksum of each file, and renamed to `recover/step000123` when it
is complete; the one before it is kept. A crash at any moment, or a full disk, thus leaves the last good one. A
checkpoint that is damaged later is detected, and the one before it is used. Training loops call `load` at the start and
`maybe_save` after each step.
"""

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

    A part has a small state that is stored as JSON (data loader, executor): `state_dict` and `load_state_dict`.
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
        """Restore the newest checkpoint and return its last step; None if there is none."""
        if self.config.mode == "disabled":
            return None
        path = self._find_newest_good()
        if path is None:
            if self.config.mode == "resume":
                raise CheckpointError(
                    f"recover.mode=resume, but there is no complete checkpoint in {self.folder}: check experiment_name "
                    "and trial_name, or set recover.mode=auto to start a new run"
                )
            return None
        state = json.loads((path / _STATE).read_text())
        self._check_contents(state, str(path))
        for name, engine in self.engines.items():
            engine.load(SaveLoadMeta(f"{path}/{name}", "dcp", with_optim=True))
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        return StepInfo(**state["step"])

    def _find_newest_good(self) -> Path | None:
        """Return the newest checkpoint whose checksums match; each rank checks its share of the files."""
        # Rank 0 lists them: other machines may see changes in a shared folder later.
        paths = [Path(path) for path in broadcast_json(list(map(str, list_complete(self.folder))))]
        for path in paths:
            damaged = _damaged_files(path)
            share = all_reduce_stats({"damaged": Stat(torch.tensor(float(bool(damaged))))})
            if share["damaged"] == 0:
                for other in paths[: paths.index(path)] if rank() == 0 else ():
                    other.rename(other.with_name(other.name.replace("step", "damaged")))
                return path
            if damaged:
                show_message(
                    f"warning: the recover checkpoint {path} is damaged ({damaged[0]}): trying the one before it"
                )
        if paths:
            raise CheckpointError(
                f"all {len(paths)} recover checkpoints in {self.folder} are damaged: repair the disk and restore them "
                "from a backup, or delete them to start a new run (exported weights are in checkpoints/)"
            )
        return None

    def maybe_save(self, info: StepInfo) -> bool:
        """Save if it is due. All ranks call it after each step."""
        if self.config.mode == "disabled" or not self.frequency.is_due(info):
            return False
        self.save(info)
        return True

    def save(self, info: StepInfo) -> None:
        """Save now. Keeps the newest checkpoint and deletes older ones first."""
        writing = self.folder / "writing"
        what = f"the recover checkpoint {writing}"
        with on_all_ranks(what):
            if rank() == 0:
                for old in (writing, *list_complete(self.folder)[1:]):
                    shutil.rmtree(old, ignore_errors=True)
                writing.mkdir(parents=True)
        with on_all_ranks(what):
            for name, engine in self.engines.items():
                engine.save(SaveLoadMeta(str(writing / name), "dcp", with_optim=True))
        files = sorted(p for p in writing.rglob("*") if p.is_file())[rank() :: world_size()]
        # All ranks must have listed the files before the next lines create more.
        barrier()
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
        # An earlier attempt may have reached the same step.
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)

    def _check_contents(self, state: dict[str, Any], path: str) -> None:
        for kind, want in (("engines", self.engines), ("parts", self.parts)):
            missing = set(want) - set(state[kind])
            if missing:
                raise CheckpointError(
                    f"{path} was written by another kind of run: it has no {kind} {', '.join(sorted(missing))}. Set "
                    "another trial_name, or recover.mode=disabled"
                )


def list_complete(folder: Path) -> list[Path]:
    """Return finished checkpoints, the newest first."""
    # A copy such as `step000004.bak` is not one.
    named = [p for p in folder.glob("step*") if p.name.removeprefix("step").isdecimal()]
    found = [p for p in named if (p / _STATE).is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step")), reverse=True)


def _damaged_files(path: Path) -> list[str]:
    """Return the files of this rank's share whose checksum does not match."""
    try:
        json.loads((path / _STATE).read_text())
        lists = [json.loads(file.read_text()) for file in path.glob(f"{_SUMS}*.json")]
    except (OSError, ValueError) as error:
        return [f"{_STATE} cannot be read: {error}"]
    sums = sorted({name: value for part in lists for name, value in part.items()}.items())
    mine = sums[rank() :: world_size()]
    return [name for name, value in mine if _checksum(path / name) != value]


def _checksum(file: Path) -> int | None:
    """Return the CRC-32 of a file; None if it cannot be read."""
    value = 0
    try:
        with file.open("rb") as handle:
            while chunk := handle.read(_CHUNK_BYTES):
                value = zlib.crc32(chunk, value)
    except OSError:
        return None
    return value
