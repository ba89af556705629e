"""What torchrun starts for each rank of an elastic job: becomes the script, told how many ranks there are this time.

    python -m arealite.launcher.elastic_rank MODE SCRIPT.py ARGUMENTS...

The data-parallel size in MODE gives way to what WORLD_SIZE allows; everything else stays, and the script checks the result as it would any other.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from arealite.api.alloc_mode import AllocationMode
from arealite.api.errors import AllocationError
from arealite.utils.config import run_main


def fitted(mode: str, world_size: int) -> str:
    """`mode` with as many data-parallel ranks as `world_size` has room for."""
    whole = AllocationMode.from_str(mode)
    assert whole.train is not None
    replicas, rest = divmod(world_size, whole.train.instance_size)
    if rest:
        raise AllocationError(
            f"{world_size} ranks are left, and a replica of {whole.train} takes {whole.train.instance_size}: give each machine a multiple of it"
        )
    return str(replace(whole, train=replace(whole.train, data=replicas)))


def main(argv: list[str]) -> None:
    mode, *command = argv
    now = fitted(mode, int(os.environ["WORLD_SIZE"]))
    os.execv(sys.executable, [sys.executable, *command, f"allocation_mode={now}"])


if __name__ == "__main__":
    run_main(main)
