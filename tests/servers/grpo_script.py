"""A few GRPO steps as any script would take them, with whatever servers the launcher was told to start."""

import json
import os

from transformers import AutoTokenizer

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import GRPOConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.controller.factory import make_engine
from arealite.dataset import StatefulDataLoader, get_gsm8k_rl
from arealite.engine.backends import remote_engine_class
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.trainer.run import Run
from arealite.utils.config import load_config, run_main
from arealite.utils.distributed import rank
from arealite.utils.rundir import RunDir
from arealite.weights.sync import make_weight_meta, sync_weights
from arealite.workflow.rlvr import RLVRWorkflow


def reward(prompt: str, completion: str, prompt_ids, completion_ids, **data) -> float:
    """A reward that random weights get sometimes, so that groups differ."""
    return float(sum(character in "aeiou" for character in completion) > 0)


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.actor.path)
    rows = get_gsm8k_rl(config.train_dataset, tokenizer)
    dataloader = StatefulDataLoader(rows, config.train_dataset, seed=config.seed)
    spec = FinetuneSpec(99, len(rows), dataloader.batch_size, config.total_train_steps)
    actor = make_engine(FSDPPPOActor, config.actor, AllocationMode.from_str(config.allocation_mode).train)
    actor.initialize(spec)
    run_dir = RunDir(config)
    client = remote_engine_class(config.allocation_mode)
    rollout = make_engine(client, config.rollout, config.seed, run_dir.db_path)
    rollout.initialize(train_batch_size=dataloader.batch_size)
    workflow = RLVRWorkflow(reward, config.gconfig, tokenizer, reward_inline=True)
    with Run(config, spec, actor, rollout, dataloader, tokenizer) as run:
        weights = make_weight_meta(config, run.dir)
        for step in run.steps():
            with run.phase("rollout"):
                batch = rollout.prepare_batch(dataloader, workflow)
            trained = batch["loss_mask"].bool()
            # Compare the server's log-probs with a forward pass of the trainer, for sequences of the current weights.
            is_current = (batch["versions"] == rollout.get_version()) | ~trained
            fresh = trained & is_current.all(1, keepdim=True)
            batch["prox_logp"] = actor.compute_logp(batch)
            gap = (batch["prox_logp"] - batch["logprobs"])[fresh].abs().max().item() if fresh.any() else 0.0
            lag = int((rollout.get_version() - batch["versions"][trained]).max())
            actor.compute_advantages(batch)
            stats = actor.ppo_update(batch)
            actor.step_lr_scheduler()
            sync_weights(actor, rollout, weights.with_version(step + 1))
            run.commit(step, stats)
            if rank() == 0:
                line = {"step": step, "gap": gap, "fresh": int(fresh.sum()), "lag": lag}
                line["attempt"] = os.environ["AREALITE_ATTEMPT"]
                with (run_dir.path / "checks.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    run_main(main)
