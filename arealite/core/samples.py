"""The results of an evaluation as plain values: they may leave the process, as in controller mode.

`CollectingEngine.take_evaluation` returns them; `trainer.evaluator` computes statistics from them.
"""

from dataclasses import dataclass

from arealite.api.io_struct import Batch
from arealite.core.episode import DirectCall


@dataclass(slots=True)
class Sample:
    """One generated answer.

    `vote` is the same for equal answers to one question. Versions are those of its oldest and newest token, -1 without
    a generated token.
    """

    tokens: list[int]
    reward: float
    is_truncated: bool
    oldest_version: int
    newest_version: int
    vote: int


def samples_of(call: DirectCall) -> list[list[Sample] | None]:
    """Return the samples of each episode, in their order; None for an episode without a result."""
    results = {episode: episode.result for episode in call.succeeded()}
    found = (results.get(episode) for episode in call.episodes)
    return [None if result is None else _samples(result.batch) for result in found]


def _samples(batch: Batch) -> list[Sample]:
    samples = []
    for i, reward in enumerate(batch["rewards"].tolist()):
        generated = batch["loss_mask"][i].bool()
        versions = [version for version in batch["versions"][i][generated].tolist() if version >= 0]
        samples.append(
            Sample(
                batch["input_ids"][i][generated].tolist(),
                reward,
                bool(batch["truncated"][i]) if "truncated" in batch else False,
                min(versions, default=-1),
                max(versions, default=-1),
                int(batch["votes"][i]) if "votes" in batch else i,
            )
        )
    return samples
