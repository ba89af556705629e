"""`FSDPDPOEngine`: preference learning without a reward model: DPO, IPO, KTO, ORPO, SimPO.

Batches are those of the reward model (`pair_ids`, `is_chosen`), with `loss_mask` on the answers. Losses with a
reference also need `ref_logp [B, T] = ref.forward(batch)["logp"]`; KTO needs it for `with_mismatched(batch)`.
"""

from functools import partial

import torch

from arealite.algo.preferences import dpo_loss, ipo_loss, kto_loss, orpo_loss, simpo_loss
from arealite.api.cli_args import PreferenceConfig
from arealite.api.engine_api import LossFn, LossWeightFn
from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch, Stat
from arealite.engine.dpo.pairs import check_pairs, num_pairs, split_pairs
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.utils.data import select_rows, sequence_sums, trained_tokens


class FSDPDPOEngine(FSDPEngine):
    """A policy trained on preference pairs."""

    config: PreferenceConfig

    def train_dpo(self, batch: Batch) -> dict[str, float]:
        return self.train_batch(*self._task(batch))

    def evaluate_dpo(self, batch: Batch) -> dict[str, float]:
        return self.eval_batch(*self._task(batch))

    def _task(self, batch: Batch) -> tuple[Batch, LossFn, LossWeightFn]:
        """Return the rows to train on, their loss, and its divisor: the number of answers (KTO) or pairs."""
        is_kto = self.config.loss == "kto"
        if not is_kto:
            check_pairs(batch)
        if self.config.needs_reference and "ref_logp" not in batch:
            raise TrainingError(
                f"model.loss={self.config.loss} needs `ref_logp` in the batch: "
                "batch['ref_logp'] = ref.forward(batch)['logp']"
            )
        baseline = self._kto_baseline(batch) if is_kto else 0.0
        loss_fn = partial(preference_loss, config=self.config, baseline=baseline)
        rows = select_rows(batch, (batch["pair_ids"] >= 0).nonzero().flatten())
        return rows, loss_fn, num_answers if is_kto else num_pairs

    def _kto_baseline(self, batch: Batch) -> float:
        """Return the mean log-ratio of mismatched rows, at least 0 (arXiv 2402.01306 §4)."""
        others = select_rows(batch, (batch["pair_ids"] < 0).nonzero().flatten())
        mask = others["loss_mask"].bool()
        delta = torch.where(mask, self.forward(others)["logp"] - others["ref_logp"], 0.0).sum()
        stats = self.reduce_stats({"delta": Stat(delta, float(len(mask)))})
        if "delta" not in stats:
            raise TrainingError(
                "KTO needs prompts with answers to other prompts for its baseline, and this batch has none: call batch "
                "= with_mismatched(batch) before ref.forward(batch), with at least 2 rows of train_dataset per rank"
            )
        return max(stats["delta"], 0.0)


def num_answers(mb: Batch) -> torch.Tensor:
    return (mb["pair_ids"] > 0).sum()


def preference_loss(
    outputs: Batch, mb: Batch, config: PreferenceConfig, baseline: float
) -> tuple[torch.Tensor, dict[str, Stat]]:
    """Return the configured loss and its statistics on one packed micro-batch."""
    logp, cu_seqlens = outputs["logp"], mb["cu_seqlens"]
    mask = trained_tokens(mb)
    lengths = sequence_sums(mask.float(), cu_seqlens).clamp(min=1)
    # Log-probs outside the answers are 0.
    totals = sequence_sums(logp, cu_seqlens)
    if config.needs_reference:
        totals = totals - sequence_sums(torch.where(mask, mb["ref_logp"], 0.0), cu_seqlens)
    scores = totals if config.loss in ("dpo", "kto") else totals / lengths
    # Keeps every rank in the backward pass.
    filler = 0.0 * logp.sum()
    if config.loss == "kto":
        real = mb["pair_ids"] > 0
        scores, is_good = scores[real], mb["is_chosen"][real].bool()
        weights = config.desirable_weight, config.undesirable_weight
        loss = kto_loss(scores, is_good, baseline, config.factor, *weights)
        good, bad = scores[is_good].detach(), scores[~is_good].detach()
        return loss + filler, {"chosen": Stat(good.sum(), len(good)), "rejected": Stat(bad.sum(), len(bad))}
    chosen, rejected = split_pairs(scores, mb)
    if config.loss == "dpo":
        loss = dpo_loss(chosen, rejected, config.factor)
    elif config.loss == "ipo":
        loss = ipo_loss(chosen, rejected, config.factor)
    elif config.loss == "orpo":
        loss = orpo_loss(chosen, rejected, -chosen, config.factor)
    else:
        loss = simpo_loss(chosen, rejected, config.factor, config.target_margin)
    pairs = num_pairs(mb)
    return loss + filler, {
        "accuracy": Stat((chosen > rejected).sum(), pairs),
        "margin": Stat((chosen - rejected).detach().sum(), pairs),
        "chosen": Stat(chosen.detach().sum(), pairs),
        "rejected": Stat(rejected.detach().sum(), pairs),
    }
