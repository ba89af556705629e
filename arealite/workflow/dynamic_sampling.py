"""DAPO's dynamic sampling around any workflow: a group whose rewards are all equal teaches nothing and is rejected.

The executor starts another prompt in its place at once, so batches keep their size.
"""

from __future__ import annotations

from typing import Any

from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import Batch
from arealite.api.workflow_api import RolloutWorkflow


class DynamicSampling(RolloutWorkflow):
    """Plays `workflow` and rejects what has no spread of rewards."""

    def __init__(self, workflow: RolloutWorkflow):
        self.workflow = workflow

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        batch = await self.workflow.arun_episode(engine, data)
        if batch is None or bool((batch["rewards"] == batch["rewards"][0]).all()):
            return None
        return batch
