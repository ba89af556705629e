"""`FSDPLMEngine`: supervised fine-tuning on the negative log-likelihood of trained tokens."""

from __future__ import annotations

import torch

from arealite.api.io_struct import Batch, Stat
from arealite.engine.fsdp_engine import FSDPEngine


class FSDPLMEngine(FSDPEngine):
    """Trains a language model on this rank's padded batches, with the dropout of its config."""

    uses_dropout = True

    def train_lm(self, batch: Batch) -> dict[str, float]:
        return self.train_batch(batch, lm_loss, num_trained_tokens)

    def evaluate_lm(self, batch: Batch) -> dict[str, float]:
        return self.eval_batch(batch, lm_loss, num_trained_tokens)


def num_trained_tokens(mb: Batch) -> torch.Tensor:
    """Count the trained tokens of a packed micro-batch. The first token of a sequence has no prediction."""
    mask = mb["loss_mask"].bool()
    return (mask & (mb["position_ids"] > 0)).sum()


def lm_loss(outputs: Batch, mb: Batch) -> tuple[torch.Tensor, dict[str, Stat]]:
    """Return `−Σ logp` over trained tokens; all others have log-prob 0."""
    total = -outputs["logp"].sum()
    return total, {"nll": Stat(total.detach(), num_trained_tokens(mb))}
