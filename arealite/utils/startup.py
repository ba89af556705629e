"""What every process of a run does first: more open files, and folders for caches that are its own.

Called by `run_main` and by processes that do not start with it (Ray actors, rollout workers). Children inherit both.
"""

import logging
import os
import stat
import tempfile
from pathlib import Path

from arealite.utils.process import raise_file_limit

logger = logging.getLogger("arealite.startup")
# torch runs code that it finds in its cache of compiled kernels, by default in a folder of /tmp that anybody can make.
_COMPILED_ENV = "TORCHINDUCTOR_CACHE_DIR"


def prepare_process() -> None:
    """Raise the limit on open files, and keep compiled kernels where no other user can write."""
    raise_file_limit()
    if _COMPILED_ENV not in os.environ:
        try:
            os.environ[_COMPILED_ENV] = str(cache_folder() / "torchinductor")
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
