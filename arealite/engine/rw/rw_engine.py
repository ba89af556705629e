"""`FSDPRWEngine`: trains a reward model on chosen and rejected answers (Bradley–Terry).

The score of an answer is that of its last token. The two answers of a pair are separate rows of a batch, with the same
`pair_ids [B]` and different `is_chosen [B]`. Both are in the same micro-batch.
"""

import torch

from arealite.algo.preferences import reward_model_loss
from arealite.api.engine_api import returns_column
from arealite.api.io_struct import Batch, Stat
from arealite.engine.dpo.pairs import check_pairs, num_pairs, split_pairs
from arealite.engine.fsdp_engine import FSDPEngine


class FSDPRWEngine(FSDPEngine):
    """A decoder with a scalar head. Exports load as `AutoModelForSequenceClassification`."""

    scalar_head = True

    def train_rw(self, batch: Batch) -> dict[str, float]:
        check_pairs(batch)
        return self.train_batch(batch, rw_loss, num_pairs)

    def evaluate_rw(self, batch: Batch) -> dict[str, float]:
        check_pairs(batch)
        return self.eval_batch(batch, rw_loss, num_pairs)

    @returns_column
    def score(self, batch: Batch) -> torch.Tensor:
        """Return one score per row, `[B]`."""
        values = self.forward(batch)["values"]
        last = batch["attention_mask"].sum(dim=1) - 1
        return values.gather(1, last[:, None]).squeeze(1)


def rw_loss(outputs: Batch, mb: Batch) -> tuple[torch.Tensor, dict[str, Stat]]:
    scores = outputs["values"][mb["cu_seqlens"][1:].long() - 1]
    chosen, rejected = split_pairs(scores, mb)
    pairs = num_pairs(mb)
    # Filler rows must stay in the graph: FSDP needs gradients from every rank.
    loss = reward_model_loss(chosen, rejected) + 0.0 * scores.sum()
    return loss, {
        "accuracy": Stat((chosen > rejected).sum(), pairs),
        "margin": Stat((chosen - rejected).detach().sum(), pairs),
        "score/mean": Stat(((chosen + rejected) / 2).detach().sum(), pairs),
    }
