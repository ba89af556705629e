"""The job for fault injection: a tiny model, GRPO through the launcher, and a workflow that misbehaves now and then.

The seed of a row alone decides how it misbehaves, so that an episode that runs again after a crash does the same.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from typing import Any

import torch
from transformers import AutoTokenizer

from arealite.api.cli_args import GRPOConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import Batch
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.rlvr import RLVRWorkflow

MISBEHAVE = float(os.environ.get("CHAOS_MISBEHAVE", "0.2"))
# Seconds of an episode: slower steps than those of a small model.
DURATION_S = float(os.environ.get("CHAOS_DURATION_S", "0"))


def vowels(prompt: str, completion: str, prompt_ids, completion_ids, **data) -> float:
    return sum(c in "aeiou" for c in completion) / max(1, len(completion))


class Unruly(RLVRWorkflow):
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        rng = random.Random(data["seed"])
        if rng.random() < MISBEHAVE:
            fault = rng.choices(["raise", "reject", "hang", "exit"], [4, 4, 1, 4])[0]
            if fault == "raise":
                raise ValueError("chaos: a workflow raises")
            if fault == "exit":
                sys.exit("chaos: a workflow exits")
            if fault == "reject":
                return None
            if fault == "hang":
                await asyncio.Event().wait()
        await asyncio.sleep(DURATION_S)
        batch = await super().arun_episode(engine, data)
        assert batch is not None
        if rng.random() < MISBEHAVE / 4:
            batch["rewards"] = torch.full_like(batch["rewards"], float("nan"))
        elif rng.random() < MISBEHAVE / 4:
            batch["logprobs"] = batch["logprobs"][:, :-1]
        return batch


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.actor.path)
    workflow = Unruly(vowels, config.gconfig, tokenizer, reward_inline=True)
    rows = [{"prompt": f"word {i}: "} for i in range(512)]
    PPOTrainer(config, rows, tokenizer).train(workflow)


if __name__ == "__main__":
    run_main(main)
