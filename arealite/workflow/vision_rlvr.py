"""`VisionRLVRWorkflow`: RLVR with images in the prompt, for vision-language models.

A row has `images` and a prompt (`VisionProcessor.encode_row`). The reward function gets its other columns. All answers
to a row share its images: they are processed once, sent once and stored once.
"""

import asyncio
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import Batch, ModelRequest
from arealite.api.reward_api import RewardFn, check_columns
from arealite.api.trajectory import Trajectory
from arealite.api.vision_api import stop_at_placeholders
from arealite.utils.decoders import has_vision
from arealite.utils.images.encoded import IMAGE_COLUMNS
from arealite.utils.vision import VisionProcessor, VisionPrompt
from arealite.workflow.rlvr import RLVRWorkflow


class VisionRLVRWorkflow(RLVRWorkflow):
    """Answers questions about images.

    `processor` is a `VisionProcessor`, or the folder of the model. Files that rows name are read from `image_folder`,
    if it is set, and from nowhere else. The other arguments are those of `RLVRWorkflow`.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        processor: VisionProcessor | str,
        image_folder: str | None = None,
        **settings: Any,
    ):
        self.processor = VisionProcessor.load(processor) if isinstance(processor, str) else processor
        self.image_folder = image_folder
        super().__init__(reward_fn, gconfig, self.processor.tokenizer, **settings)

    def check_row(self, data: dict[str, Any]) -> None:
        self.encode(data)
        check_columns(self.reward_fn, data)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        # Decoding takes milliseconds: the other episodes go on meanwhile.
        prompt = await asyncio.to_thread(self.encode, data)
        gconfig = stop_at_placeholders(self.processor, self.gconfig)
        images = {"images": prompt.images, "image_spans": prompt.spans}
        request = ModelRequest(prompt.input_ids, gconfig, seed=data.get("seed"), **images)
        responses = await engine.agenerate_group(request)
        columns = {key: value for key, value in data.items() if key not in IMAGE_COLUMNS}
        rewards = await self.compute_rewards(prompt.input_ids, responses, columns)
        answers = [Trajectory().observe(r.input_tokens, prompt.placed).add(r) for r in responses]
        return Trajectory.join([answer.reward(value) for answer, value in zip(answers, rewards, strict=True)])

    def encode(self, data: dict[str, Any]) -> VisionPrompt:
        """Tokenize the prompt of a row with its images."""
        return self.processor.encode_row(data, self.image_folder, enable_thinking=self.enable_thinking)


def reads_images(path: str) -> bool:
    """Return whether the model at `path` is a vision-language model.

    Some families are language models with a vision part; from a config alone these train on text.
    """
    config = AutoConfig.from_pretrained(path)
    return has_vision(config) and type(config) not in AutoModelForCausalLM._model_mapping


def make_rlvr(
    path: str, reward_fn: RewardFn, gconfig: GenerationHyperparameters, tokenizer: Any, **settings: Any
) -> RLVRWorkflow:
    """Return the workflow for the model at `path`: with images if it is a vision-language model."""
    if reads_images(path):
        return VisionRLVRWorkflow(reward_fn, gconfig, path, **settings)
    return RLVRWorkflow(reward_fn, gconfig, tokenizer, **settings)
