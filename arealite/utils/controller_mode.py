"""Whether this process is the driver of controller mode, in which engines live in Ray actors.

The Ray launcher sets `CONTROLLER_ENV` in one process. Engines check it, so that one made in the wrong process fails at
once.
"""

from __future__ import annotations

import os

from arealite.api.errors import ConfigError

# The path of the job's job.json. Set in the driver only.
CONTROLLER_ENV = "AREALITE_CONTROLLER"


def check_not_driver(engine: object) -> None:
    """Raise a `ConfigError` if an engine is constructed directly in the driver."""
    if os.environ.get(CONTROLLER_ENV):
        name = type(engine).__name__
        raise ConfigError(
            f"{name}(…) was constructed in the driver of controller mode (controller=true), which has no device: write "
            f"`make_engine({name}, …)` with `from arealite.controller.factory import make_engine`, or set "
            "controller=false"
        )
