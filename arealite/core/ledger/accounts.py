"""Records the outcome of every episode in the ledger, the audit and the statistics of a step.

`WorkflowExecutor` owns `EpisodeAccounts` and calls it under its lock or on the trainer's thread. Every admitted episode
is closed exactly once.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from arealite.api.io_struct import Batch
from arealite.core.episode import DirectCall, Episode, Source, join_trajectories
from arealite.core.ledger.audit import Audit
from arealite.core.ledger.store import EpisodeRow, Ledger, RolloutRow
from arealite.utils.data import stats_means
from arealite.utils.text import clean

logger = logging.getLogger("arealite.executor")
MAX_TEXTS_PER_STEP = 8


class EpisodeAccounts:
    """Writes to `ledger`, if there is one; with `dump_rollouts` also trajectories as text."""

    def __init__(self, ledger: Ledger | None, dump_rollouts: bool):
        self.ledger = ledger
        self.dump_rollouts = dump_rollouts
        self.audit = Audit()
        # Statistics of the last batch; empty before the first.
        self.last_batch: dict[str, float] = {}

    def clear(self, *sources: Source) -> None:
        """Drop what an earlier run of the same name left in the ledger."""
        if self.ledger is not None:
            self.ledger.clear(sources)

    def record(self, episode: Episode, state: str, reason: str | None = None, step: int | None = None) -> None:
        """Set an episode's state in the ledger."""
        if self.ledger is not None:
            self.ledger.record(_episode_row(episode, state, reason, step))

    def close(self, episode: Episode, state: str, reason: str | None = None, step: int | None = None) -> None:
        """Record the final state of an episode: trained, rejected, failed or stale."""
        result = episode.result
        if result is None:
            self.audit.add(state)
        else:
            self.audit.add(state, result.num_tokens / result.num_samples, result.mean_reward)
        self.record(episode, state, reason, step)

    def close_batch(self, episodes: list[Episode], version: int, waited_s: float) -> Batch:
        """Record that these episodes are trained on at `version`, commit, and return them as one batch."""
        results = [e.result for e in episodes if e.result is not None]
        lags = [version - min(r.oldest_version, version) for r in results]
        self.last_batch = {
            "lag_mean": sum(lags) / len(lags),
            "lag_max": max(lags),
            "wait_s": waited_s,
            "reward_mean": sum(r.mean_reward for r in results) / len(results),
            "batch_tokens": sum(r.num_tokens for r in results),
        }
        for episode in episodes:
            self.close(episode, "trained", step=version)
        alarm = self.audit.alarm()
        if alarm is not None:
            logger.warning("%s", alarm)
            if self.ledger is not None:
                self.ledger.event("alarm", alarm)
        self._commit(episodes[:MAX_TEXTS_PER_STEP], version)
        batch = join_trajectories(episodes)
        self.last_batch |= stats_means(batch)
        return batch

    def close_direct(self, call: DirectCall) -> None:
        """Record the episodes of a direct call, all of them also as text: evaluation is for reading."""
        if self.ledger is None or not self.dump_rollouts:
            return
        for episode in call.episodes:
            reason = call.reasons.get(episode.id.number)
            state = "failed" if reason is not None else "rejected" if episode.result is None else "evaluated"
            self.record(episode, state, reason, call.start_version)
        self._commit(call.succeeded(), call.start_version)

    def _commit(self, shown: list[Episode], version: int) -> None:
        if self.ledger is not None:
            self.ledger.commit(_rollout_rows(shown, version) if self.dump_rollouts else None)

    def stats(self) -> dict[str, float]:
        return {**self.last_batch, **self.audit.stats()}

    def finish(self) -> None:
        """Close the ledger."""
        if self.ledger is not None:
            self.ledger.close()


def _episode_row(episode: Episode, state: str, reason: str | None = None, step: int | None = None) -> EpisodeRow:
    """An episode as a row of the table `episodes`."""
    result, now = episode.result, time.time()
    return EpisodeRow(
        episode.id.number,
        state,
        None if reason is None else clean(reason),
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


def _rollout_rows(episodes: list[Episode], step: int) -> Callable[[], Iterator[RolloutRow]]:
    """Return a function that decodes the rows, for the ledger's thread: no batch waits for it."""
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
    return " ".join(map(str, tokens)) if tokenizer is None else clean(str(tokenizer.decode(tokens)))
