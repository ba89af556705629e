"""The accounts of episodes: what each became, for the ledger, the audit and the statistics of a step.

Kept by `WorkflowExecutor`, under its lock or on the trainer's thread. Every episode that was admitted is closed exactly once.
"""

from __future__ import annotations

import logging
from typing import Any

from arealite.api.io_struct import Batch
from arealite.core.audit import Audit
from arealite.core.episode import Episode, join_trajectories
from arealite.core.ledger import Ledger
from arealite.core.records import episode_row, transcripts

logger = logging.getLogger("arealite.executor")


class Book:
    """`ledger` may be missing (no run directory); `dump_rollouts` keeps some trajectories of each step as text."""

    def __init__(self, ledger: Ledger | None, dump_rollouts: bool):
        self.ledger = ledger
        self.dump_rollouts = dump_rollouts
        self.audit = Audit()
        self.last_batch = {"lag_mean": 0.0, "lag_max": 0, "wait_s": 0.0, "reward_mean": 0.0}

    def open_new(self) -> None:
        """The first episode of a new run: what an earlier one of the same name left is not its history."""
        if self.ledger is not None:
            self.ledger.clear()

    def note(self, episode: Episode, state: str, **details: Any) -> None:
        """An episode is `running` or `buffered` now."""
        if self.ledger is not None:
            self.ledger.note(episode_row(episode, state, **details))

    def close(self, episode: Episode, fate: str, **details: Any) -> None:
        """An episode ended for good: trained, rejected, failed or stale."""
        result = episode.result
        if result is None:
            self.audit.add(fate)
        else:
            self.audit.add(fate, result.num_tokens / result.num_samples, result.mean_reward)
        self.note(episode, fate, **details)

    def hand_over(self, episodes: list[Episode], version: int, waited_s: float) -> Batch:
        """These episodes are trained on at `version`: book them, write the ledger, and join their trajectories."""
        results = [e.result for e in episodes if e.result is not None]
        lags = [version - min(r.oldest_version, version) for r in results]
        self.last_batch = {
            "lag_mean": sum(lags) / len(lags),
            "lag_max": max(lags),
            "wait_s": waited_s,
            "reward_mean": sum(r.mean_reward for r in results) / len(results),
        }
        for episode in episodes:
            self.close(episode, "trained", step=version)
        alarm = self.audit.alarm()
        if alarm is not None:
            logger.warning("%s", alarm)
        if self.ledger is not None:
            if alarm is not None:
                self.ledger.event("alarm", alarm)
            self.ledger.commit(transcripts(episodes, version) if self.dump_rollouts else None)
        return join_trajectories([e.id for e in episodes], results)

    def stats(self) -> dict[str, float]:
        return {**self.last_batch, **self.audit.stats()}

    def finish(self) -> None:
        if self.ledger is not None:
            self.ledger.close()
