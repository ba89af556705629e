"""Trajectories as text for the table `rollouts`: what people look at when a reward behaves oddly.

Bounded per step. The work is done when the ledger's thread calls the returned function, not when a batch is handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from arealite.core.episode import Episode
from arealite.core.ledger import RolloutRow

MAX_EPISODES_PER_STEP = 8


def transcripts(episodes: list[Episode], step: int) -> Callable[[], Iterator[RolloutRow]]:
    """Rows of the first few episodes of a batch, decoded by the workflow's `tokenizer` where it has one."""
    chosen = episodes[:MAX_EPISODES_PER_STEP]
    return lambda: (row for episode in chosen for row in _rows(episode, step))


def _rows(episode: Episode, step: int) -> Iterator[RolloutRow]:
    tokenizer = getattr(episode.workflow, "tokenizer", None)
    assert episode.result is not None
    batch = episode.result.batch
    for sample in range(episode.result.num_samples):
        length = int(batch["attention_mask"][sample].sum())
        ids = batch["input_ids"][sample, :length]
        versions = batch["versions"][sample, :length]
        generated = versions >= 0
        start = int(generated.int().argmax()) if generated.any() else length
        yield RolloutRow(
            episode.id,
            sample,
            step,
            float(batch["rewards"][sample]),
            int(versions[generated].min()) if generated.any() else -1,
            int(versions.max()),
            length,
            _text(tokenizer, ids[:start]),
            _text(tokenizer, ids[start:]),
        )


def _text(tokenizer, ids: torch.Tensor) -> str:
    tokens = ids.tolist()
    return tokenizer.decode(tokens) if tokenizer is not None else " ".join(map(str, tokens))
