"""A loss of your own in a plain loop: REINFORCE instead of the objective of `actor.algorithm`.

    python -m arealite.launcher.local examples/arealite/custom_loss.py \
        --config examples/arealite/configs/custom_loss.yaml actor.path=/path/to/model
"""

import torch

from arealite.api.cli_args import GRPOConfig
from arealite.api.io_struct import Batch, Stat
from arealite.dataset import get_gsm8k_rl, load_tokenizer
from arealite.reward.gsm8k import gsm8k_reward
from arealite.trainer.ppo import PPOTrainer
from arealite.trainer.run import Run
from arealite.utils.config import load_config, run_main
from arealite.utils.data import num_trained_tokens, trained_tokens
from arealite.weights.sync import make_weight_meta, sync_weights
from arealite.workflow.rlvr import RLVRWorkflow


def reinforce(out: Batch, batch: Batch) -> tuple[torch.Tensor, dict[str, Stat]]:
    """Return the sum of the loss over the trained tokens of a packed micro-batch, and statistics."""
    mask = trained_tokens(batch)
    ratio = (out["logp"].detach() - batch["logprobs"]).exp()
    stats = {"ratio/mean": Stat(ratio[mask].sum(), mask.sum())}
    # Stale samples count as much as the current policy would have sampled them, at most twice.
    return -(ratio.clamp(max=2.0) * out["logp"] * batch["advantages"])[mask].sum(), stats


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    workflow = RLVRWorkflow(gsm8k_reward, config.gconfig, tokenizer)
    # The trainer makes engines and data loader; the loop is here.
    made = PPOTrainer(config, get_gsm8k_rl(config.train_dataset, tokenizer), tokenizer)
    actor, rollout = made.actor, made.rollout
    with Run(config, made.spec, actor, rollout, made.dataloader, tokenizer) as run:
        weights = make_weight_meta(config, run.dir, rollout)
        for step in run.steps():
            batch = rollout.prepare_batch(made.dataloader, workflow)
            actor.compute_advantages(batch)
            stats = actor.train_batch(batch, reinforce, num_trained_tokens)
            actor.step_lr_scheduler()
            sync_weights(actor, rollout, weights.with_version(step + 1))
            run.commit(step, stats)


if __name__ == "__main__":
    run_main(main)
