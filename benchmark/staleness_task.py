"""The task of `staleness.py`: samples that are exactly as old as the staleness limit allows.

A normal run uses fresher samples where it can. Here a batch is used only when everything but the newest batch has been
generated, so that its samples come from η versions ago. The last weights are evaluated on held-out prompts. The
launcher starts it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "arealite"))
from reverse import make_rows, reverse_reward

from arealite.api.cli_args import GRPOConfig
from arealite.api.io_struct import Batch
from arealite.engine.remote.collecting import CollectingEngine
from arealite.trainer.ppo import PPOTrainer
from arealite.trainer.tasks import find_reward, load_rl
from arealite.utils.config import load_config, run_main
from arealite.workflow.rlvr import RLVRWorkflow

PATIENCE_S = 600.0


def hold_back(rollout: CollectingEngine, batch_size: int) -> None:
    """Make `rollout.prepare_batch` wait for as many buffered episodes as its staleness limit allows."""
    prepare, executor = rollout.prepare_batch, rollout.executor
    wanted = executor.config.max_head_offpolicyness * batch_size

    def prepare_old(dataloader, workflow) -> Batch:
        deadline = time.monotonic() + PATIENCE_S
        while executor.stats()["version"] and executor.stats()["buffered"] < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{executor.stats()} instead of {wanted} buffered episodes")
            time.sleep(0.005)
        return prepare(dataloader, workflow)

    rollout.prepare_batch = prepare_old  # pyright: ignore[reportAttributeAccessIssue]


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.actor.path)
    if config.train_dataset.path == "generated":
        reward = reverse_reward
        rows, valid_rows = make_rows(16384, seed=config.seed), make_rows(512, seed=99, held_out=True)
    else:
        reward = find_reward(config.train_dataset, config.reward)
        rows = load_rl(config.train_dataset, tokenizer)
        valid_rows = {name: load_rl(data, tokenizer) for name, data in config.validation_sets.items()}
    workflow = RLVRWorkflow(reward, config.gconfig, tokenizer, reward_inline=True)
    trainer = PPOTrainer(config, rows, tokenizer, valid_rows)
    if not config.rollout.adaptive_lead:
        hold_back(trainer.rollout, config.train_dataset.batch_size)
    trainer.train(workflow)


if __name__ == "__main__":
    run_main(main)
