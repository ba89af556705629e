"""Images in the embedded engine: prompts with images, and the decoders that read them.

`read_prompt` makes token ids and image tensors on any thread. On the engine's thread `VisionDecoder` computes the
embeddings of a prompt's images once, puts them in place of the placeholders and runs the language model. Prefixes are
shared only between prompts with the same images: the key of a cache block includes the hashes of the images in it.
Models of the Qwen2-VL kind have positions in time, height and width (M-RoPE); after the last image they are the
token's index plus `rope_delta`.

Legend: P prompt tokens, N tokens of a step, F placeholder tokens of a prompt, H hidden size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError, RequestError
from arealite.api.io_struct import Batch
from arealite.utils.decoders import IMAGE_FAMILIES, has_vision, language_model, rope_positions
from arealite.utils.vision import VisionProcessor, VisionPrompt

# Numbers in the images of one pass through the vision tower; one prompt may have more.
_MAX_PIXEL_VALUES = 1 << 24


@dataclass(eq=False)
class PromptImages:
    """The images of one prompt: model inputs, and the tokens that stand for each image."""

    inputs: Batch
    spans: list[tuple[int, int]]  # [start, end) of each image's placeholders
    digests: list[bytes]
    rope: np.ndarray | None  # [3, P]
    rope_delta: int
    # [F, H], with the decoder and the version of its weights that computed them.
    embeddings: tuple[Any, int, torch.Tensor] | None = field(default=None, repr=False)

    def salt(self, start: int, end: int) -> bytes:
        """What distinguishes tokens `start .. end` from those of prompts with other images."""
        pairs = zip(self.spans, self.digests, strict=True)
        return b"".join(digest for (first, last), digest in pairs if first < end and last > start)

    def positions(self, start: int, end: int) -> np.ndarray | None:
        """Positions [3, end - start] of tokens in time, height and width; None if the model has none."""
        if self.rope is None:
            return None
        known = self.rope[:, start:end]
        later = np.arange(max(start, self.rope.shape[1]), end) + self.rope_delta
        return np.concatenate([known, np.broadcast_to(later, (3, len(later)))], axis=1)


def is_served(config: PreTrainedConfig) -> bool:
    """Return whether the engine can run this vision-language model with images."""
    return has_vision(config) and config.model_type in IMAGE_FAMILIES


def check_served(config: PreTrainedConfig, server: ServerConfig, device: torch.device) -> None:
    """Raise `ConfigError` for a vision-language model that cannot be served as configured."""
    if config.model_type not in IMAGE_FAMILIES:
        raise ConfigError(
            f"model type {config.model_type!r} reads images in a way that the embedded engine does not know (it serves "
            f"{', '.join(IMAGE_FAMILIES)}): serve it with sglang or vllm"
        )
    if server.tensor_parallel > 1:
        raise ConfigError(
            f"the embedded engine serves vision-language models on one device only, not with tensor_parallel="
            f"{server.tensor_parallel}: set tensor_parallel=1, or use sglang or vllm"
        )
    if server.deterministic and device.type != "cpu":
        raise ConfigError(
            f"deterministic=true cannot be used with a vision-language model on {device.type}: set "
            "deterministic=false, or device=cpu"
        )


def read_prompt(
    model: PreTrainedModel,
    processor: VisionProcessor | None,
    prompt: list[int] | str | list[dict[str, Any]],
    images: list[bytes],
    **variables: Any,
) -> tuple[list[int], PromptImages | None]:
    """Return token ids of a prompt, and its images.

    Args:
        prompt: token ids with expanded placeholders, a text with one placeholder for each image, or messages whose
            parts of type `image` stand for the images.
        images: encoded images.
        variables: of the chat template.
    """
    if processor is None:
        raise RequestError("the served model reads no images, or its folder has no image processor")
    if isinstance(prompt, str):
        encoded = processor.encode(prompt, images)
    elif prompt and isinstance(prompt[0], dict):
        messages: Any = prompt
        encoded = processor.encode_messages(messages, images, **variables)
    else:
        ids: Any = prompt
        encoded = processor.match(ids, images)
    return encoded.input_ids, place_images(model, encoded)


def place_images(model: PreTrainedModel, prompt: VisionPrompt) -> PromptImages | None:
    """Return the images of a prompt with their positions; None if it has none."""
    if not prompt.images:
        return None
    rope, delta = None, 0
    if "image_grid_thw" in prompt.inputs:
        ids = torch.tensor([prompt.input_ids])
        found = rope_positions(model, ids, torch.ones_like(ids), prompt.inputs["image_grid_thw"])
        if found is not None:
            rope = found[:, 0].numpy()
            delta = int(rope.max()) + 1 - rope.shape[1]
    digests = [hashlib.sha256(image).digest() for image in prompt.images]
    return PromptImages(prompt.inputs, prompt.spans, digests, rope, delta)


class VisionDecoder:
    """The language model of a vision-language model, with images in its inputs."""

    def __init__(self, model: PreTrainedModel):
        self.body: Any = model.base_model
        self.text = language_model(model)
        self.head: Any = model.get_output_embeddings()
        self.has_grid = hasattr(self.body, "get_rope_index")
        self.device = self.head.weight.device
        self.version = 0

    def reload(self) -> None:
        """Forget the embeddings of all images: the weights have changed."""
        self.version += 1

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [N, H] of token ids."""
        return self.text.get_input_embeddings()(ids)

    def insert(self, target: torch.Tensor, images: PromptImages, start: int) -> None:
        """Put the embeddings of images over those of the prompt's tokens `start ..`, which are in `target`."""
        assert images.embeddings is not None
        done, end = 0, start + len(target)
        for first, last in images.spans:
            low, high = max(first, start), min(last, end)
            if low < high:
                target[low - start : high - start] = images.embeddings[2][done + low - first : done + high - first]
            done += last - first

    def compute(self, prompts: list[PromptImages], one_by_one: bool = False) -> None:
        """Compute the image embeddings of prompts that have none yet under the current weights."""
        missing: list[PromptImages] = []
        size = 0
        for images in dict.fromkeys(prompts):
            if images.embeddings is None or images.embeddings[:2] != (self, self.version):
                count = images.inputs["pixel_values"].numel()
                if missing and (one_by_one or size + count > _MAX_PIXEL_VALUES):
                    self._compute(missing)
                    missing, size = [], 0
                missing.append(images)
                size += count
        if missing:
            self._compute(missing)

    def _compute(self, prompts: list[PromptImages]) -> None:
        keys = prompts[0].inputs
        inputs = {key: torch.cat([images.inputs[key] for images in prompts]).to(self.device) for key in keys}
        features = torch.cat(list(self.body.get_image_features(**inputs, return_dict=True).pooler_output))
        sizes = [sum(end - start for start, end in images.spans) for images in prompts]
        for images, part in zip(prompts, features.split(sizes), strict=True):
            images.embeddings = (self, self.version, part)

    def hidden(self, embeddings: torch.Tensor, positions: torch.Tensor, paged: Any) -> torch.Tensor:
        """Last hidden states [N, H] of embeddings [N, H] at positions [3, N]."""
        at = positions[:, None] if self.has_grid else positions[:1]
        out = self.text(inputs_embeds=embeddings[None], position_ids=at, use_cache=False, paged=paged)
        return out.last_hidden_state[0]

    def logits(self, embeddings: torch.Tensor, positions: torch.Tensor, paged: Any) -> torch.Tensor:
        """Logits [N, V]."""
        return self.head(self.hidden(embeddings, positions, paged))
