"""Episodes as rows of the ledger: their fate in numbers, and a few per step as text for people to look at.

Text is made when the ledger's thread calls the returned function, not when a batch is handed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from arealite.core.episode import Episode
from arealite.core.ledger import EpisodeRow, RolloutRow

MAX_EPISODES_PER_STEP = 8


def episode_row(episode: Episode, state: str, reason: str | None = None, step: int | None = None) -> EpisodeRow:
    result, now = episode.result, time.time()
    return EpisodeRow(
        episode.id,
        state,
        None if reason is None else _writable(reason),
        episode.start_version,
        result.oldest_version if result else None,
        step,
        result.num_samples if result else None,
        result.num_tokens if result else None,
        result.mean_reward if result else None,
        now - (time.monotonic() - episode.started_at),
        now,
    )


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
    if tokenizer is None:
        return " ".join(map(str, tokens))
    return _writable(str(tokenizer.decode(tokens)))


def _writable(text: str) -> str:
    """Half a character (a lone surrogate), as in text cut between bytes, is no text to SQLite."""
    return text.encode("utf-8", "replace").decode()
