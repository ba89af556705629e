"""Finds servers whose health checks take much longer than those of the others.

Their link is slow, or their machine is busy. `Fleet` measures. The message goes to the log and the table `events`, and
through the status to the doctor.
"""

from collections import deque
from statistics import median

from arealite.engine.remote.server import Router, Server

# The best of the last measurements counts: one slow answer is chance.
NUM_MEASUREMENTS = 3
SLOW_TIMES = 5.0
MIN_SLOW_S = 0.1


class Laggards:
    """Compares how long the servers of a job take to answer a health check."""

    def __init__(self, router: Router):
        self._router = router
        self._times: dict[str, deque[float]] = {}

    def measure(self, server: Server, seconds: float) -> str:
        """Record one health check; return a message if the server has become slow just now, else nothing."""
        times = self._times.setdefault(server.address, deque(maxlen=NUM_MEASUREMENTS))
        times.append(seconds)
        for address in set(self._times) - set(self._router.servers):
            del self._times[address]
        others = [min(known) for address, known in self._times.items() if address != server.address]
        if not others or len(times) < NUM_MEASUREMENTS or min(times) <= max(MIN_SLOW_S, SLOW_TIMES * median(others)):
            server.slow = ""
            return ""
        was_slow = bool(server.slow)
        # Assigned once: the status of the run is written by another thread.
        server.slow = (
            f"a health check takes {min(times):.2g} s, with other servers {median(others):.2g} s: its network is slow, "
            "or its machine is busy"
        )
        return "" if was_slow else f"{server.address} is slow: {server.slow}"
