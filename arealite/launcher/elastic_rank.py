"""Runs a script as one rank of an elastic torchrun job, with the job's current number of ranks.

    python -m arealite.launcher.elastic_rank MODE SCRIPT.py ARGUMENTS...

Replaces the data-parallel size in MODE (the `allocation_mode`) by the one that WORLD_SIZE allows.
"""

import os
import sys
from dataclasses import replace

from arealite.api.alloc_mode import AllocationMode
from arealite.api.errors import AllocationError
from arealite.utils.config import run_main


def fit_mode(mode: str, world_size: int) -> str:
    """Return `mode` with as many data-parallel ranks as `world_size` allows."""
    parsed = AllocationMode.from_str(mode)
    assert parsed.train is not None
    replicas, rest = divmod(world_size, parsed.train.instance_size)
    if rest:
        raise AllocationError(
            f"{world_size} ranks are left, and a replica of {parsed.train} takes {parsed.train.instance_size}: "
            "give each machine a multiple of it"
        )
    return str(replace(parsed, train=replace(parsed.train, data=replicas)))


def main(argv: list[str]) -> None:
    mode, *command = argv
    fitted = fit_mode(mode, int(os.environ["WORLD_SIZE"]))
    os.execv(sys.executable, [sys.executable, *command, f"allocation_mode={fitted}"])


if __name__ == "__main__":
    run_main(main)
