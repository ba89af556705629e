"""The ready loop of the GRPO/PPO family: what examples/arealite/gsm8k_grpo.py writes out, behind two calls.

Scripts call `PPOTrainer(config, rows, tokenizer).train(workflow)`. A test holds this loop and the written-out one equal
bit for bit: change both or none.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from arealite.api.cli_args import GRPOConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.api.workflow_api import RolloutWorkflow
from arealite.dataset import StatefulDataLoader
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.engine.weight_sync import make_weight_meta, sync_weights
from arealite.trainer.run import Run
from arealite.trainer.tasks import find_task
from arealite.utils.config import load_config, run_main
from arealite.utils.rundir import RunDir
from arealite.workflow.rlvr import RLVRWorkflow


class PPOTrainer:
    """Actor, optional reference, rollout client and data loader of one run."""

    def __init__(
        self, config: GRPOConfig, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
    ):
        self.config = config
        self.tokenizer = tokenizer
        self.dataloader = StatefulDataLoader(rows, config.train_dataset, seed=config.seed)
        self.spec = FinetuneSpec(
            config.total_train_epochs,
            len(rows),
            self.dataloader.batch_size,
            config.total_train_steps,
        )
        self.actor = FSDPPPOActor(config.actor)
        self.actor.initialize(self.spec)
        self.ref = FSDPEngine(config.ref) if config.ref else None
        if self.ref:
            self.ref.initialize()
        self.rollout = RemoteSGLangEngine(config.rollout, config.seed, RunDir(config).db_path)
        self.rollout.initialize(train_batch_size=self.dataloader.batch_size)

    def train(self, workflow: RolloutWorkflow) -> None:
        config, actor, rollout = self.config, self.actor, self.rollout
        with Run(config, self.spec, actor, rollout, self.dataloader, self.tokenizer) as run:
            weights = make_weight_meta(config, run.dir)
            for step in run.steps():
                with run.phase("rollout"):
                    batch = rollout.prepare_batch(self.dataloader, workflow)
                with run.phase("logp"):
                    if config.actor.prox_logp == "recompute":
                        batch["prox_logp"] = actor.compute_logp(batch)
                    if self.ref:
                        batch["ref_logp"] = self.ref.forward(batch)["logp"]
                with run.phase("update"):
                    actor.compute_advantages(batch)
                    stats = actor.ppo_update(batch)
                    actor.step_lr_scheduler()
                with run.phase("weights"):
                    sync_weights(actor, rollout, weights.with_version(step + 1))
                run.commit(step, stats)


def main(argv: list[str]) -> None:
    """What `arealite.cli.main` starts on every rank."""
    config = load_config(argv, GRPOConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path or config.actor.path)
    task = find_task(config.train_dataset)
    workflow = RLVRWorkflow(task.reward, config.gconfig, tokenizer)
    rows = task.rl_rows(config.train_dataset, tokenizer)
    PPOTrainer(config, rows, tokenizer).train(workflow)


if __name__ == "__main__":
    run_main(main)
