"""`FSDPPPOActor`: the trained policy of the GRPO/PPO family, as three steps of a visible loop.

`compute_logp` → `compute_advantages` → `ppo_update`, each on this rank's padded share of the batch. The formulas are pure
functions in `algo/`; here configuration is read, statistics over the whole batch are agreed between ranks, and
minibatches are cut. Results do not depend on how rows are spread over ranks (with one minibatch).

B sequences, T padded length.
"""

from __future__ import annotations

from functools import partial

import torch

from arealite.algo.advantages import (
    gae,
    kl_estimate,
    normalize,
    rewards_to_go,
    shape_rewards,
    token_rewards,
)
from arealite.algo.policy_losses import aggregation_weights, decoupled_ppo_loss
from arealite.api.cli_args import PPOActorConfig
from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch, Stat
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.utils import distributed
from arealite.utils.data import num_rows, partition_balanced, select_rows, seq_lengths


class FSDPPPOActor(FSDPEngine):
    """A policy with an objective. Engine methods (`save`, `update_weights`, …) are inherited."""

    config: PPOActorConfig

    def __init__(self, config: PPOActorConfig):
        super().__init__(config)
        self.temperature = config.temperature
        self.with_entropy = True

    def compute_logp(self, batch: Batch) -> torch.Tensor:
        """Log-probs `[B, T]` of the trained tokens under the current weights (0 elsewhere)."""
        return self.forward(batch)["logp"]

    def compute_advantages(self, batch: Batch) -> None:
        """Add `advantages` and `returns` `[B, T]` and `shaped_rewards` `[B]`.

        Rewards are shaped and normalised over the whole batch of all ranks; a group may be spread over several.
        """
        config = self.config
        mask = _trained(batch)
        shaped = shape_rewards(
            batch["rewards"], config.reward_bias, config.reward_scaling, config.reward_clip
        )
        scores = self._normalized(shaped, batch["group_ids"])
        rewards = token_rewards(scores, mask, self._kl(batch), config.kl_ctl)
        values = batch.get("values")
        if values is None and config.discount == config.gae_lambda == 1.0:
            advantages = returns = rewards_to_go(rewards, mask)
        else:
            values = torch.zeros_like(rewards) if values is None else values
            truncated = batch.get("truncated", torch.zeros(len(mask)))
            advantages, returns = gae(
                rewards, values, mask, truncated, config.discount, config.gae_lambda
            )
        batch.update(advantages=advantages, returns=returns, shaped_rewards=shaped)

    def _normalized(self, shaped: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
        everything, start = distributed.all_gather_rows(shaped)
        groups, _ = distributed.all_gather_rows(group_ids)
        norm = self.config.reward_norm
        scores = normalize(
            everything, groups, norm.mean_level, norm.std_level, norm.leave_one_out, norm.eps
        )
        return scores[start : start + len(shaped)]

    def _kl(self, batch: Batch) -> torch.Tensor | None:
        if self.config.kl_ctl == 0:
            return None
        if "ref_logp" not in batch:
            raise TrainingError(
                f"actor.kl_ctl={self.config.kl_ctl} needs `ref_logp` in the batch: "
                "batch['ref_logp'] = ref.forward(batch)['logp']"
            )
        return kl_estimate(batch.get("prox_logp", batch["logprobs"]), batch["ref_logp"])

    def ppo_update(self, batch: Batch) -> list[dict[str, float]]:
        """`ppo_n_minibatches` optimizer steps; returns the statistics of each, reduced over ranks."""
        self._check(batch)
        batch = dict(batch)
        weights, norms = aggregation_weights(_trained(batch), "token")
        batch.update(loss_weights=weights, loss_norm=norms)
        overall = self._batch_stats(batch)
        parts = partition_balanced(seq_lengths(batch).tolist(), self.config.ppo_n_minibatches)
        minibatches = [self._without_idle_rows(select_rows(batch, rows)) for rows in parts]
        if self.config.use_decoupled_loss and self.config.prox_logp == "first_pass":
            # The first step's own forward pass is still that of the proximal policy; later ones' are not.
            for later in minibatches[1:]:
                later["prox_logp"] = self.compute_logp(later)
        return [overall | self._minibatch_step(minibatch) for minibatch in minibatches]

    def _check(self, batch: Batch) -> None:
        needed = ["advantages"]
        if self.config.use_decoupled_loss and self.config.prox_logp == "recompute":
            needed.append("prox_logp")
        missing = [key for key in needed if key not in batch]
        if missing:
            raise TrainingError(
                f"ppo_update needs {missing} in the batch: call actor.compute_advantages(batch) and "
                "batch['prox_logp'] = actor.compute_logp(batch) before it"
            )

    def _without_idle_rows(self, batch: Batch) -> Batch:
        """Leave out rows whose advantage is 0 everywhere: their gradient is 0, and computing it is not.

        The normaliser stays that of all rows (what the left-out ones would have added moves to the first kept row), so the
        gradient is the same to the last bit of rounding. One row always stays, to carry it.
        """
        if not self.config.skip_zero_advantage or not num_rows(batch):
            return batch
        active = (batch["advantages"] != 0).any(dim=1)
        active[0] |= not bool(active.any())
        kept = select_rows(batch, active.nonzero(as_tuple=True)[0])
        kept["loss_norm"] = kept["loss_norm"].clone()
        kept["loss_norm"][0] += batch["loss_norm"][~active].sum()
        return kept

    def _minibatch_step(self, minibatch: Batch) -> dict[str, float]:
        """One optimizer step, or none where no rank has an advantage: it would only follow old momentum."""
        active = Stat((minibatch["advantages"] != 0).any().float())
        if distributed.all_reduce_stats({"active": active})["active"] == 0:
            return {"idle_steps": 1.0}
        loss_fn = partial(policy_loss, config=self.config)
        return self.train_batch(minibatch, loss_fn, loss_norm) | {"idle_steps": 0.0}

    def _batch_stats(self, batch: Batch) -> dict[str, float]:
        """Statistics of the batch as a whole, before anything is left out."""
        mask = _trained(batch)
        rows, tokens = float(num_rows(batch)), mask.sum()
        advantages = batch["advantages"]
        lengths, answer = seq_lengths(batch).float(), mask.sum(dim=1).float()
        stats = {
            "reward": Stat(batch["rewards"].float().sum(), rows),
            "reward/max": Stat(_extreme(batch["rewards"], torch.max)),
            "reward/min": Stat(_extreme(batch["rewards"], torch.min)),
            "advantage/mean": Stat(advantages[mask].sum(), tokens),
            "advantage/abs": Stat(advantages[mask].abs().sum(), tokens),
            "zero_advantage_share": Stat((~(advantages != 0).any(dim=1)).sum(), rows),
            "seq_len": Stat(lengths.sum(), rows),
            "answer_len": Stat(answer.sum(), rows),
            "answer_len/max": Stat(_extreme(answer, torch.max)),
            "num_seqs": Stat(torch.tensor(rows), 1.0 / distributed.world_size()),
        }
        if "truncated" in batch:
            stats["truncated_share"] = Stat(batch["truncated"].float().sum(), rows)
        if "versions" in batch:
            age = (self.get_version() - batch["versions"])[mask].float()
            stats["staleness"] = Stat(age.sum(), tokens)
            stats["staleness/max"] = Stat(_extreme(age, torch.max))
        if "ref_logp" in batch:
            current = batch.get("prox_logp", batch["logprobs"])
            kl = kl_estimate(current, batch["ref_logp"], "k3")
            stats["ref_kl"] = Stat(kl[mask].sum(), tokens)
        return distributed.all_reduce_stats(stats)


def policy_loss(
    outputs: Batch, mb: Batch, config: PPOActorConfig
) -> tuple[torch.Tensor, dict[str, Stat]]:
    """The configured objective on one packed micro-batch."""
    logp, weights = outputs["logp"], mb["loss_weights"]
    if not config.use_decoupled_loss:
        prox = mb["logprobs"]
    else:
        # Absent in the first minibatch of prox_logp=first_pass: there this pass is the proximal policy's.
        prox = mb.get("prox_logp", logp.detach())
    loss, stats = decoupled_ppo_loss(
        logp,
        prox,
        mb["logprobs"],
        mb["advantages"],
        weights,
        eps_clip=config.eps_clip,
        eps_clip_higher=config.eps_clip_higher,
        c_clip=config.c_clip,
        behav_cap=config.behav_imp_weight_cap,
    )
    mask = weights > 0
    stats["entropy"] = Stat(torch.where(mask, outputs["entropy"], 0.0).detach().sum(), mask.sum())
    return loss, stats


def loss_norm(mb: Batch) -> torch.Tensor:
    """What the summed loss is divided by: Σ over all sequences of the batch, the left-out ones included."""
    return mb["loss_norm"].sum()


def _trained(batch: Batch) -> torch.Tensor:
    """Trained tokens; the first token of a sequence has no log-prob and cannot be one."""
    mask = batch["loss_mask"].bool() & batch["attention_mask"].bool()
    mask[:, :1] = False
    return mask


def _extreme(values: torch.Tensor, pick) -> torch.Tensor:
    return pick(values.float()) if values.numel() else torch.tensor(0.0)
