"""The ledger of a run: one row per episode in `run.sqlite`, with what became of it."""

from arealite.core.ledger.store import EpisodeRow, Ledger, RolloutRow, read_counts

__all__ = ["EpisodeRow", "Ledger", "RolloutRow", "read_counts"]
