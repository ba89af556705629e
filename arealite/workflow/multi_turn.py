"""`MultiTurnWorkflow`: the model answers, hears that it is wrong, and tries again for less reward.

Rows and rewards are those of `RLVRWorkflow`. All turns of a sample are one trajectory; the feedback between them is not
trained on.
"""

from collections.abc import Callable
from typing import Any

from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import RequestError
from arealite.api.io_struct import Batch, ModelRequest, ModelResponse
from arealite.api.reward_api import Score
from arealite.api.trajectory import Trajectory
from arealite.workflow.groups import play_all
from arealite.workflow.rlvr import RLVRWorkflow

# Returns what the model hears after a reply that earned too little: the row, the reply's text and its reward.
Feedback = Callable[[dict[str, Any], str, float], str]
DEFAULT_FEEDBACK = "Your answer is wrong. Think again, and give another answer."


class MultiTurnWorkflow(RLVRWorkflow):
    """Up to `max_turns` answers to one question.

    An answer whose reward is at least `success` ends the episode. The reward of an episode is that of its last answer,
    times `turn_discount` for each answer before it. Parts of rewards become the statistics `NAME`, of the last answer,
    and `turnK/NAME`, of answer K. Other arguments are those of `RLVRWorkflow`.
    """

    def __init__(
        self,
        *args: Any,
        max_turns: int = 2,
        turn_discount: float = 0.9,
        success: float = 1.0,
        feedback: str | Feedback = DEFAULT_FEEDBACK,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}; it must be at least 1")
        self.max_turns, self.turn_discount, self.success, self.feedback = max_turns, turn_discount, success, feedback

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        prompt_ids = self.encode_prompt(data)
        # The first answers share the prompt's prefill.
        responses = await engine.agenerate_group(ModelRequest(prompt_ids, self.gconfig, seed=data.get("seed")))
        rewards = await self.compute_rewards(prompt_ids, responses, data)
        plays = (
            self._continue(engine, data, response, reward, index)
            for index, (response, reward) in enumerate(zip(responses, rewards, strict=True))
        )
        return Trajectory.join(await play_all(plays))

    async def _continue(
        self, engine: InferenceEngine, data: dict[str, Any], response: ModelResponse, reward: float, index: int
    ) -> Trajectory:
        trajectory = Trajectory(self.tokenizer, enable_thinking=self.enable_thinking)
        trajectory.observe(response.input_tokens).add(response)
        seed, num_turns, scores = data.get("seed"), 1, [reward]
        while reward < self.success and num_turns < self.max_turns:
            text = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            hint = self.feedback if isinstance(self.feedback, str) else self.feedback(data, text, reward)
            trajectory.observe({"role": "user", "content": hint} if self._is_chat(data) else hint)
            try:
                # Sampling depends on seed and position: the seed may be that of the turn before.
                response = await engine.agenerate(
                    trajectory.request(self.gconfig, None if seed is None else seed + index)
                )
            except RequestError:
                # The first turn was accepted: the conversation has become longer than the model's context.
                trajectory.truncated = True
                break
            trajectory.add(response)
            num_turns += 1
            (reward,) = await self.compute_rewards(response.input_tokens, [response], data)
            scores.append(reward)
        trajectory.stat("turns", num_turns).stat("success", float(reward >= self.success))
        parts = [score.parts if isinstance(score, Score) else {} for score in scores]
        trajectory.stats |= parts[-1]
        trajectory.stats |= {f"turn{i}/{name}": value for i, own in enumerate(parts, 1) for name, value in own.items()}
        return trajectory.reward(reward * self.turn_discount ** (num_turns - 1))

    def _is_chat(self, data: dict[str, Any]) -> bool:
        return "messages" in data or ("input_ids" in data and bool(self.tokenizer.chat_template))
