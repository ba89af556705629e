"""Records the outcome of every episode in the ledger, the audit and the statistics of a step.

`WorkflowExecutor` owns `EpisodeAccounts` and calls it under its lock or on the trainer's thread. Every admitted episode
is closed exactly once.
"""

import contextlib
import json
import logging
from collections.abc import Iterator

import numpy as np

from arealite.api.errors import AReaLiteError
from arealite.api.io_struct import Batch
from arealite.core.episode import DirectCall, Episode, Source, join_trajectories
from arealite.core.ledger.audit import Audit
from arealite.core.ledger.images import ImageFolder
from arealite.core.ledger.rollouts import RolloutRecorder
from arealite.core.ledger.store import AgeRow, EpisodeRow, Ledger, TimesRow
from arealite.core.record.recorder import Recorder
from arealite.utils import clock
from arealite.utils.data import stats_means
from arealite.utils.text import clean
from arealite.utils.trace import tracing

logger = logging.getLogger("arealite.executor")


class EpisodeAccounts:
    """Writes to `ledger`, if there is one; with `dump_rollouts` also `max_dump_tokens` of each batch."""

    def __init__(self, ledger: Ledger | None, dump_rollouts: bool, max_dump_tokens: int = 0):
        self.ledger = ledger
        self.dump_rollouts = dump_rollouts
        self.rollouts = RolloutRecorder(max_dump_tokens, None if ledger is None else ImageFolder(ledger.path.parent))
        self.audit = Audit()
        # Writes what a replay needs, if the run is recorded.
        self.recorder: Recorder | None = None
        # Statistics of the last batch; empty before the first.
        self.last_batch: dict[str, float] = {}

    def clear(self, *sources: Source) -> None:
        """Drop what an earlier run of the same name left in the ledger."""
        if self.ledger is not None:
            self.ledger.clear(sources)

    def record(self, episode: Episode, state: str, reason: str | None = None, step: int | None = None) -> None:
        """Set an episode's state in the ledger."""
        if self.recorder is not None and state == "running":
            self.recorder.start_episode(episode)
        elif self.recorder is not None and state not in ("trained", "evaluated") and episode.call is None:
            self.recorder.end_episode(episode, state, reason or "")
        if self.ledger is not None:
            self.ledger.record(_episode_row(episode, state, reason, step))
            if state not in ("running", "trained", "stale") and episode.finished_at is not None:
                self.ledger.record_times(_times_row(episode, episode.finished_at))

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
        tracing.record_wait("trainer", "steps", "wait: batch", waited_s, episodes=len(episodes), version=version)
        alarm = self.audit.alarm()
        if alarm is not None:
            logger.warning("%s", alarm)
            if self.ledger is not None:
                self.ledger.event("audit", alarm, version, "alarm")
        batch = join_trajectories(episodes)
        self.last_batch |= stats_means(batch)
        if self.recorder is not None:
            self.recorder.add_batch(episodes, batch)
        self.record_trained()
        if self.ledger is not None:
            # Columns of their own: the trainer may replace those of its batch.
            columns = {key: batch[key] for key in ("versions", "loss_mask")}
            self.ledger.commit(ages=lambda: _age_rows(columns, version))
            if self.dump_rollouts:
                self.rollouts.give(batch, version, episodes)
        return batch

    def record_trained(self) -> None:
        """Write the rollouts of the last batch with what the trainer has added, unless that was done."""
        rows = self.rollouts.take()
        if rows is not None and self.ledger is not None:
            self.ledger.commit(rows)

    def close_direct(self, call: DirectCall) -> None:
        """Record the episodes of a direct call, all of them also as text: evaluation is for reading."""
        if self.ledger is None or not self.dump_rollouts:
            return
        for episode in call.episodes:
            reason = call.reasons.get(episode.id.number)
            state = "failed" if reason is not None else "rejected" if episode.result is None else "evaluated"
            self.record(episode, state, reason, call.start_version)
        self.ledger.commit(self.rollouts.direct_rows(call.succeeded(), call.start_version))

    def stats(self) -> dict[str, float]:
        return {**self.last_batch, **self.audit.stats()}

    def finish(self) -> None:
        """Write the last rollouts, close the ledger and the record."""
        if self.ledger is not None:
            with contextlib.suppress(AReaLiteError):
                # `close` reports what is wrong with the ledger.
                self.record_trained()
            self.ledger.close()
        if self.recorder is not None:
            self.recorder.close()


def _episode_row(episode: Episode, state: str, reason: str | None = None, step: int | None = None) -> EpisodeRow:
    """An episode as a row of the table `episodes`."""
    result, now = episode.result, clock.time()
    # Restored from a checkpoint: it has begun in another process, at a time that is not known.
    age_s = clock.monotonic() - episode.started_at if episode.workflow is not None else None
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
        None if age_s is None else now - age_s,
        now,
        episode.id.source,
    )


def _times_row(episode: Episode, finished_at: float) -> TimesRow:
    """The times of an episode that has just ended, as a row of the table `episode_times`."""
    parts = [
        [part.kind, round(part.seconds, 5)] + ([part.answers] if part.answers else []) for part in episode.parts or ()
    ]
    return TimesRow(episode.id.number, finished_at, json.dumps(parts, separators=(",", ":")), episode.id.source)


def _age_rows(batch: Batch, step: int) -> Iterator[AgeRow]:
    """Count the trained tokens of a batch by age, and its rows by the age of their oldest token."""
    versions, mask = (batch[key].numpy(force=True) for key in ("versions", "loss_mask"))
    ages = np.where((mask != 0) & (versions >= 0), np.maximum(step - versions, 0), -1)
    oldest = ages.max(axis=1)
    tokens, samples = np.bincount(ages[ages >= 0]), np.bincount(oldest[oldest >= 0])
    for age in np.flatnonzero(tokens).tolist():
        yield AgeRow(step, age, int(samples[age]) if age < len(samples) else 0, int(tokens[age]))
