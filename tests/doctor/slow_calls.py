"""Functions that run in worker processes of the injected cases. Imports nothing that takes long."""

import time
from typing import Any

FOREVER_S = 600.0


def forever() -> None:
    time.sleep(FOREVER_S)


def slow_score(**row: Any) -> float:
    time.sleep(0.7)
    return 1.0


def hanging_score(**row: Any) -> float:
    forever()
    return 1.0
