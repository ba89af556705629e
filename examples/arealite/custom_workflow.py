"""A workflow of your own, named in the configuration: no script is needed.

    cd examples/arealite
    python -m arealite.cli.main workflow=custom_workflow:SecondChance workflow_args.second_reward=0.5 \
        trainer.grpo.actor.path=/path/to/model train_dataset.path=/path/to/gsm8k/train.jsonl

The constructor gets by name what it asks for (`gconfig`, `tokenizer`, `reward_fn`, `reward_pool`), and `workflow_args`.
"""

import asyncio
from typing import Any

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import Batch
from arealite.api.rollout_api import RolloutWorkflow
from arealite.api.trajectory import Trajectory


class SecondChance(RolloutWorkflow):
    """Ask once. If the reply does not contain the answer, say so and let the model try again for less reward."""

    def __init__(self, gconfig: GenerationHyperparameters, tokenizer: Any, second_reward: float = 0.5):
        self.gconfig, self.tokenizer, self.second_reward = gconfig, tokenizer, second_reward

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        plays = [self.play(engine, data, data["seed"] + i) for i in range(self.gconfig.n_samples)]
        return Trajectory.join(await asyncio.gather(*plays))

    async def play(self, engine: InferenceEngine, data: dict[str, Any], seed: int) -> Trajectory:
        trajectory = Trajectory(self.tokenizer).observe(data["messages"])
        for number, reward in enumerate((1.0, self.second_reward), 1):
            reply = await trajectory.generate(engine, self.gconfig, seed)
            trajectory.stat("tries", number)
            if str(data["answer"]) in reply:
                return trajectory.reward(reward)
            if number == 1:
                trajectory.observe({"role": "user", "content": "That is wrong. Try again."})
        return trajectory.reward(0.0)
