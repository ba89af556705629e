"""How a server and a trainer on one GPU slow each other down.

Their kernels run at the same time (NVIDIA's MPS), and each gets a part of the GPU. How much slower servers decode while
the trainer works is fitted to a recording in which both did: steps of the run are compared with steps of the servers'
trial at their start, when the GPU was theirs alone. Other speeds are those of one H200 (`benchmark/results/
async_vs_sync_h200.md`): an assumption for other GPUs, models and loads.
"""

from typing import NamedTuple

from arealite.core.foresee.core_sharing import Speeds
from arealite.core.foresee.resources import ServerUse
from arealite.core.foresee.step_curve import StepCurve, slower_than

# A 0.5B model on an H200: decoding takes 2.4 times as long beside the trainer, updates 1.3 times beside a server.
_SERVER, _TRAINER = 1 / 2.4, 1 / 1.3
# With less time in which both work, a recording says nothing about it.
_MIN_OVERLAP = 0.1
SLOWEST = 0.05


class GpuShare(NamedTuple):
    """Speeds while servers and trainer work at once, relative to those alone on the GPU."""

    server: float = _SERVER
    trainer: float = _TRAINER
    # Whether the speed of the server was measured.
    is_known: bool = False

    def speeds(self, num_servers: int, tokens_per_s: float, trainer_works: bool) -> Speeds:
        """Return the speeds while so many servers are active, and the trainer works or waits."""
        both = trainer_works and num_servers > 0
        return Speeds(self.server, self.trainer) if both else Speeds(1.0, 1.0)


def fit_gpu_share(use: ServerUse, curve: StepCurve, overlap: float) -> tuple[GpuShare, StepCurve]:
    """Return the speeds, and the curve of steps alone on the GPU.

    `overlap` is the share of the servers' time in which the trainer worked.
    """
    slower = slower_than(curve, use)
    if overlap < _MIN_OVERLAP:
        # The trainer is not the reason: steps of the run are slower than those of the trial by other causes.
        return GpuShare(), curve.scaled(slower)
    if not use.trial:
        # The speed of the run's steps, on average.
        assumed = GpuShare()
        return assumed, curve.scaled(1 - overlap * (1 - assumed.server))
    # In the rest of the time servers had the GPU to themselves.
    server = 1 - (1 - 1 / slower) / overlap
    return GpuShare(max(SLOWEST, server), is_known=True), curve
