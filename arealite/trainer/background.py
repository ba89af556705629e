"""Writes recover checkpoints beside training: copies the state of engines, and writes it in a thread.

Used by `Recover`, which has at most one checkpoint in flight. On the training thread the state is copied to host memory
(pinned for CUDA) that is kept for the next one. If there is too little of it on any machine, nothing is copied, and the
caller writes while training waits. The thread has a process group of its own: the ranks' collectives stay in order.
"""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from arealite.api.errors import CheckpointError
from arealite.engine.fsdp.sharded_checkpoint import HostCopy, State, checkpoint_state
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.utils.console import show_message
from arealite.utils.distributed import is_on_any_rank, rank, world_size

# Host memory that is left to everything else.
_RESERVE_BYTES = 2 << 30
# A disk that takes longer hangs.
_WRITE_TIMEOUT_S = 3600.0


class BackgroundWriter:
    """Runs one write at a time. All ranks call the same methods in the same order."""

    def __init__(self, engines: Mapping[str, Any]):
        self._engines = engines
        self._copies = {name: HostCopy() for name in engines}
        self._pending: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None
        self._has_warned = False

    @property
    def is_busy(self) -> bool:
        """Whether a write was started that `wait` has not been called for."""
        return self._pending is not None

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once (on this rank)."""
        return self._pending is None or self._pending.done()

    def copy_state(self) -> dict[str, State] | None:
        """Return copies of the engines' states; None if they live in other processes, or memory is short."""
        if not all(isinstance(engine, FSDPEngine) for engine in self._engines.values()):
            return None
        states = {name: checkpoint_state(engine, with_optim=True) for name, engine in self._engines.items()}
        need = sum(self._copies[name].missing_bytes(state) for name, state in states.items())
        # All ranks of a machine make their copies at the same time.
        need *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = available_bytes()
        is_short = bool(need) and need + _RESERVE_BYTES > free
        if is_on_any_rank(is_short):
            if rank() == 0 and not self._has_warned:
                show_message(
                    f"note: training waits while recover checkpoints are written: copies would need {need / 1e9:.1f} "
                    f"GB of host memory, and {free / 1e9:.1f} GB are available"
                )
            self._has_warned = True
            return None
        return {name: self._copies[name].take(state) for name, state in states.items()}

    def start(self, write: Callable[[dist.ProcessGroup | None], None]) -> None:
        """Run `write(group)` in a thread. The thread before it must have been waited for."""
        assert self._pending is None
        if self._group is None and world_size() > 1:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        pending: Future[None] = Future()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            try:
                if device is not None:
                    # A new thread would use, and initialize, the first device.
                    torch.cuda.set_device(device)
                pending.set_result(write(self._group))
            # Raised again by `wait`.
            except BaseException as error:
                pending.set_exception(error)

        self._pending = pending
        # A daemon: a rank that died would let this one wait for it at its exit.
        threading.Thread(target=run, name="recover checkpoint", daemon=True).start()

    def wait(self) -> None:
        """Wait for the write in flight, and raise what it raised. After a timeout it is still in flight."""
        pending = self._pending
        if pending is None:
            return
        try:
            pending.result(_WRITE_TIMEOUT_S)
        except TimeoutError as error:
            if pending.done():
                raise
            raise CheckpointError(
                f"a recover checkpoint was not written within {_WRITE_TIMEOUT_S:.0f} s: the disk hangs"
            ) from error
        finally:
            # Its thread still reads the copies otherwise: the next write must not replace them.
            if pending.done():
                self._pending = None


def available_bytes() -> int:
    """Return how much host memory this process can still take, within the limit of its container."""
    available = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Files that were read count as used, and are dropped when memory is needed.
        return min(available, limit - used + int(counters["inactive_file"]))
    # There is no such limit ("max").
    except (OSError, ValueError, KeyError):
        return available
