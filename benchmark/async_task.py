"""The work that `async_vs_sync.py` times: the demo's task, with a second generation of log-normal length and a slow reward.

After its answer every episode lets the model go on for a while (as an agent that checks itself would; not trained on), the length drawn from the
episode's seed, and then waits for its reward as for a remote judge. Started through the launcher; the environment says how long.
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

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "arealite"))
from reverse import make_rows, reverse_reward

from arealite.api.cli_args import GRPOConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import Batch, ModelRequest
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.rlvr import RLVRWorkflow

MEDIAN_TOKENS = float(os.environ.get("BENCH_MEDIAN_TOKENS", "0"))
SIGMA = float(os.environ.get("BENCH_SIGMA", "1.0"))
MAX_TOKENS = int(os.environ.get("BENCH_MAX_TOKENS", "400"))
REWARD_WAIT_S = float(os.environ.get("BENCH_REWARD_WAIT_S", "0"))


class Varying(RLVRWorkflow):
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        batch = await super().arun_episode(engine, data)
        if MEDIAN_TOKENS:
            drawn = random.Random(data["seed"]).lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)
            length = max(1, min(MAX_TOKENS, round(drawn)))
            gconfig = replace(self.gconfig, max_new_tokens=length, ignore_eos=True)
            prompt = self.tokenizer.encode(data["prompt"])
            await engine.agenerate_group(ModelRequest(prompt, gconfig, seed=data["seed"]))
        if REWARD_WAIT_S:
            await asyncio.sleep(REWARD_WAIT_S)
        return batch


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = AutoTokenizer.from_pretrained(config.actor.path)
    workflow = Varying(reverse_reward, config.gconfig, tokenizer, reward_inline=True)
    PPOTrainer(config, make_rows(8192, seed=config.seed), tokenizer).train(workflow)


if __name__ == "__main__":
    run_main(main)
