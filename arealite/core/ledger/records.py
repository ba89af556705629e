"""Converts episodes to rows of the ledger: their state in numbers, and trajectories as text.

The writer thread calls the function that `rollout_rows` returns, so tokens are decoded there and not when a batch is
returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from arealite.core.episode import Episode
from arealite.core.ledger.store import EpisodeRow, RolloutRow


def episode_row(episode: Episode, state: str, reason: str | None = None, step: int | None = None) -> EpisodeRow:
    """An episode as a row of the table `episodes`."""
    result, now = episode.result, time.time()
    return EpisodeRow(
        episode.id.number,
        state,
        None if reason is None else _replace_surrogates(reason),
        episode.start_version,
        result.oldest_version if result else None,
        step,
        result.num_samples if result else None,
        result.num_tokens if result else None,
        result.mean_reward if result else None,
        now - (time.monotonic() - episode.started_at),
        now,
        episode.id.source,
    )


def rollout_rows(episodes: list[Episode], step: int) -> Callable[[], Iterator[RolloutRow]]:
    """Return a function that makes the rows, decoded by the workflow's `tokenizer` if it has one."""
    return lambda: (row for episode in episodes for row in _rows(episode, step))


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
            episode.id.number,
            sample,
            step,
            float(batch["rewards"][sample]),
            int(versions[generated].min()) if generated.any() else -1,
            int(versions.max()),
            length,
            _to_text(tokenizer, ids[:start]),
            _to_text(tokenizer, ids[start:]),
            episode.id.source,
        )


def _to_text(tokenizer: Any, ids: torch.Tensor) -> str:
    tokens = ids.tolist()
    if tokenizer is None:
        return " ".join(map(str, tokens))
    return _replace_surrogates(str(tokenizer.decode(tokens)))


def _replace_surrogates(text: str) -> str:
    """SQLite rejects lone surrogates, which text cut between two bytes may contain."""
    return text.encode("utf-8", "replace").decode()
