"""`VisionRLVRWorkflow`: RLVR with images in the prompt, for vision-language models.

A row has `images` (encoded bytes, paths, PIL images or what `datasets` holds) and a prompt: `messages`, `prompt` or
`problem` (text). Where the text has no placeholder, the images come first. All answers to a row share its images.
"""

import asyncio
from dataclasses import replace
from typing import Any

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import DatasetError
from arealite.api.io_struct import Batch, ModelRequest
from arealite.api.reward_api import RewardFn
from arealite.api.trajectory import Trajectory
from arealite.utils.images import image_bytes
from arealite.utils.vision import VisionProcessor, VisionPrompt
from arealite.workflow.rlvr import RLVRWorkflow

IMAGE_COLUMNS = ("images", "image")


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

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        # Decoding takes milliseconds: the other episodes go on meanwhile.
        prompt = await asyncio.to_thread(self.encode, data)
        # A sampled placeholder would have no image: the answer ends there.
        stops = [*self.gconfig.stop_token_ids, *self.processor.placeholder_ids]
        gconfig = replace(self.gconfig, stop_token_ids=list(dict.fromkeys(stops)))
        images = {"images": prompt.images, "image_spans": prompt.spans}
        request = ModelRequest(prompt.input_ids, gconfig, seed=data.get("seed"), **images)
        responses = await engine.agenerate_group(request)
        columns = {key: value for key, value in data.items() if key not in IMAGE_COLUMNS}
        rewards = await self.compute_rewards(prompt.input_ids, responses, columns)
        answers = [Trajectory().observe(r.input_tokens).add(r) for r in responses]
        batch = Trajectory.join([answer.reward(value) for answer, value in zip(answers, rewards, strict=True)])
        return batch | prompt.batch_columns(len(responses))

    def encode(self, data: dict[str, Any]) -> VisionPrompt:
        """Tokenize the prompt of a row with its images."""
        return encode_row(self.processor, data, self.image_folder, enable_thinking=self.enable_thinking)


def encode_row(
    processor: VisionProcessor, data: dict[str, Any], image_folder: str | None = None, **variables: Any
) -> VisionPrompt:
    """Tokenize the prompt of a row with its images; `variables` are those of the chat template."""
    given = data.get("images", data.get("image"))
    images = [] if given is None else given if isinstance(given, list | tuple) else [given]
    encoded = [image_bytes(image, image_folder) for image in images]
    messages = data.get("messages")
    if messages is not None:
        return processor.encode_messages(_with_images(messages, len(encoded)), encoded, **variables)
    text = next((data[key] for key in ("prompt", "problem", "question") if isinstance(data.get(key), str)), None)
    if text is None:
        raise DatasetError(f"a row has the columns {sorted(data)}; expected `messages`, `prompt` or `problem`")
    # Datasets mark images as <image>, whatever the model's placeholder is.
    marked = text.replace("<image>", processor.image_token)
    if processor.chat_template is None:
        missing = len(encoded) if processor.image_token not in marked else 0
        return processor.encode(processor.image_token * missing + marked, encoded)
    pieces = text.split("<image>")
    parts: list[dict[str, str]] = [{"type": "image"}] * len(encoded) if len(pieces) == 1 else []
    for i, piece in enumerate(pieces):
        parts += [{"type": "image"}] * (i > 0)
        parts += [{"type": "text", "text": piece}] * bool(piece)
    return processor.encode_messages([{"role": "user", "content": parts}], encoded, **variables)


def _with_images(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return messages with parts for images, which come first in the user's message if there are none."""
    has_parts = any(isinstance(m.get("content"), list) for m in messages)
    first = next((i for i, m in enumerate(messages) if m.get("role") == "user"), None)
    if has_parts or not count or first is None:
        return messages
    parts = [{"type": "image"}] * count + [{"type": "text", "text": messages[first]["content"]}]
    return [*messages[:first], {**messages[first], "content": parts}, *messages[first + 1 :]]
