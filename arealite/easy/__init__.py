"""Trainers for scripts and notebooks, without a launcher: see `arealite.easy.grpo`."""
