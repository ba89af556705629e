"""The results of an evaluation as plain values: they may leave the process, as in controller mode.

`CollectingEngine.take_evaluation` returns them; `trainer.evaluator` computes statistics from them.
"""

from dataclasses import dataclass

from arealite.api.io_struct import Batch
from arealite.core.episode import DirectCall
from arealite.utils.data import sample_ids


@dataclass(slots=True)
class Sample:
    """One generated answer.

    That of an agent has the tokens of all its rows; `vote` and `is_truncated` are those of the last row. `vote` is the
    same for equal answers to one question. Versions are those of the oldest and newest token, -1 without a generated
    token.
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
    # NumPy is several times as fast as torch on small arrays, and the trainer's thread runs this.
    ids, mask, versions = (batch[key].numpy(force=True) for key in ("input_ids", "loss_mask", "versions"))
    count = len(ids)
    truncated = batch["truncated"].tolist() if "truncated" in batch else [False] * count
    votes = batch["votes"].tolist() if "votes" in batch else range(count)
    samples: dict[int, Sample] = {}
    owners = sample_ids(batch).tolist()
    for i, reward in enumerate(batch["rewards"].tolist()):
        generated = mask[i] != 0
        known = versions[i][generated & (versions[i] >= 0)]
        oldest, newest = (int(known.min()), int(known.max())) if known.size else (-1, -1)
        own = Sample(ids[i][generated].tolist(), reward, bool(truncated[i]), oldest, newest, votes[i])
        first = samples.setdefault(owners[i], own)
        if first is not own:
            # A further row of the same sample. The answer is that of its last one: rows of a plan, of a sub-agent or of
            # a history that was changed later come first.
            first.tokens += own.tokens
            first.is_truncated, first.vote = own.is_truncated, own.vote
            first.oldest_version = min(first.oldest_version, oldest)
            first.newest_version = max(first.newest_version, newest)
    return list(samples.values())
