"""Recover checkpoints: everything that a run needs to continue after a crash, in `recover/`.

A checkpoint is written to `recover/writing`, with a checksum of each file, and renamed to `recover/step000123` when it
is complete; the one before it is kept. A crash at any moment, or a full disk, thus leaves the last good one. A
checkpoint is good if every file in it has a checksum that matches. Any other folder of that name is refused, the one
before it is used, and nothing older than the newest good one is deleted for it. Training loops call `load` at the
start, `maybe_save` after each step and `wait` at the end. Checkpoints are written in the background: see
`BackgroundWriter`.
"""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from arealite.api.cli_args import RecoverConfig
from arealite.api.engine_api import TrainEngine
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import SaveLoadMeta, StepInfo
from arealite.engine.fsdp.sharded_checkpoint import State, write_dcp
from arealite.trainer.background import BackgroundWriter
from arealite.trainer.saver import Frequency, on_all_ranks
from arealite.utils.console import show_message
from arealite.utils.distributed import broadcast_json, is_on_any_rank, rank, world_size
from arealite.utils.rundir import CHECKPOINT_REPLACED, CHECKPOINT_STATE, RunDir, list_complete

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
        # Parts that a checkpoint of another version may lack.
        self.optional_parts: dict[str, Any] = {}
        self.frequency = Frequency(config)
        # The newest checkpoint that this process has loaded or written.
        self._newest: Path | None = None
        # Name of a checkpoint that is not deleted.
        self._kept = ""
        self._writer = BackgroundWriter(engines)

    def load(self, resume_from: str | bool | None = None) -> StepInfo | None:
        """Restore the newest checkpoint and return its last step; None if there is none.

        With `resume_from=True` there must be one; a path names the checkpoint.
        """
        if rank() == 0 and (text := self._half_set()):
            show_message(
                f"note: {text}: no checkpoints are written during the run, and after a crash the same command starts "
                "anew. Set recover.mode=auto and recover.freq_steps, freq_epochs or freq_secs to continue instead"
            )
        if self.config.mode == "disabled" and not resume_from:
            return None
        path = self._check_named(Path(resume_from)) if isinstance(resume_from, str) else self._find_newest_good()
        if path is None:
            if self.config.mode == "resume" or resume_from:
                who = "resume_from_checkpoint=True" if resume_from else "recover.mode=resume"
                raise CheckpointError(
                    f"{who}, but there is no complete checkpoint in {self.folder}: check experiment_name "
                    "and trial_name, or set recover.mode=auto to start a new run"
                )
            return None
        state = json.loads((path / CHECKPOINT_STATE).read_text())
        self._check_contents(state, str(path))
        self._load_engines(path)
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        for name in self.optional_parts.keys() & state["parts"].keys():
            self.optional_parts[name].load_state_dict(state["parts"][name])
        self._newest = path if path in list_complete(self.folder) else None
        if isinstance(resume_from, str) and rank() == 0:
            self._set_aside_later(path, state["step"]["global_step"] + 1)
        return StepInfo(**state["step"])

    def _half_set(self) -> str:
        """Say which half of the configuration has no effect without the other; empty if none.

        Shipped configurations have `freq_secs` beside `mode: disabled`, ready to be switched on.
        """
        if self.config.mode != "disabled":
            return "" if self.config.is_set else f"recover.mode={self.config.mode} has no frequency"
        given = [name for name in ("freq_steps", "freq_epochs") if getattr(self.config, name)]
        return f"recover.{given[0]} has no effect with recover.mode=disabled" if given else ""

    def _check_named(self, path: Path) -> Path:
        """Return a checkpoint that the caller has named, if it is good."""
        damage = find_damage(path, rank(), world_size()) if path.is_dir() else "there is no such folder"
        if is_on_any_rank(bool(damage)):
            reason = damage or "see the other ranks"
            raise CheckpointError(
                f"cannot resume from {path}: {reason}. Name a folder such as RUN_DIR/recover/step000100"
            )
        path = path.resolve()
        return self.folder / path.name if path.parent == self.folder.resolve() else path

    def _set_aside_later(self, path: Path, number: int) -> None:
        """Rename the checkpoints of this run that do not lead to a named one, so that no restart takes them."""
        for other in list_complete(self.folder):
            if path.parent != self.folder or (other != path and _number(other) >= number):
                show_message(f"note: {other} is not continued: it is kept as {_rename(other, 'left').name}")

    def _find_newest_good(self) -> Path | None:
        """Return the newest checkpoint whose checksums match; each rank checks its share of the files."""
        # Rank 0 lists them: other machines may see changes in a shared folder later.
        if rank() == 0:
            _put_back_replaced(self.folder)
        paths = [Path(path) for path in broadcast_json(list(map(str, list_complete(self.folder))))]
        for path in paths:
            damage = find_damage(path, rank(), world_size())
            if not is_on_any_rank(bool(damage)):
                for other in paths[: paths.index(path)] if rank() == 0 else ():
                    _rename(other, "damaged")
                return path
            if damage:
                show_message(f"warning: the recover checkpoint {path} is damaged ({damage}): trying the one before it")
        if paths:
            raise CheckpointError(
                f"all {len(paths)} recover checkpoints in {self.folder} are damaged: repair the disk and restore them "
                "from a backup, or delete them to start a new run (exported weights are in checkpoints/)"
            )
        return None

    def _load_engines(self, path: Path, keeps_schedule: bool = False) -> None:
        for name, engine in self.engines.items():
            engine.load(SaveLoadMeta(f"{path}/{name}", "dcp", with_optim=True, keeps_schedule=keeps_schedule))

    def keep(self, name: str) -> None:
        """Never delete the checkpoint of this name, and no longer the one that was kept before."""
        self._kept = name

    def restore_engines(self, name: str) -> None:
        """Load the engines alone from the checkpoint of this name. All ranks call it between two steps.

        Learning-rate schedules follow the steps of the run, which go on, so that they reach their end with it.
        """
        self._finish_earlier()
        path = self.folder / name
        damage = find_damage(path, rank(), world_size())
        if is_on_any_rank(bool(damage)):
            raise CheckpointError(f"the recover checkpoint {path} is damaged ({damage or 'see the other ranks'})")
        self._load_engines(path, keeps_schedule=True)

    def maybe_save(self, info: StepInfo) -> bool:
        """Save if it is due. All ranks call it after each step.

        An error of the one before it is raised here, after this one has been started. If that one is still being
        written after a timeout, this one is skipped.
        """
        is_due = self.config.mode != "disabled" and self.frequency.is_due(info)
        # Rank 0 decides: all ranks must raise in the same step.
        if is_due or (self._writer.is_busy and broadcast_json(self._writer.is_done)):
            failure = self._finish_earlier()
            if is_due and not broadcast_json(self._writer.is_busy):
                self.save(info)
            if failure is not None:
                raise failure
        return is_due

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete; raises `CheckpointError` if it failed."""
        self._writer.wait()

    def _finish_earlier(self) -> CheckpointError | None:
        """Wait for the checkpoint that is being written; returns why it failed."""
        try:
            return self.wait()
        except CheckpointError as error:
            return error

    def save(self, info: StepInfo) -> None:
        """Save the state as it is now. Keeps the newest good checkpoint and deletes older ones first.

        Returns when the state is copied, and writes it meanwhile; `wait` waits for that.
        """
        self.wait()
        parts: dict[str, Any] = {}
        with on_all_ranks(f"the recover checkpoint {self.path(info)}"):
            if rank() == 0:
                every = {**self.parts, **self.optional_parts}
                parts = {name: part.state_dict() for name, part in every.items()}
        copies = self._writer.copy_state()
        if copies is None:
            self._write(info, parts, None, None)
        else:
            self._writer.start(partial(self._write, info, parts, copies))

    def _write(
        self, info: StepInfo, parts: dict[str, Any], copies: dict[str, State] | None, group: dist.ProcessGroup | None
    ) -> None:
        """Write a checkpoint from copies of the engines' states, or from the engines."""
        writing = self.folder / "writing"
        what = f"the recover checkpoint {writing}"
        with on_all_ranks(what, group):
            if rank() == 0:
                self._remove_older(with_checksums=False)
                writing.mkdir(parents=True)
        with on_all_ranks(what, group):
            for name, engine in self.engines.items():
                if copies is None:
                    engine.save(SaveLoadMeta(str(writing / name), "dcp", with_optim=True))
                else:
                    write_dcp(copies[name], str(writing / name), group)
        # Rank 0 lists the files: every one needs a checksum, and other machines may see new ones later.
        files = broadcast_json(_list_files(writing) if rank() == 0 else None, group=group)
        with on_all_ranks(what, group):
            sums = {name: _checksum(writing / name) for name in files[rank() :: world_size()]}
            (writing / f"{_SUMS}{rank()}.json").write_text(json.dumps(sums))
        with on_all_ranks(what, group):
            if rank() == 0:
                self._finish(writing, info, parts)
        self._newest = self.path(info)

    def make_room(self) -> bool:
        """Delete what this run does not need to recover: all but the newest good checkpoint.

        Returns whether anything was deleted. All ranks call it.
        """
        self._finish_earlier()
        return broadcast_json(self._remove_older(with_checksums=True) if rank() == 0 else None)

    def _remove_older(self, with_checksums: bool) -> bool:
        """Delete an incomplete checkpoint, and those before the newest one if that is still good."""
        old, newest = [self.folder / "writing"], self._newest
        if newest is not None and not find_damage(newest, with_checksums=with_checksums):
            older = [path for path in list_complete(self.folder) if _number(path) < _number(newest)]
            old += [path for path in older if path.name != self._kept]
        old = [path for path in old if path.exists()]
        for path in old:
            shutil.rmtree(path, ignore_errors=True)
        return bool(old)

    def path(self, info: StepInfo) -> Path:
        """Return where the checkpoint of this step is saved."""
        return self.folder / f"step{info.global_step + 1:06d}"

    def _finish(self, writing: Path, info: StepInfo, parts: dict[str, Any]) -> None:
        state = {"step": asdict(info), "engines": list(self.engines), "parts": parts}
        with (writing / CHECKPOINT_STATE).open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        own = json.dumps({CHECKPOINT_STATE: _checksum(writing / CHECKPOINT_STATE)})
        (writing / f"{_SUMS}{CHECKPOINT_STATE}").write_text(own)
        final = self.path(info)
        # An earlier attempt may have reached the same step, or a rollback replaces it. It may be the only good one.
        replaced = final.with_name(final.name.replace("step", CHECKPOINT_REPLACED))
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        writing.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)

    def _check_contents(self, state: dict[str, Any], path: str) -> None:
        for kind, want in (("engines", self.engines), ("parts", self.parts)):
            missing = set(want) - set(state[kind])
            if missing:
                raise CheckpointError(
                    f"{path} was written by another kind of run: it has no {kind} {', '.join(sorted(missing))}. Set "
                    "another trial_name, or recover.mode=disabled"
                )


def _put_back_replaced(folder: Path) -> None:
    """Put back a checkpoint that a crash has left without its replacement; delete one that was replaced."""
    for path in list(folder.glob(f"{CHECKPOINT_REPLACED}*")):
        final = path.with_name(path.name.replace(CHECKPOINT_REPLACED, "step"))
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(final)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step"))


def find_damage(path: Path, share: int = 0, num_shares: int = 1, with_checksums: bool = True) -> str:
    """Return the first reason why a checkpoint is not good; empty if there is none.

    Every file must have a checksum. With several shares each call compares its part of the checksums; without
    `with_checksums` files must only be there.
    """
    sums: dict[str, int] = {}
    files = set(_list_files(path))
    lists = {name for name in files if name.startswith(_SUMS)}
    for name in sorted(lists):
        try:
            part = json.loads((path / name).read_text())
        except (OSError, ValueError, RecursionError) as error:
            return f"{name} cannot be read: {type(error).__name__}"
        if not isinstance(part, dict) or not all(type(value) is int for value in part.values()):
            return f"{name} does not hold a checksum for each file"
        sums |= part
    for name in sorted(files - lists - set(sums)):
        return f"{name} has no checksum"
    for name in sorted({CHECKPOINT_STATE, *sums} - files):
        return f"{name} is missing"
    for name in sorted(sums)[share::num_shares] if with_checksums else ():
        try:
            found = _checksum(path / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != sums[name]:
            return name
    return ""


def _list_files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def _rename(path: Path, word: str) -> Path:
    """Keep a checkpoint under a name that is not one of a checkpoint, such as `damaged000004`."""
    name = path.name.replace("step", word)
    number = 1 + len(list(path.parent.glob(f"{name}*")))
    return path.rename(path.with_name(name if number == 1 else f"{name}.{number}"))


def _checksum(file: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with file.open("rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
