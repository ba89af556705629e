"""Keeps the log-probs that a policy update computes anyway, for the records of the run.

They show, token by token, how far the trainer is from the server that sampled.
"""

import torch

from arealite.api.io_struct import Batch
from arealite.utils.data import num_rows

ROW_INDEX = "row_index"


class TrainLogp:
    """Fills the column `train_logp [B, T]` of a batch: NaN on tokens that were not computed.

    It has the log-probs of the proximal policy where the batch has them, else those of the forward pass of the update.
    """

    def __init__(self, batch: Batch):
        self.column = torch.full(batch["attention_mask"].shape, torch.nan)
        self.rows = torch.arange(num_rows(batch))
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, mb: Batch, owner: torch.Tensor, logp: torch.Tensor) -> None:
        """Keep the log-probs of a packed micro-batch; `owner [N]` is the sequence of each token."""
        self._parts.append((mb[ROW_INDEX][owner], mb["position_ids"], mb.get("prox_logp", logp.detach())))

    def collect(self) -> None:
        """Copy what was added to the host. Called after a synchronization: it does not wait then."""
        for rows, positions, values in self._parts:
            self.column[rows.cpu(), positions.cpu()] = values.float().cpu()
        self._parts.clear()
