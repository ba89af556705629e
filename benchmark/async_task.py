"""The training task that `async_vs_sync.py` times; the environment selects it, and the launcher starts it.

`reverse` is the demo's task. After its answer the model may generate on for a while, like an agent that checks itself
(not trained on), and the reward may wait for a remote judge. `halves` has prompts and answers of random tokens for any
model; the reward is the share of tokens from the lower half of the vocabulary. Lengths are log-normal and drawn from
the episode's seed, so they are the same in every run.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "arealite"))
from reverse import make_rows, reverse_reward

from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import Batch, ModelRequest
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.rlvr import RLVRWorkflow

TASK = os.environ.get("BENCH_TASK", "reverse")
MEDIAN_TOKENS = float(os.environ.get("BENCH_MEDIAN_TOKENS", "0"))
SIGMA = float(os.environ.get("BENCH_SIGMA", "1.0"))
MAX_TOKENS = int(os.environ.get("BENCH_MAX_TOKENS", "400"))
REWARD_WAIT_S = float(os.environ.get("BENCH_REWARD_WAIT_S", "0"))
PROMPT_TOKENS = 64


def drawn(gconfig: GenerationHyperparameters, seed: int) -> GenerationHyperparameters:
    """A generation of log-normal length."""
    length = round(random.Random(seed).lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))
    return replace(gconfig, max_new_tokens=max(1, min(MAX_TOKENS, length)), ignore_eos=True)


class CheckedAnswer(RLVRWorkflow):
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        batch = await super().arun_episode(engine, data)
        if MEDIAN_TOKENS:
            prompt, gconfig = self.encode_prompt(data), drawn(self.gconfig, data["seed"])
            await engine.agenerate_group(ModelRequest(prompt, gconfig, seed=data["seed"]))
        return batch


class VaryingAnswer(RLVRWorkflow):
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        gconfig = drawn(self.gconfig, data["seed"])
        one = RLVRWorkflow(self.reward_fn, gconfig, self.tokenizer, reward_inline=True)
        return await one.arun_episode(engine, data)


async def judged(prompt: str, completion: str, prompt_ids, completion_ids, **data) -> float:
    await asyncio.sleep(REWARD_WAIT_S)
    return reverse_reward(prompt, completion, prompt_ids, completion_ids, **data)


def lower_half(prompt, completion, prompt_ids, completion_ids, vocab_size, **data) -> float:
    return sum(i < vocab_size // 2 for i in completion_ids) / len(completion_ids)


async def judged_half(prompt, completion, prompt_ids, completion_ids, **data) -> float:
    await asyncio.sleep(REWARD_WAIT_S)
    return lower_half(prompt, completion, prompt_ids, completion_ids, **data)


def random_rows(count: int, vocab_size: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    return [{"input_ids": prompt, "vocab_size": vocab_size} for prompt in prompts]


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.actor.path)
    if TASK == "halves":
        rows = random_rows(2048, AutoConfig.from_pretrained(config.actor.path).vocab_size)
        workflow = VaryingAnswer(
            judged_half if REWARD_WAIT_S else lower_half, config.gconfig, tokenizer, reward_inline=True
        )
    else:
        rows = make_rows(8192, seed=config.seed)
        reward = judged if REWARD_WAIT_S else reverse_reward
        workflow = CheckedAnswer(reward, config.gconfig, tokenizer, reward_inline=True)
    PPOTrainer(config, rows, tokenizer).train(workflow)


if __name__ == "__main__":
    run_main(main)
