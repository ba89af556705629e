"""Predicts speed, staleness and memory of a run: the real executor and router on virtual time."""
