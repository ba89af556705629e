"""`FSDPPPOCritic`: the value function of PPO with GAE.

Call `compute_values` before the actor's `compute_advantages` (which adds `returns` to the batch), and `ppo_update`
after it. Index `t` holds the value of the tokens before `t`. With `value_norm` the network learns returns normalized
by their running mean and std; values outside this class are always on the scale of rewards.
"""

import math

import torch

from arealite.algo.logprobs import previous_token
from arealite.algo.preferences import value_loss
from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.cli_args import PPOCriticConfig
from arealite.api.engine_api import returns_column, returns_stats
from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch, Stat
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.utils.data import num_trained_tokens, partition_balanced, select_rows, seq_lengths, trained_tokens

# Decay of the running statistics of returns.
_DECAY = 0.99


class FSDPPPOCritic(FSDPEngine):
    """A decoder with a scalar head."""

    config: PPOCriticConfig
    scalar_head = True

    def __init__(self, config: PPOCriticConfig, parallel: ParallelStrategy | None = None):
        super().__init__(config, parallel)
        # Decayed running sums of (1, R, R²), from which mean and std are computed.
        self._moments = torch.zeros(3, dtype=torch.float64)

    @returns_column
    def compute_values(self, batch: Batch) -> torch.Tensor:
        """Return values `[B, T]` of the trained tokens (0 elsewhere); add `final_values [B]`.

        The advantages of truncated sequences are bootstrapped from `final_values`, the values after the last token.
        """
        mean, std = self._scale()
        raw = self.forward(batch)["values"] * std + mean
        last = (seq_lengths(batch) - 1).clamp(min=0)
        batch["final_values"] = raw.gather(1, last[:, None]).squeeze(1)
        values = torch.nn.functional.pad(raw[:, :-1], (1, 0))
        return torch.where(batch["loss_mask"].bool(), values, 0.0)

    @returns_stats
    def ppo_update(self, batch: Batch) -> list[dict[str, float]]:
        """Run `ppo_n_minibatches` optimizer steps on the value loss; return the statistics of each.

        Minibatches without a trained token on any rank make no step.
        """
        missing = [key for key in ("values", "returns") if key not in batch]
        if missing:
            raise TrainingError(
                f"the critic needs {missing} in the batch: batch['values'] = critic.compute_values(batch), then "
                "actor.compute_advantages(batch)"
            )
        trained = batch["loss_mask"].bool() & batch["attention_mask"].bool()
        # First tokens have no value to learn.
        trained[:, 0] = False
        batch = dict(batch)
        # Old values on the scale that `compute_values` used: the network has not learned the new one yet.
        mean, std = self._scale()
        batch["values"] = (batch["values"] - mean) / std
        if self.config.value_norm:
            returns = batch["returns"][trained].double()
            sums = self.sum_over_ranks(torch.tensor(len(returns)), returns.sum(), returns.square().sum())
            if all(map(math.isfinite, sums)):
                # Otherwise this batch makes no step, and its returns must not stay in the sums.
                self._moments = _DECAY * self._moments + torch.tensor(sums, dtype=torch.float64)
        mean, std = self._scale()
        batch["returns"] = (batch["returns"] - mean) / std
        parts = partition_balanced(seq_lengths(batch).tolist(), self.config.ppo_n_minibatches)
        counts = self.sum_over_ranks(*(trained[rows].sum() for rows in parts))
        minibatches = [select_rows(batch, rows) for rows, count in zip(parts, counts, strict=True) if count]
        return [self.train_batch(minibatch, self._loss, num_trained_tokens) for minibatch in minibatches]

    def _loss(self, outputs: Batch, mb: Batch) -> tuple[torch.Tensor, dict[str, Stat]]:
        values = previous_token(outputs["values"], mb["cu_seqlens"])
        mask = trained_tokens(mb)
        clip = self.config.value_eps_clip
        loss, clipped = value_loss(values, mb["values"], mb["returns"], mask, clip)
        error = torch.where(mask, mb["returns"] - values, 0.0).detach()
        return loss, {
            "value_error": Stat(error.square().sum(), mask.sum()),
            "value_clip_share": Stat(clipped.sum(), mask.sum()),
            "value/mean": Stat(torch.where(mask, values, 0.0).detach().sum(), mask.sum()),
            "return/mean": Stat(torch.where(mask, mb["returns"], 0.0).sum(), mask.sum()),
        }

    def _scale(self) -> tuple[float, float]:
        count, total, square = self._moments.tolist()
        if not self.config.value_norm or count == 0:
            return 0.0, 1.0
        mean = total / count
        return mean, max(square / count - mean * mean, 1e-4) ** 0.5

    def extra_state(self) -> dict[str, torch.Tensor]:
        return {"value_moments": self._moments.clone()}

    def load_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self._moments = state["value_moments"].clone()
