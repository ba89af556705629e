"""What the executor and its episodes do now, for the status of the process (`arealite doctor`)."""

import time
from typing import Any

from arealite.core.diagnosis import describe, describe_wait

# Running episodes that are described, the oldest first.
_MAX_EPISODES = 3


def executor_status(executor: Any) -> dict[str, Any]:
    """Return the numbers of a `WorkflowExecutor`, private ones too. For the status thread."""
    staleness, now = executor.staleness, time.monotonic()
    episodes = [
        {"id": str(episode.id), "age_s": round(now - episode.started_at, 3), "place": describe_wait(episode)}
        for episode in list(executor.runner.running)[:_MAX_EPISODES]
    ]
    failures = executor._failures
    return {
        **executor.stats(),
        "batch_size": staleness.batch_size,
        "max_staleness": staleness.max_staleness,
        "capacity": staleness.capacity() if staleness.batch_size else None,
        "is_paused": executor._is_paused,
        "episodes": episodes,
        "failed_in_row": failures.count,
        "first_failure": describe(failures.first)[:300] if failures.count and failures.first else "",
    }
