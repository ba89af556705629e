"""`FSDPLMEngine`: supervised fine-tuning on the negative log-likelihood of trained tokens."""

import torch

from arealite.api.io_struct import Batch, Stat
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.utils.data import num_trained_tokens


class FSDPLMEngine(FSDPEngine):
    """Trains a language model on this rank's padded batches, with the dropout of its config."""

    uses_dropout = True

    def train_lm(self, batch: Batch) -> dict[str, float]:
        return self.train_batch(batch, lm_loss, num_trained_tokens)

    def evaluate_lm(self, batch: Batch) -> dict[str, float]:
        return self.eval_batch(batch, lm_loss, num_trained_tokens)


def lm_loss(outputs: Batch, mb: Batch) -> tuple[torch.Tensor, dict[str, Stat]]:
    """Return `−Σ logp` over trained tokens; all others have log-prob 0."""
    total = -outputs["logp"].sum()
    return total, {"nll": Stat(total.detach(), num_trained_tokens(mb))}
