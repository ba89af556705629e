"""Recover checkpoints: everything a run needs to go on after a crash, in `recover/`.

A checkpoint is written in `recover/writing` and renamed to `recover/step000123` when it is whole; only then are older ones removed. So a crash at any
moment, or a full disk, leaves the last good one. Training loops call `maybe_save` after each step and `load` at the start.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from arealite.api.cli_args import RecoverConfig
from arealite.api.engine_api import TrainEngine
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import SaveLoadMeta, StepInfo
from arealite.utils.distributed import barrier, broadcast_json, rank
from arealite.utils.rundir import RunDir
from arealite.utils.saver import Frequency

_STATE = "state.json"


class Stateful(Protocol):
    """A part with a small state, kept as JSON (the data loader, the rollout's counters)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Recover:
    """Saves and restores named engines (weights, optimizer, schedule) and parts of one run."""

    def __init__(
        self,
        config: RecoverConfig,
        run_dir: RunDir,
        engines: Mapping[str, TrainEngine],
        parts: Mapping[str, Stateful] | None = None,
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
        # Rank 0 looks: other machines may see a shared folder a moment later.
        path = broadcast_json(str(newest(self.folder) or ""))
        if not path:
            if self.config.mode == "resume":
                raise CheckpointError(
                    f"recover.mode=resume, but there is no complete checkpoint in {self.folder}: check experiment_name and "
                    "trial_name, or set recover.mode=auto to start afresh"
                )
            return None
        state = json.loads((Path(path) / _STATE).read_text())
        self._match(state, path)
        for name, engine in self.engines.items():
            engine.load(SaveLoadMeta(f"{path}/{name}", "dcp", with_optim=True))
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        return StepInfo(**state["step"])

    def maybe_save(self, info: StepInfo) -> bool:
        """Save if it is time. Called by all ranks after each step."""
        if self.config.mode == "disabled" or not self.frequency.is_due(info):
            return False
        self.save(info)
        return True

    def save(self, info: StepInfo) -> None:
        """Save now; the previous checkpoint goes only when this one is whole."""
        writing = self.folder / "writing"
        try:
            if rank() == 0:
                shutil.rmtree(writing, ignore_errors=True)
                writing.mkdir(parents=True)
            barrier()
            for name, engine in self.engines.items():
                engine.save(SaveLoadMeta(str(writing / name), "dcp", with_optim=True))
            barrier()
            if rank() == 0:
                self._finish(writing, info)
        except OSError as error:
            raise CheckpointError(
                f"could not write the recover checkpoint {writing}: {error.strerror or error}; the previous one is untouched"
            ) from error
        barrier()

    def _finish(self, writing: Path, info: StepInfo) -> None:
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        state = {"step": asdict(info), "engines": list(self.engines), "parts": parts}
        with (writing / _STATE).open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        final = self.folder / f"step{info.global_step + 1:06d}"
        shutil.rmtree(final, ignore_errors=True)  # an earlier attempt that got as far
        writing.rename(final)
        for old in self.folder.glob("step*"):
            if old != final:
                shutil.rmtree(old)

    def _match(self, state: dict[str, Any], path: str) -> None:
        for kind, have, want in (
            ("engines", state["engines"], self.engines),
            ("parts", state["parts"], self.parts),
        ):
            missing = set(want) - set(have)
            if missing:
                raise CheckpointError(
                    f"{path} was written by another kind of run: it lacks the {kind} {', '.join(sorted(missing))}"
                )


def newest(folder: Path) -> Path | None:
    """The complete checkpoint with the most steps."""
    complete = [p for p in folder.glob("step*") if (p / _STATE).is_file()]
    return max(complete, key=lambda p: int(p.name.removeprefix("step")), default=None)
