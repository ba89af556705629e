"""`FSDPPPOActor`: the trained policy of the GRPO/PPO family.

A training loop calls `compute_logp`, `compute_advantages` and `ppo_update` on this rank's padded share of the batch.
The formulas are pure functions in `algo/`. This class reads the configuration, reduces statistics over ranks and makes
minibatches. With one minibatch, results do not depend on how rows are distributed over ranks.

B sequences, T padded length.
"""

from functools import partial

import torch

from arealite.algo.advantages import (
    RowReturns,
    adapted_kl_ctl,
    distillation_advantages,
    gae,
    kl_estimate,
    longest_answers,
    normalize,
    overlong_penalty,
    rewards_to_go,
    sample_baselines,
    sample_of_row,
    shape_rewards,
    token_rewards,
    whiten,
)
from arealite.algo.off_policy import m2po_mask
from arealite.algo.policy_losses import aggregation_weights
from arealite.api.algorithms import resolve_objective
from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.cli_args import PPOActorConfig
from arealite.api.engine_api import adds_columns, returns_column, returns_stats
from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch, Stat, Stats
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.policy_loss import loss_norm, policy_loss
from arealite.engine.ppo.train_logp import ROW_INDEX, TrainLogp
from arealite.utils.data import num_rows, select_rows, seq_lengths, split_minibatches
from arealite.utils.distributed import broadcast_json


class _TrustRegion:
    """Ends an update once the policy has moved by more than `max_update_kl` since its start.

    The forward pass of each minibatch measures the KL to the proximal policy, after the steps before it. The KL of the
    first minibatch is subtracted. It is not 0 where the proximal log-probs are those of the servers
    (`use_decoupled_loss=false`), whose weights are older.
    """

    def __init__(self, limit: float | None, replica_size: int):
        self.limit, self.replica_size = limit, replica_size
        self.is_left = False
        self._start_kl: float | None = None

    def may_step(self, stats: Stats) -> bool:
        """Return whether a minibatch with these statistics makes its step; the same on all ranks."""
        kl = stats.get("prox_kl")
        if self.limit is None or kl is None:
            return True
        self._start_kl = kl if self._start_kl is None else self._start_kl
        # A KL that is not a number has a gradient that is none either: the engine counts it as a bad step.
        is_left = kl - self._start_kl > self.limit
        # The ranks of one replica compute the KL each on their own: rounding must not let one of them go on alone.
        self.is_left = broadcast_json(is_left) if self.replica_size > 1 else is_left
        return not self.is_left


class FSDPPPOActor(FSDPEngine):
    """A policy trained with the algorithm of its config (`api.algorithms`)."""

    config: PPOActorConfig

    def __init__(self, config: PPOActorConfig, parallel: ParallelStrategy | None = None):
        self.objective = resolve_objective(config)
        super().__init__(config, parallel)
        self.temperature = config.temperature
        self.with_entropy = True
        self.kl_ctl = config.kl_ctl

    @returns_column
    def compute_logp(self, batch: Batch) -> torch.Tensor:
        """Return log-probs `[B, T]` of the trained tokens under the current weights (0 elsewhere)."""
        return self.forward(batch)["logp"]

    @adds_columns
    def compute_advantages(self, batch: Batch) -> None:
        """Add `advantages` and `returns` `[B, T]` and `shaped_rewards` `[B]` to the batch.

        Rewards are normalized over the batch of all ranks; the rows of a group may be on different ranks.
        """
        config = self.config
        mask = _trained(batch)
        penalty = self._length_penalty(batch, mask)
        shaped = self._shaped(batch["rewards"].float() + penalty)
        if "sample_ids" in batch or "token_rewards" in batch:
            scores = self._normalized_samples(batch, shaped, penalty, mask)
        else:
            scores = self._normalized(shaped, batch["group_ids"])
        kl = self._reward_kl(batch, mask)
        rewards = token_rewards(scores, mask, kl, self.kl_ctl)
        values = batch.get("values")
        if values is None and config.discount == config.gae_lambda == 1.0:
            advantages = returns = rewards_to_go(rewards, mask)
        else:
            values = torch.zeros_like(rewards) if values is None else values
            truncated = batch.get("truncated", torch.zeros(len(mask)))
            advantages, returns = gae(
                rewards, values, mask, truncated,
                config.discount, config.gae_lambda, batch.get("final_values"),
            )  # fmt: skip
        if self.objective.norm_advantages:
            kept = advantages[mask].double()
            sums = self.sum_over_ranks(mask.sum(), kept.sum(), kept.square().sum())
            advantages = whiten(advantages, mask, *sums)
        if config.distill_coef:
            teacher = _required(batch, "teacher_logp", "actor.distill_coef", "teacher")
            own, coef = batch.get("prox_logp", batch["logprobs"]), config.distill_coef
            advantages = advantages + distillation_advantages(own, teacher, mask, coef)
        batch.update(advantages=advantages, returns=returns, shaped_rewards=shaped)
        if kl is not None and config.kl_target is not None:
            total, rows = self.sum_over_ranks(kl.sum(), torch.tensor(len(kl)))
            self.kl_ctl = adapted_kl_ctl(self.kl_ctl, total / rows, config.kl_target, rows)

    def _length_penalty(self, batch: Batch, mask: torch.Tensor) -> torch.Tensor:
        """Return the penalty for the longest answer of each row's sample, `[B]`; its rows are on one rank."""
        config = self.config
        if config.overlong_buffer is None:
            return torch.zeros(len(mask), device=mask.device)
        assert config.max_answer_length is not None
        penalty = overlong_penalty(longest_answers(mask), config.max_answer_length, config.overlong_buffer)
        if "sample_ids" not in batch:
            return penalty
        owner, groups = sample_of_row(batch["group_ids"], batch["sample_ids"])
        return penalty.new_zeros(len(groups)).scatter_reduce(0, owner, penalty, "amin")[owner]

    def _shaped(self, rewards: torch.Tensor) -> torch.Tensor:
        """Shape rewards `[B]`, or the returns of tokens `[B, T]`."""
        config = self.config
        return shape_rewards(rewards, config.reward_bias, config.reward_scaling, config.reward_clip)

    def _normalized(self, shaped: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
        everything, start = self.gather_rows(shaped)
        groups, _ = self.gather_rows(group_ids)
        self._check_groups(groups)
        scores = normalize(everything, groups, **vars(self.objective.norm))
        return scores[start : start + len(shaped)]

    def _normalized_samples(
        self, batch: Batch, shaped: torch.Tensor, penalty: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return normalized returns `[B, T]`: baselines count every sample once, not its rows."""
        returns = shaped[:, None].expand(mask.shape)
        if "token_rewards" in batch:
            returns = self._shaped(batch["token_rewards"].float() + penalty[:, None])
        group_ids, start = self.gather_rows(batch["group_ids"])
        # Numbered over all ranks: rows of one group may be on several.
        samples = self.gather_rows(batch["sample_ids"])[0] if "sample_ids" in batch else torch.arange(len(group_ids))
        rows, _ = self.gather_rows(torch.stack(RowReturns.of(returns, mask, shaped), dim=1))
        owner, groups = sample_of_row(group_ids, samples)
        self._check_groups(groups)
        mean, divisor = sample_baselines(RowReturns(*rows.unbind(dim=1)), owner, groups, **vars(self.objective.norm))
        own = slice(start, start + len(returns))
        return ((returns.double() - mean[own, None]) / divisor[own, None]).float()

    def _check_groups(self, groups: torch.Tensor) -> None:
        """Raise if every group has one sample and the algorithm compares the samples of a group."""
        if self.objective.norm.mean_level == "group" and len(groups.unique()) == len(groups):
            raise TrainingError(
                "every group of this batch has one trajectory, so all advantages are zero: let the workflow return "
                "gconfig.n_samples trajectories of one row (see RLVRWorkflow), or set actor.algorithm=reinforce_pp"
            )

    def _reward_kl(self, batch: Batch, mask: torch.Tensor) -> torch.Tensor | None:
        if self.kl_ctl == 0:
            return None
        reference = _required(batch, "ref_logp", "actor.kl_ctl", "ref")
        current = batch.get("prox_logp", batch["logprobs"])
        return torch.where(mask, kl_estimate(current, reference, self.config.kl_estimator or "k1"), 0.0)

    def extra_state(self) -> dict[str, torch.Tensor]:
        """Return the KL weight if it adapts, else 0: a fixed one is that of the configuration."""
        is_adapted = self.config.kl_target is not None
        return {"kl_ctl": torch.tensor(self.kl_ctl if is_adapted else 0.0, dtype=torch.float64)}

    def load_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore an adapted KL weight; a run that resumes may have another fixed one."""
        adapted = float(state["kl_ctl"])
        if self.config.kl_target is not None and adapted:
            self.kl_ctl = adapted

    @returns_stats
    def ppo_update(self, batch: Batch) -> list[dict[str, float]]:
        """Run `ppo_n_minibatches` optimizer steps; return the statistics of each, reduced over ranks.

        A minibatch that measures a KL above `max_update_kl` makes no step and ends the update. Adds the column
        `train_logp` to the batch.
        """
        self._check(batch)
        given, logps, length = batch, TrainLogp(batch), self.config.max_answer_length
        batch = {**batch, ROW_INDEX: logps.rows}
        given["train_logp"] = logps.column
        mask = _trained(batch)
        weights, norms = aggregation_weights(mask, self.objective.loss_mean, length)
        overall = self._batch_stats(batch)
        if self.objective.m2_mask:
            if "prox_logp" not in batch:
                batch["prox_logp"] = self.compute_logp(batch)
            kept = self._m2_kept(batch, mask)
            share = self.reduce_stats({"m2_kept_share": Stat(kept.sum(), mask.sum())})
            weights, overall = weights * kept, overall | share
        batch.update(loss_weights=weights, loss_norm=norms)
        parts = split_minibatches(batch, self.config.ppo_n_minibatches)
        minibatches = [self._without_idle_rows(select_rows(batch, rows)) for rows in parts]
        passes = [None for _ in minibatches]
        if self.config.use_decoupled_loss and self.config.prox_logp == "first_pass" and "prox_logp" not in batch:
            # The first step's forward pass runs the proximal policy itself; the later ones run changed weights. A GPU
            # computes their log-probs while the host prepares the first step.
            passes = [None, *(self.start_forward(later) for later in minibatches[1:])]
        region, rows = _TrustRegion(self.config.max_update_kl, self.parallel.instance_size), []
        for minibatch, finish in zip(minibatches, passes, strict=True):
            if finish is not None:
                minibatch["prox_logp"] = finish()["logp"]
            progress = sum(not row["idle_steps"] for row in rows) / len(minibatches)
            rows.append(overall | self._minibatch_step(minibatch, region, logps, progress))
            if region.is_left:
                break
        skipped = len(minibatches) - len(rows) + region.is_left
        return [row | {"skipped_minibatches": float(skipped)} for row in rows]

    def _m2_kept(self, batch: Batch, mask: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of M2PO's mask over the trained tokens of all ranks, `[B, T]`."""
        prox, start = self.gather_rows(batch["prox_logp"][mask])
        behaviour, _ = self.gather_rows(batch["logprobs"][mask])
        chosen = m2po_mask(prox, behaviour, self.config.m2_threshold)
        kept = torch.zeros_like(mask)
        kept[mask] = chosen[start : start + int(mask.sum())]
        return kept

    def _check(self, batch: Batch) -> None:
        recomputes = self.config.use_decoupled_loss and self.config.prox_logp == "recompute"
        needed = ["advantages", "prox_logp"] if recomputes else ["advantages"]
        missing = [key for key in needed if key not in batch]
        if missing:
            raise TrainingError(
                f"ppo_update needs {missing} in the batch: call actor.compute_advantages(batch) and "
                "batch['prox_logp'] = actor.compute_logp(batch) before it"
            )
        if self.config.kl_loss_coef:
            _required(batch, "ref_logp", "actor.kl_loss_coef", "ref")

    def _without_idle_rows(self, batch: Batch) -> Batch:
        """Drop rows whose advantages are all 0: their gradient is 0.

        The first kept row takes over the `loss_norm` of the dropped rows, so the divisor of the loss and the gradient
        stay the same up to rounding. At least one row is kept.
        """
        if not self.objective.skip_zero_advantage or not num_rows(batch):
            return batch
        active = (batch["advantages"] != 0).any(dim=1)
        active[0] |= not bool(active.any())
        kept = select_rows(batch, active.nonzero(as_tuple=True)[0])
        kept["loss_norm"] = kept["loss_norm"].clone()
        kept["loss_norm"][0] += batch["loss_norm"][~active].sum()
        return kept

    def _minibatch_step(
        self, minibatch: Batch, region: _TrustRegion, logps: TrainLogp, progress: float
    ) -> dict[str, float]:
        """Run one optimizer step, or none if no rank has an advantage: it would only follow momentum.

        With other terms in the loss each rank needs a trained token instead.
        """
        signal = minibatch["advantages"] if self.objective.skip_zero_advantage else minibatch["loss_norm"]
        idle = not bool((signal != 0).any())
        if self.reduce_stats({"idle": Stat(torch.tensor(float(idle)))})["idle"] == 1:
            return {"idle_steps": 1.0}
        settings = {"config": self.config, "objective": self.objective, "version": self.get_version()}
        settings["progress"] = progress

        def may_step(stats: Stats) -> bool:
            # Statistics have been read from the device, and the step is not queued yet: nothing is waited for.
            logps.collect()
            return region.may_step(stats)

        loss_fn = partial(policy_loss, **settings, logps=logps)
        stats = self.train_batch(minibatch, loss_fn, loss_norm, may_step) | {"idle_steps": 0.0}
        square = stats.pop("behav_weight/mean_square", None)
        if square:
            stats["ess"] = stats["behav_weight/mean"] ** 2 / square
        return stats

    def _batch_stats(self, batch: Batch) -> dict[str, float]:
        """Return statistics of the whole batch, before any rows are dropped."""
        mask = _trained(batch)
        rows, tokens = float(num_rows(batch)), mask.sum()
        advantages = batch["advantages"]
        has_advantage = (advantages != 0).any(dim=1)
        answer = mask.sum(dim=1).float()
        stats = {
            "reward": _mean_over_samples(batch, batch["rewards"].float()),
            "reward/max": Stat(_extreme(batch["rewards"], torch.max)),
            "reward/min": Stat(_extreme(batch["rewards"], torch.min)),
            "advantage/mean": Stat(advantages[mask].sum(), tokens),
            "advantage/abs": Stat(advantages[mask].abs().sum(), tokens),
            "zero_advantage_share": Stat((~has_advantage).sum(), rows),
            "seq_len": Stat(seq_lengths(batch).float().sum(), rows),
            "answer_len": Stat(answer.sum(), rows),
            "answer_len/max": Stat(_extreme(answer, torch.max)),
            "num_seqs": Stat(torch.tensor(rows), 1.0 / self.dp_size),
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
            stats["kl_ctl"] = Stat(torch.tensor(self.kl_ctl))
        # Groups of all ranks, and those in which some row has a signal.
        groups, _ = self.gather_rows(batch["group_ids"])
        active = self._have_signal(batch, groups, self.gather_rows(has_advantage.long())[0])
        counts = {"groups": len(groups.unique()), "groups_with_signal": len(groups[active.bool()].unique())}
        return self.reduce_stats(stats) | {key: float(count) for key, count in counts.items()}

    def _have_signal(self, batch: Batch, groups: torch.Tensor, has_advantage: torch.Tensor) -> torch.Tensor:
        """Return which rows of all ranks have an advantage that comes not only from the KL."""
        others = self.config.distill_coef or "values" in batch or "token_rewards" in batch
        if not self.config.kl_ctl or others or "shaped_rewards" not in batch:
            return has_advantage
        rewards, _ = self.gather_rows(batch["shaped_rewards"])
        if self.objective.norm.mean_level != "group":
            return (rewards != rewards[:1]).any().expand(len(rewards))
        _, owner = groups.unique(return_inverse=True)
        low, high = (
            torch.zeros_like(rewards).scatter_reduce(0, owner, rewards, way, include_self=False)
            for way in ("amin", "amax")
        )
        return (low < high)[owner]


def _trained(batch: Batch) -> torch.Tensor:
    """Return the mask of trained tokens; first tokens have no log-prob and are never trained."""
    mask = batch["loss_mask"].bool() & batch["attention_mask"].bool()
    mask[:, :1] = False
    return mask


def _mean_over_samples(batch: Batch, values: torch.Tensor) -> Stat:
    """Return the mean of a value of rows, in which each sample counts once; its rows are on one rank."""
    if "sample_ids" not in batch:
        return Stat(values.sum(), float(num_rows(batch)))
    owner, _ = sample_of_row(batch["group_ids"], batch["sample_ids"])
    share = 1.0 / owner.bincount()[owner]
    return Stat((values * share).sum(), share.sum())


def _extreme(values: torch.Tensor, pick) -> torch.Tensor:
    return pick(values.float()) if values.numel() else torch.tensor(0.0)


def _required(batch: Batch, key: str, setting: str, engine: str) -> torch.Tensor:
    if key not in batch:
        raise TrainingError(f"{setting} needs `{key}` in the batch: batch['{key}'] = {engine}.forward(batch)['logp']")
    return batch[key]
