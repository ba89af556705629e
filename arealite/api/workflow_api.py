"""What a rollout workflow promises: one data row in, one group of trajectories out."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from arealite.api.io_struct import Batch

if TYPE_CHECKING:
    from arealite.api.engine_api import InferenceEngine


class RolloutWorkflow(abc.ABC):
    """How an episode is played. Subclass it in your own script; it runs on the executor's event loop.

    Many episodes run at once on one thread: await what takes time (generation, rewards, tools), never block.
    """

    @abc.abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        """Play one episode and return its `n` trajectories as a padded batch, or None to reject it.

        Required keys: `input_ids`, `attention_mask`, `loss_mask`, `logprobs`, `versions` (all `[n, T]`) and
        `rewards [n]`. The executor adds `group_ids`. An exception costs this episode and nothing else.
        """
