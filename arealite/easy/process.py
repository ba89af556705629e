"""What a run changes in the process of its caller, and changes back at its end."""

import gc
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from arealite.api.errors import ConfigError
from arealite.utils.activity import activity
from arealite.utils.config import LOG_FILE_ENV
from arealite.utils.distributed import destroy_process_group
from arealite.utils.startup import prepare_process
from arealite.utils.text import CleanFormatter

# Held while a trainer of this process trains.
_training = threading.Lock()


@contextmanager
def only_run() -> Iterator[None]:
    """Raise `ConfigError` if another run trains in this process, on another thread.

    Two would share its environment variables, its process group and the switches of transformers for loading models,
    which stay set if two threads set and reset them in turn.
    """
    if not _training.acquire(blocking=False):
        raise ConfigError(
            "another trainer of this process is training: call train() when that has returned, or start a process for "
            "each run"
        )
    try:
        yield
    finally:
        _training.release()


def check_process() -> None:
    """Raise `ConfigError` in a process that cannot be a trainer by itself."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise ConfigError(
            f"WORLD_SIZE={size}: this trainer runs in one process and starts its servers itself. Start the script "
            "without torchrun, or write one for the launcher (docs/launching.md)"
        )
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError("this process is one of several in a torch.distributed group: use the launcher")


@contextmanager
def borrowed_process(log_path: Path, num_threads: int) -> Iterator[None]:
    """Use this process for a run: log to the run directory, few threads; afterwards all is as before."""
    prepare_process(runs_now=True)
    with ExitStack() as stack:
        activity.watch()
        stack.callback(activity.close)
        stack.enter_context(variables({LOG_FILE_ENV: str(log_path)}))
        stack.enter_context(_log_to(log_path))
        # An engine on a GPU changes it.
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(num_threads)
        if transformers_logging.is_progress_bar_enabled():
            # The table is the only progress display.
            transformers_logging.disable_progress_bar()
            stack.callback(transformers_logging.enable_progress_bar)
        if not dist.is_initialized():
            stack.callback(destroy_process_group)
        if torch.cuda.is_available():
            stack.callback(torch.cuda.empty_cache)
        # Frees the engines: they are part of reference cycles.
        stack.callback(gc.collect)
        if not gc.get_freeze_count():
            # A run exempts its objects from garbage collection. The last callback is called first, before `collect`.
            stack.callback(gc.unfreeze)
        yield


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Send the package's log records to a file only; what concerns the user is shown by `show_message`."""
    logger = logging.getLogger("arealite")
    handler = logging.FileHandler(path)
    handler.setFormatter(CleanFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(level)
        logger.propagate = propagates


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables; afterwards they are as before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
