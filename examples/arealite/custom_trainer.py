"""A trainer of your own, named in the configuration: REINFORCE with a loss written here.

    cd examples/arealite
    python -m arealite.cli.main trainer.type=custom_trainer:ReinforceTrainer trainer.args.entropy_bonus=0.01 \
        trainer.grpo.actor.path=/path/to/model train_dataset.path=/path/to/gsm8k/train.jsonl

It makes engines, data and workflow like the ready-made trainer, and has a loop and a configuration key of its own.
"""

from dataclasses import dataclass

import torch

from arealite.api.cli_args import GRPOConfig
from arealite.api.config_field import help_field
from arealite.api.io_struct import Batch, Stat
from arealite.trainer.ppo import PPOTrainer
from arealite.trainer.run import Run
from arealite.utils.data import num_trained_tokens, trained_tokens
from arealite.weights.sync import make_weight_meta, sync_weights


@dataclass
class ReinforceConfig(GRPOConfig):
    """The keys of GRPO, and one more."""

    entropy_bonus: float = help_field("Weight of the entropy.", 0.0)


class ReinforceTrainer(PPOTrainer):
    """On-policy policy gradient with advantages of the group."""

    config_class = ReinforceConfig
    config: ReinforceConfig

    def loss(self, out: Batch, batch: Batch) -> tuple[torch.Tensor, dict[str, Stat]]:
        """Return the sum of the loss over the trained tokens of a micro-batch, and statistics."""
        mask = trained_tokens(batch)
        gain = out["logp"] * batch["advantages"] + self.config.entropy_bonus * out["entropy"]
        return -gain[mask].sum(), {"entropy": Stat(out["entropy"][mask].sum().detach(), mask.sum())}

    def train(self, workflow=None, eval_workflow=None, *, resume_from_checkpoint=None) -> None:
        workflow = workflow or self.workflow
        assert workflow is not None
        parts = (self.config, self.spec, self.actor, self.rollout, self.dataloader, self.tokenizer)
        with Run(*parts, resume_from_checkpoint=resume_from_checkpoint) as run:
            weights = make_weight_meta(self.config, run.dir, self.rollout)
            for step in run.steps():
                batch = self.rollout.prepare_batch(self.dataloader, workflow)
                self.actor.compute_advantages(batch)
                stats = self.actor.train_batch(batch, self.loss, num_trained_tokens)
                self.actor.step_lr_scheduler()
                sync_weights(self.actor, self.rollout, weights.with_version(step + 1))
                run.commit(step, stats)
