"""DAPO's dynamic sampling for any workflow: rejects groups whose rewards are all equal.

Such groups give no gradient. The executor replaces a rejected prompt by another one at once, so batches keep their
size. A curriculum still gets the rewards of rejected groups.
"""

from typing import Any

import torch

from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import Batch
from arealite.api.workflow_api import RolloutWorkflow
from arealite.utils.data import sample_rewards


class DynamicSampling(RolloutWorkflow):
    """Runs `workflow` and returns only the rewards of a group if they are all equal, which rejects it."""

    def __init__(self, workflow: RolloutWorkflow):
        self.workflow = workflow
        # The ledger writes answers as text with it.
        self.tokenizer = getattr(workflow, "tokenizer", None)

    def check_row(self, data: dict[str, Any]) -> None:
        self.workflow.check_row(data)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        batch = await self.workflow.arun_episode(engine, data)
        if batch is None:
            return None
        rewards = batch["rewards"]
        if "token_rewards" in batch:
            rewards = batch["token_rewards"][batch["loss_mask"].bool()]
        is_flat = bool((rewards == rewards[:1]).all())
        return {"rewards": torch.tensor(sample_rewards(batch))} if is_flat else batch
