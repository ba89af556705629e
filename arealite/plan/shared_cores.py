"""`SharedCores`: servers and a trainer of a simulation that share the cores of one machine, or a GPU.

`CoreUse` and `GpuShare` have the arithmetic: how fast each of them is by which of them are active.
"""

from arealite.core.foresee.core_sharing import CoreUse
from arealite.core.foresee.gpu_sharing import GpuShare
from arealite.plan.server_model import DecodingServer
from arealite.plan.virtual_time import VirtualLoop


class SharedCores:
    """Sets the speed of servers, and of the trainer's work, by how many are active."""

    def __init__(self, loop: VirtualLoop, use: CoreUse | GpuShare, servers: list[DecodingServer]):
        self._loop, self._use, self._servers = loop, use, servers
        self._trainer_works = False
        self._work_left_s = 0.0
        self._at = 0.0
        self._speed = 1.0
        self._is_update_due = False
        for server in servers:
            server.on_activity = self._update_soon

    def work(self, seconds: float) -> None:
        """Run the loop until the trainer has done work of `seconds` at full speed."""
        self._work_left_s, self._at = seconds, self._loop.time()
        self._trainer_works = True
        self._update()
        while self._work_left_s > 1e-12:
            # The speed may change before this time is over.
            speed = self._speed
            self._loop.run_until(lambda before=speed: self._speed != before, self._work_left_s / speed)
            self._count_work(speed)
        self._trainer_works = False
        self._update()

    def _count_work(self, speed: float) -> None:
        now = self._loop.time()
        self._work_left_s -= (now - self._at) * speed
        self._at = now

    def _update_soon(self) -> None:
        """Set the speeds after all events of this time, one of which called this."""
        if not self._is_update_due:
            self._is_update_due = True
            self._loop.call_soon(self._update)

    def _update(self) -> None:
        self._is_update_due = False
        active = [server for server in self._servers if server.is_active]
        tokens_per_s = sum(server.tokens_per_s() for server in active)
        speeds = self._use.speeds(len(active), tokens_per_s, self._trainer_works)
        self._speed = speeds.trainer
        for server in self._servers:
            server.set_speed(speeds.server)
