"""`Recorder`: writes what `arealite replay` needs to run a training run again, bit for bit.

Rank 0 owns one. The executor reports episodes as they start and end, and the batches that the trainer gets; the
training loop adds the statistics and checksums of each step. A thread of its own encodes and writes, so that neither
training nor generation waits for the disk. An error of the disk ends the record, not the run.
"""

import contextlib
import json
import logging
import queue
import threading
import time
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from arealite.api.io_struct import Batch
from arealite.core.episode import Episode
from arealite.core.record.episodes import TrainedRows, encode_episode
from arealite.core.record.step_file import StepRecord, recorded_steps, step_path, write_step
from arealite.utils.console import show_message
from arealite.utils.rundir import write_file
from arealite.utils.seeds import derive_seed

logger = logging.getLogger("arealite.record")
# Steps that may wait to be written, and how long a step waits for room.
_MAX_WAITING, _PUT_TIMEOUT_S = 8, 60.0
# How long the end of a run waits for the disk; if it is not written to any more, for the thread alone.
_CLOSE_TIMEOUT_S, _OFF_TIMEOUT_S = 120.0, 1.0
# Files of attempts that are kept.
_MAX_ATTEMPTS = 20
# Of each tensor: CRC-32 of its bytes and mean, by name.
Sums = dict[str, tuple[int, float]]


@dataclass
class _Step:
    """What is known so far of the step that is being computed."""

    # What `Recorder.commit` gets.
    given: dict[str, Any] = field(default_factory=dict)
    # For each batch: its episodes, the batch, and what this rank trains.
    batches: list[tuple[list[Episode], Batch, Batch]] = field(default_factory=list)
    # How often each column of a batch had been changed in place when the loop got it.
    changes: list[dict[str, int]] = field(default_factory=list)
    # Episodes that were not trained, with what became of them.
    others: list[tuple[Episode, str, str]] = field(default_factory=list)
    # Starts (+) and ends (-) of episodes.
    order: list[str] = field(default_factory=list)


class Recorder:
    """Writes the steps of one run to `folder`, at most `max_bytes` in all: the oldest steps are removed."""

    def __init__(self, folder: Path, max_bytes: int, seed: int = 0):
        self.folder, self.max_bytes, self.seed = folder, max_bytes, seed
        self._attempt = ""
        self._lock = threading.Lock()
        self._step = _Step()
        self._sizes: dict[int, int] = {}
        self._waiting: queue.Queue[tuple[int, _Step] | None] = queue.Queue(_MAX_WAITING)
        self._is_off = False
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)

    def begin(self, first_step: int, environment: Mapping[str, Any]) -> None:
        """Begin at a step; later ones that an earlier attempt has recorded are removed."""
        self._attempt = f"attempt{first_step:06d}-{uuid.uuid4().hex[:8]}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob("attempt*.json") if first_step == 0 else ():
                old.unlink()
            for step in recorded_steps(self.folder):
                if step >= first_step:
                    step_path(self.folder, step).unlink()
                else:
                    self._sizes[step] = step_path(self.folder, step).stat().st_size
            write_file(self.folder / f"{self._attempt}.json", json.dumps(environment), private=False)
            # A run that is restarted again and again would fill its folder.
            attempts = sorted(self.folder.glob("attempt*.json"), key=lambda path: path.stat().st_mtime_ns)
            for old in attempts[:-_MAX_ATTEMPTS]:
                old.unlink()
        except OSError as error:
            self._turn_off(error)
        self._thread.start()

    # ------------------------------------------------------------------------------------- any thread

    def start_episode(self, episode: Episode) -> None:
        with self._lock:
            self._step.order.append(f"+{episode.id}@{episode.start_version}")

    def end_episode(self, episode: Episode, state: str, reason: str = "") -> None:
        """Record the end of an episode; one that is not buffered for training is recorded at once."""
        with self._lock:
            self._step.order.append(f"-{episode.id}")
            if state != "buffered":
                self._step.others.append((episode, state, reason))

    def add_batch(self, episodes: list[Episode], batch: Batch) -> None:
        """Record a batch that the training loop gets."""
        with self._lock:
            # The loop may add columns, replace them, and change small ones (rewards) in place.
            kept = {name: column.clone() if column.ndim == 1 else column for name, column in batch.items()}
            self._step.batches.append((episodes, kept, batch))
            self._step.changes.append(_count_changes(kept))

    def set_share(self, share: Batch) -> None:
        """Set what this rank trains of the last batch."""
        with self._lock:
            if self._step.batches:
                episodes, batch, _ = self._step.batches[-1]
                self._step.batches[-1] = (episodes, batch, share)

    def commit(self, step: int, results: Mapping[str, Any]) -> None:
        """End a step and have it written, with its results: statistics of minibatches, checksums of weights."""
        with self._lock:
            done, self._step = self._step, _Step()
        done.given = {"step": step, "attempt": self._attempt, **results}
        if self._is_off:
            return
        try:
            self._waiting.put((step, done), timeout=_PUT_TIMEOUT_S)
        except queue.Full:
            self._turn_off(OSError(0, f"the disk has written nothing for {_PUT_TIMEOUT_S:g} s"))

    def close(self) -> None:
        """Write what is waiting, and end the thread; idempotent."""
        if self._thread.is_alive():
            deadline = time.monotonic() + (_OFF_TIMEOUT_S if self._is_off else _CLOSE_TIMEOUT_S)
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=deadline - time.monotonic())
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive() and not self._is_off:
                self._turn_off(OSError(0, f"the last steps were not written within {_CLOSE_TIMEOUT_S:g} s"))

    # --------------------------------------------------------------------------------- writer's thread

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            if not self._is_off:
                step, done = item
                try:
                    self._sizes[step] = write_step(self.folder, step, self._encode(done))
                    self._make_room()
                # A loop may put anything into its statistics and batches. Without this thread the queue would fill.
                except Exception as error:
                    self._turn_off(error)

    def _encode(self, done: _Step) -> StepRecord:
        for (_, batch, _), before in zip(done.batches, done.changes, strict=True):
            if changed := [name for name, count in _count_changes(batch).items() if count != before[name]]:
                raise ValueError(f"the loop changes {changed} of its batch in place: assign a new tensor instead")
        batches = []
        for episodes, batch, _ in done.batches:
            encoded, row, rows = [], 0, TrainedRows(batch)
            for episode in episodes:
                encoded.append(self._encode_episode(episode, rows, row))
                row += encoded[-1]["rows"]
            batches.append(encoded)
        others = [
            self._encode_episode(episode, None) | {"state": state, "reason": reason}
            for episode, state, reason in done.others
        ]
        columns = [column_sums(share) for *_, share in done.batches]
        info = done.given | {"episodes": batches, "others": others, "order": done.order, "columns": columns}
        return StepRecord(info, [batch for _, batch, _ in done.batches])

    def _encode_episode(self, episode: Episode, batch: TrainedRows | None, first_row: int = 0) -> dict[str, Any]:
        return encode_episode(episode, derive_seed(self.seed, episode.id.group_id), batch, first_row)

    def _make_room(self) -> None:
        """Remove the oldest steps; the newest is kept, whatever its size."""
        while len(self._sizes) > 1 and sum(self._sizes.values()) > self.max_bytes:
            oldest = min(self._sizes)
            step_path(self.folder, oldest).unlink(missing_ok=True)
            del self._sizes[oldest]

    def _turn_off(self, error: Exception) -> None:
        self._is_off = True
        reason = getattr(error, "strerror", None) or str(error)
        logger.info("the record ends here", exc_info=error)
        show_message(
            f"warning: the run is no longer recorded for `arealite replay` ({self.folder}: {reason}). "
            "Training goes on; a run that is resumed records again"
        )


def _count_changes(batch: Batch) -> dict[str, int]:
    """Return torch's counter of changes in place of each column; tensors of inference mode have none."""
    return {name: 0 if column.is_inference() else column._version for name, column in batch.items()}


def column_sums(batch: Batch) -> Sums:
    """Return checksum and mean of each column, in the order in which the training loop added them."""
    return {name: tensor_sums(column.detach().cpu()) for name, column in batch.items()}


def tensor_sums(tensor: torch.Tensor) -> tuple[int, float]:
    """Return CRC-32 and mean of a tensor on the host."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(raw.data), float(tensor.double().mean()) if tensor.numel() else 0.0
