"""`EvaluationWorkflow`: episodes of validation sets, with a vote of each answer for maj@k.

Several answers to one question vote for equal answers, as the reward module compares them. The comparison runs in the
reward pool: algebra on what a model has written may take long.
"""

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, RewardError
from arealite.api.io_struct import Batch
from arealite.api.workflow_api import RolloutWorkflow
from arealite.reward.math import final_answer, first_equal
from arealite.reward.pool import RewardPool

logger = logging.getLogger("arealite.evaluation")
# The column of a row that names its validation set. Workflows and rewards do not see it.
SET_COLUMN = "validation_set"


class EvaluationWorkflow(RolloutWorkflow):
    """Plays each row with the workflow of its validation set, and adds the column `votes`."""

    def __init__(self, workflows: Mapping[str, RolloutWorkflow]):
        self.workflows = dict(workflows)
        # The ledger writes answers as text with it.
        self.tokenizer = next(_attributes(workflows, "tokenizer"), None)
        self.pool: RewardPool = next(_attributes(workflows, "reward_pool"), None) or RewardPool()

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        workflow = self.workflows[data.pop(SET_COLUMN)]
        batch = await workflow.arun_episode(engine, data)
        tokenizer = getattr(workflow, "tokenizer", None)
        if batch is not None and tokenizer is not None and len(batch["rewards"]) > 1:
            generated = zip(batch["input_ids"], batch["loss_mask"].bool(), strict=True)
            texts = [tokenizer.decode(ids[mask].tolist(), skip_special_tokens=True) for ids, mask in generated]
            batch["votes"] = torch.tensor(await self._votes(texts))
        return batch

    async def _votes(self, texts: list[str]) -> list[int]:
        """Return the same number for texts with equal final answers."""
        answers = [final_answer(text) or text.strip() for text in texts]
        distinct = list(dict.fromkeys(answers))
        try:
            rows = [{"answers": distinct[: i + 1]} for i in range(len(distinct))]
            firsts = await self.pool.run(first_equal, rows) if len(distinct) > 1 else [0.0]
        except RewardError as error:
            logger.warning("answers to one question are compared as text only: %s", error)
            firsts = range(len(distinct))
        vote = {answer: int(first) for answer, first in zip(distinct, firsts, strict=True)}
        return [vote[answer] for answer in answers]


def _attributes(workflows: Mapping[str, RolloutWorkflow], name: str) -> Iterator[Any]:
    return (getattr(workflow, name) for workflow in workflows.values() if hasattr(workflow, name))


def with_gconfig(workflow: RolloutWorkflow, gconfig: GenerationHyperparameters) -> RolloutWorkflow:
    """Return a copy of a workflow that samples with `gconfig`, such as an evaluation's."""
    if not isinstance(getattr(workflow, "gconfig", None), GenerationHyperparameters):
        raise ConfigError(
            f"{type(workflow).__name__} has no attribute `gconfig`, so its sampling cannot be changed for evaluations: "
            "add one, or pass a workflow for evaluations"
        )
    changed = copy.copy(workflow)
    changed.gconfig = gconfig  # type: ignore[attr-defined] - checked above
    return changed
