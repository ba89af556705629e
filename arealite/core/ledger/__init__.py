"""The ledger of a run: `run.sqlite`, with what became of every episode, and what was generated and trained."""
