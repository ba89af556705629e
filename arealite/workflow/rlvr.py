"""`RLVRWorkflow`: one prompt, `n_samples` answers, a verifiable reward for each.

It is a template for workflows of your own. A row has `messages` (the tokenizer's chat template makes them a prompt),
`prompt` (text) or `input_ids`. The reward function gets its other columns. The executor adds `seed` to rows that have
none, so that a run can be repeated.
"""

from collections.abc import Mapping
from typing import Any

from arealite.api.chat import decode_all, encode_chat, encode_text
from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import DatasetError
from arealite.api.io_struct import Batch, ModelRequest, ModelResponse
from arealite.api.reward_api import RewardFn, check_columns, is_async
from arealite.api.trajectory import Trajectory
from arealite.api.vision_api import has_image_parts
from arealite.api.workflow_api import RolloutWorkflow
from arealite.reward.pool import RewardPool, check_rewards
from arealite.utils.distributed import rank
from arealite.utils.images.encoded import has_images
from arealite.utils.script_check import is_check

_PROMPT_COLUMNS = ("messages", "prompt", "input_ids", "seed")
_RESERVED = ("completion", "prompt_ids", "completion_ids")


class RLVRWorkflow(RolloutWorkflow):
    """Reinforcement learning with verifiable rewards.

    `reward_fn` runs in a pool of processes with a deadline (`reward_pool`, or one of its own with `reward_timeout_s`).
    It runs on the event loop if it is a coroutine function, or with `reward_inline=True`, which is only for functions
    that take microseconds.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool = False,
        reward_pool: RewardPool | None = None,
        reward_inline: bool = False,
        reward_timeout_s: float | None = None,
    ):
        self.reward_fn = reward_fn
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking
        self.reward_inline = reward_inline
        self.reward_pool = reward_pool or RewardPool(timeout_s=reward_timeout_s)
        # Only rank 0 runs episodes, and a dry run none.
        if not reward_inline and rank() == 0 and not is_check():
            self.reward_pool.warm_up(reward_fn)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        prompt_ids = self.encode_prompt(data)
        if not prompt_ids:
            raise DatasetError(f"the prompt of a row is empty: {data}")
        request = ModelRequest(prompt_ids, self.gconfig, seed=data.get("seed"))
        responses = await engine.agenerate_group(request)
        rewards = await self.compute_rewards(prompt_ids, responses, data)
        answers = [Trajectory().observe(r.input_tokens).add(r) for r in responses]
        return Trajectory.join([answer.reward(value) for answer, value in zip(answers, rewards, strict=True)])

    def check_row(self, data: dict[str, Any]) -> None:
        self.encode_prompt(data)
        check_columns(self.reward_fn, data)

    def encode_prompt(self, data: dict[str, Any]) -> list[int]:
        self.refuse_images(data)
        if "input_ids" in data:
            return list(data["input_ids"])
        if "messages" in data:
            return encode_chat(self.tokenizer, data["messages"], enable_thinking=self.enable_thinking)
        if "prompt" in data:
            return encode_text(self.tokenizer, data["prompt"])
        raise DatasetError(
            f"a row has the columns {sorted(data)}; RLVRWorkflow needs `messages`, `prompt` or `input_ids`"
        )

    def refuse_images(self, data: dict[str, Any]) -> None:
        """Raise `DatasetError` for a row with images, which would be left out."""
        messages = [m for m in data.get("messages") or () if isinstance(m, Mapping)]
        if has_images(data) or has_image_parts(messages):
            name = type(self).__name__
            raise DatasetError(f"a row has images, but {name} reads text only: use VisionRLVRWorkflow")

    async def compute_rewards(
        self, prompt_ids: list[int], responses: list[ModelResponse], data: dict[str, Any]
    ) -> list[float]:
        columns = {k: v for k, v in data.items() if k not in (*_PROMPT_COLUMNS, *_RESERVED)}
        (prompt,), answers = decode_all(self.tokenizer, [prompt_ids]), [r.output_tokens for r in responses]
        texts = decode_all(self.tokenizer, answers, skip_special_tokens=True)
        rows: list[dict[str, Any]] = [
            dict(prompt=prompt, completion=text, prompt_ids=prompt_ids, completion_ids=ids, **columns)
            for text, ids in zip(texts, answers, strict=True)
        ]
        if self.reward_inline and not is_async(self.reward_fn):
            return check_rewards(self.reward_fn, [self.reward_fn(**row) for row in rows], len(rows))
        return await self.reward_pool.run(self.reward_fn, rows)
