"""What every process of a run does first, and how long the start takes.

`prepare_process` raises the limit on open files and gives caches folders of their own. It is called by `run_main` and
by processes that do not start with it (Ray actors, rollout workers). Children inherit both. The parts of a start are
timed by `startup_phase`; `Run` shows and records them with the first step.
"""

import contextlib
import gc
import logging
import os
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from arealite.utils.activity import STARTING_S, activity
from arealite.utils.process import raise_file_limit
from arealite.utils.status.writer import status

logger = logging.getLogger("arealite.startup")
# torch runs code that it finds in its cache of compiled kernels, by default in a folder of /tmp that anybody can make.
# Keys of both caches contain the versions of torch, Triton and the GPU.
_COMPILED_ENV = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
# When the launcher's process began, as `time.time()`. Launchers set it for ranks.
LAUNCHED_ENV = "AREALITE_LAUNCHED_AT"


class Phase(NamedTuple):
    """A part of the start: its name, when it began (`time.time()`), and how long it took."""

    name: str
    began: float
    seconds: float


_phases: list[Phase] = []
# Methods of engines; weak, so that they keep none alive.
_meanwhile: list[weakref.WeakMethod[Callable[[], None]]] = []


def process_began() -> float:
    """Return when this process was started, as `time.time()`."""
    return psutil.Process().create_time()


_has_launched = False


def launch_began() -> float:
    """Return when the launch of a run began: with this process, but now if it is not the first one."""
    global _has_launched
    began = time.time() if _has_launched else process_began()
    _has_launched = True
    return began


@contextlib.contextmanager
def startup_phase(name: str, message: str = "") -> Iterator[None]:
    """Time a part of the start; also a decorator. Rank 0 prints the message, and goes on saying it."""
    if message and os.environ.get("RANK", "0") == "0":
        print(message, flush=True)
        activity.note_output()
    activity.watch()
    began, start = time.time(), time.perf_counter()
    try:
        with activity.doing(message):
            yield
    finally:
        _phases.append(Phase(name, began, time.perf_counter() - start))


def do_while_servers_start(work: Callable[[], None]) -> None:
    """Have the method `work` of an engine called once, if servers are waited for. All ranks alike."""
    _meanwhile.append(weakref.WeakMethod(work))


def take_meanwhile() -> list[Callable[[], None]]:
    """Return what is to be done while servers start, and forget it."""
    taken = [work for reference in _meanwhile if (work := reference()) is not None]
    _meanwhile.clear()
    return taken


def take_startup_phases() -> list[Phase]:
    """Return the phases of this process so far, in their order, and forget them: the start is over."""
    taken = list(_phases)
    if taken:
        # Full collections would scan all that loading and compiling have left, while every thread waits.
        gc.collect()
        gc.freeze()
    _phases.clear()
    return taken


def prepare_process(runs_now: bool = False) -> None:
    """Raise the limit on open files, and keep compiled kernels where no other user can write.

    `runs_now`: a run begins now, in a process that is older than it, such as a notebook.
    """
    if runs_now:
        _phases.clear()
        activity.interval_s = STARTING_S
    elif not _phases:
        own = process_began()
        launched = float(os.environ.get(LAUNCHED_ENV) or own)
        _phases.append(Phase("launch", launched, own - launched))
        _phases.append(Phase("imports", own, time.time() - own))
        # Full collections would scan all that was imported, again and again.
        gc.freeze()
    raise_file_limit()
    status.begin_from_environment()
    missing = {name: folder for name, folder in _COMPILED_ENV.items() if name not in os.environ}
    if missing:
        try:
            caches = cache_folder()
            os.environ.update({name: str(caches / folder) for name, folder in missing.items()})
        except OSError as error:
            # Nothing is compiled then: torch needs a temporary folder too.
            logger.warning("there is no folder for compiled code: %s", error)


def cache_folder() -> Path:
    """Return a folder for caches under the temporary folder that belongs to this user alone."""
    path = Path(tempfile.gettempdir()) / f"arealite-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        # In a folder like /tmp another user may make it first, or a link of this name.
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
            return path
        reason = "it is another user's, a link, or others can enter it"
    except OSError as error:
        reason = error.strerror
    logger.warning("%s is not used for caches: %s. They are made anew each time; remove it", path, reason)
    return Path(tempfile.mkdtemp(prefix="arealite-"))
