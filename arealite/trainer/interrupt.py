"""Ctrl+C during training: the first saves a checkpoint after the step, the second ends at once.

Used by `Run`. Before the first step there is nothing to save, and Ctrl+C ends the run at once. A launcher passes the
signal on to its ranks and prints the command that resumes; without a launcher it is printed here. Slurm sends SIGTERM
to all processes of a job that is cancelled or preempted, some time before it kills them: that saves a checkpoint, too.
"""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from arealite.api.errors import CheckpointError
from arealite.api.io_struct import StepInfo
from arealite.launcher.job import resume_command
from arealite.trainer.recover import Recover
from arealite.utils.console import show_message
from arealite.utils.distributed import broadcast_json, rank, world_size
from arealite.utils.process import ATTEMPT_ENV, RESUME_ENV


class Interrupt:
    """Remembers a signal until the end of a step. `install` and `remove` it in the main thread."""

    def __init__(self) -> None:
        self.is_requested = False
        # Whether there is a step to save.
        self.has_step = False
        self._before: dict[int, Any] = {}

    def install(self, has_step: bool) -> None:
        """Handle signals from now on; in other threads than the main one nothing changes."""
        self.has_step = has_step
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, *([signal.SIGTERM] if "SLURM_JOB_ID" in os.environ else [])]
            self._before = {number: signal.signal(number, self._on_signal) for number in numbers}

    def remove(self) -> None:
        """Handle signals as before `install`."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def stop_if_due(self, recover: Recover, info: StepInfo, is_last: bool) -> None:
        """After Ctrl+C save a recover checkpoint and end the run; rank 0 decides for all ranks."""
        self.has_step = True
        if is_last:
            # The model is saved. Only evaluations may follow, which Ctrl+C ends at once.
            return self.remove()
        if not (broadcast_json(self.is_requested) if world_size() > 1 else self.is_requested):
            return
        path = recover.path(info)
        try:
            recover.wait()
            if not broadcast_json(path.exists()):
                recover.save(info)
                recover.wait()
        except CheckpointError as error:
            show_message(f"warning: {error}")
        if rank() == 0 and path.exists():
            show_message(f"saved {path}")
            if RESUME_ENV in os.environ or ATTEMPT_ENV not in os.environ:
                show_message(f"resume with: {os.environ.get(RESUME_ENV) or resume_command()}")
        raise KeyboardInterrupt

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.is_requested and number == signal.SIGTERM:
            return
        if self.is_requested or not self.has_step:
            _show("stopped without a new checkpoint")
            raise KeyboardInterrupt
        self.is_requested = True
        _show("stopping: a checkpoint is saved after this step (Ctrl+C again ends at once, without one)")


def _show(text: str) -> None:
    """Show a message of a signal handler on rank 0."""
    if rank() == 0:
        # The signal may interrupt another print, whose buffer refuses a second one.
        with contextlib.suppress(RuntimeError):
            show_message(text)
