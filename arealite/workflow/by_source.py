"""`BySource`: plays the rows of a mixture, each with the workflow and reward of its dataset."""

from collections.abc import Mapping
from typing import Any

from arealite.api.dataset_args import MIXTURE_COLUMN, SOURCE_COLUMN
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import STATS_PREFIX, Batch
from arealite.api.workflow_api import RolloutWorkflow


class BySource(RolloutWorkflow):
    """Plays each row with the workflow of its dataset; statistics show `rollout/reward/NAME`."""

    def __init__(self, workflows: Mapping[str, RolloutWorkflow]):
        self.workflows = dict(workflows)
        first = next(iter(self.workflows.values()))
        # The ledger writes answers as text with it.
        self.tokenizer = getattr(first, "tokenizer", None)
        self.reward_pool = getattr(first, "reward_pool", None)

    def check_row(self, data: dict[str, Any]) -> None:
        name, row = _split(data)
        self.workflows[name].check_row(row)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        name, row = _split(data)
        batch = await self.workflows[name].arun_episode(engine, row)
        if batch is not None:
            batch[f"{STATS_PREFIX}reward/{name}"] = batch["rewards"].float()
        return batch


def _split(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a row's set, and the row for the workflow of that set."""
    if MIXTURE_COLUMN not in data:
        return data[SOURCE_COLUMN], data
    return data[MIXTURE_COLUMN], {key: value for key, value in data.items() if key != MIXTURE_COLUMN}
