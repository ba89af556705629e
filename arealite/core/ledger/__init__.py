"""The ledger of a run, `run.sqlite`: what became of every episode, what was generated and trained."""
