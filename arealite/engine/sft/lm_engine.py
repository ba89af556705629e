"""`FSDPLMEngine`: supervised fine-tuning, the mean negative log-likelihood of the tokens in `loss_mask`."""

from __future__ import annotations

import torch

from arealite.api.io_struct import Batch, Stat
from arealite.engine.fsdp_engine import FSDPEngine


class FSDPLMEngine(FSDPEngine):
    """`batch`: padded `input_ids`, `attention_mask`, `loss_mask`, this rank's share. Statistics are over all ranks."""

    uses_dropout = True

    def train_lm(self, batch: Batch) -> dict[str, float]:
        return self.train_batch(batch, lm_loss, num_trained_tokens)

    def evaluate_lm(self, batch: Batch) -> dict[str, float]:
        return self.eval_batch(batch, lm_loss, num_trained_tokens)


def num_trained_tokens(mb: Batch) -> torch.Tensor:
    """Trained tokens of a packed micro-batch. The first token of a sequence has nothing to be predicted from."""
    mask = mb["loss_mask"].bool()
    return (mask & (mb["position_ids"] > 0)).sum()


def lm_loss(outputs: Batch, mb: Batch) -> tuple[torch.Tensor, dict[str, Stat]]:
    """Token mean NLL as a sum: `−Σ logp` over trained tokens (all others have log-prob 0)."""
    total = -outputs["logp"].sum()
    return total, {"nll": Stat(total.detach(), num_trained_tokens(mb))}
