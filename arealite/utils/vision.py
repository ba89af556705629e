"""`VisionProcessor`: turns text and encoded images into token ids and image tensors.

It calls the Hugging Face processor of the model, which replaces each image placeholder of a text by as many placeholder
tokens as the image has features. Used by workflows and by the embedded server, so that generation and training see the
same token ids and pixels. Videos are not supported, so processors load with Pillow alone.

K images of a prompt, P patches of all of them (Qwen-VL), D values of a patch, C channels, H and W pixels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from arealite.api.errors import ConfigError, DatasetError, RequestError
from arealite.api.io_struct import Batch
from arealite.utils.data import IMAGE_INDEX
from arealite.utils.images import check_count, decode_image, image_bytes

# What the processors of supported families return for images.
_INPUTS = ({"pixel_values", "image_grid_thw"}, {"pixel_values"})
TEXT_COLUMNS = ("prompt", "problem", "question")
_MARK = "<image>"
_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError)


@dataclass(frozen=True)
class VisionPrompt:
    """Token ids with expanded placeholders, and the images as they are and as model inputs, unpadded.

    `inputs`: `pixel_values [P, D]` with `image_grid_thw [K, 3]` (Qwen-VL), or `pixel_values [K, C, H, W]` (LLaVA);
    empty without images. `spans`: the tokens `start .. end` of each image.
    """

    input_ids: list[int]
    images: list[bytes]
    spans: list[tuple[int, int]]
    inputs: Batch

    def batch_columns(self, num_rows: int) -> Batch:
        """Return the image columns of a batch whose `num_rows` rows all share these images."""
        if not self.images:
            return {}
        columns = {key: value[None] for key, value in self.inputs.items()}
        if "image_grid_thw" not in columns:
            columns["num_images"] = torch.tensor([len(self.images)])
        return columns | {IMAGE_INDEX: torch.zeros(num_rows, dtype=torch.long)}


class VisionProcessor:
    """The processor of one vision-language model."""

    def __init__(self, processor: Any, path: str):
        self.processor, self.path = processor, path
        self.tokenizer = processor.tokenizer
        self.image_token = str(processor.image_token)
        self.image_token_id = int(processor.image_token_id)
        self.chat_template = processor.chat_template or getattr(self.tokenizer, "chat_template", None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Load it again in another process: processors without their video part cannot be pickled."""
        return VisionProcessor.load, (self.path,)

    @classmethod
    def load(cls, path: str) -> VisionProcessor:
        """Load the processor in a model folder; raises `ConfigError` if there is none that can be used."""
        try:
            return cls(_load_processor(path), path)
        except _ERRORS as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            raise ConfigError(
                f"cannot load the image processor in {path} ({reason}): give a vision-language model with its "
                "preprocessor_config.json or processor_config.json, and install Pillow (pip install 'arealite[vision]')"
            ) from error

    @property
    def placeholder_ids(self) -> list[int]:
        """Tokens that stand for images or videos. A model must not generate them: end an answer there."""
        video = getattr(self.processor, "video_token_id", None)
        return sorted({self.image_token_id, *([video] if isinstance(video, int) else [])})

    def encode(self, text: str, images: list[bytes]) -> VisionPrompt:
        """Tokenize a text that has one placeholder for each image, as the processor does."""
        pieces = text.split(self.image_token)
        if len(pieces) - 1 != len(images):
            raise RequestError(
                f"the prompt has {len(pieces) - 1} image placeholders ({self.image_token}) for {len(images)} images: "
                "give one for each image"
            )
        inputs, counts = self._features(images)
        expanded = "".join(piece + self.image_token * n for piece, n in zip(pieces, [*counts, 0], strict=True))
        # Templates that begin with the first token must not get it twice.
        first = self.tokenizer.bos_token
        has_first = bool(first) and text.startswith(first)
        ids = self.tokenizer.encode(expanded, add_special_tokens=not has_first)
        return VisionPrompt(ids, images, self._spans(ids, counts), inputs)

    def encode_messages(self, messages: list[dict[str, Any]], images: list[bytes], **variables: Any) -> VisionPrompt:
        """Apply the chat template. Parts of type `image` in the messages stand for the images, in this order."""
        if not self.chat_template:
            raise RequestError("the model's processor has no chat template: give a text with image placeholders")
        settings = {"add_generation_prompt": True} | variables
        try:
            text = self.tokenizer.apply_chat_template(
                messages, chat_template=self.chat_template, tokenize=False, **settings
            )
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError, TemplateError) as error:
            raise RequestError(f"the chat template rejects these messages: {error}") from error
        return self.encode(text, images)

    def encode_row(self, data: dict[str, Any], image_folder: str | None = None, **variables: Any) -> VisionPrompt:
        """Tokenize the prompt of a row with its images; `variables` are those of the chat template.

        A row has `images` and a prompt: `messages`, a `problem` or `question` for the chat template, or a `prompt` that
        is taken as it is. Datasets mark the place of images as <image>, whatever the model's placeholder is. Without
        marks, images come first. `input_ids` have expanded placeholders.
        """
        given = data.get("images", data.get("image"))
        listed = [] if given is None else given if isinstance(given, list | tuple) else [given]
        images = [image_bytes(image, image_folder) for image in listed]
        if data.get("messages") is not None:
            return self.encode_messages(_with_image_parts(data["messages"], len(images)), images, **variables)
        if "input_ids" in data:
            return self.match(list(data["input_ids"]), images)
        column = next((key for key in TEXT_COLUMNS if isinstance(data.get(key), str)), None)
        if column is None:
            raise DatasetError(f"a row has the columns {sorted(data)}; expected `messages` or one of {TEXT_COLUMNS}")
        text: str = data[column]
        pieces = text.split(_MARK)
        if column == "prompt" or not self.chat_template:
            missing = len(images) if len(pieces) == 1 and self.image_token not in text else 0
            return self.encode(self.image_token * missing + self.image_token.join(pieces), images)
        parts: list[dict[str, str]] = [{"type": "image"}] * (len(images) if len(pieces) == 1 else 0)
        for i, piece in enumerate(pieces):
            parts += [{"type": "image"}] * (i > 0)
            parts += [{"type": "text", "text": piece}] * bool(piece)
        return self.encode_messages([{"role": "user", "content": parts}], images, **variables)

    def match(self, input_ids: list[int], images: list[bytes]) -> VisionPrompt:
        """Pair token ids whose placeholders are expanded already with their images."""
        inputs, counts = self._features(images)
        found = input_ids.count(self.image_token_id)
        if found != sum(counts):
            raise RequestError(
                f"the prompt has {found} image placeholder tokens, but its {len(images)} images have {sum(counts)} "
                "features: send the ids that the model's processor returns for these images"
            )
        return VisionPrompt(input_ids, images, self._spans(input_ids, counts), inputs)

    def _spans(self, ids: list[int], counts: list[int]) -> list[tuple[int, int]]:
        """Return the tokens of each image, of which it has `counts`."""
        at = [i for i, token in enumerate(ids) if token == self.image_token_id]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        return [(at[start], at[start + n - 1] + 1) for start, n in zip(starts, counts, strict=True)]

    def _features(self, images: list[bytes]) -> tuple[Batch, list[int]]:
        """Return the model's inputs for all images, and the placeholder tokens of each."""
        check_count(len(images))
        outputs = [self._call(decode_image(image)) for image in images]
        counts = [int((output.pop("input_ids") == self.image_token_id).sum()) for output in outputs]
        for output in outputs:
            if output.keys() not in _INPUTS:
                raise ConfigError(
                    f"{type(self.processor).__name__} returns {sorted(output)} for images; supported are models of the "
                    "Qwen2-VL and LLaVA kinds"
                )
        keys = outputs[0].keys() if outputs else ()
        return {key: torch.cat([output[key] for output in outputs]) for key in keys}, counts

    def _call(self, picture: Any) -> Batch:
        try:
            outputs = self.processor(text=[self.image_token], images=[picture], return_tensors="pt")
        except (ValueError, ArithmeticError, LookupError, RuntimeError) as error:
            raise RequestError(f"the image processor rejects an image of {picture.size}: {error}") from error
        return {k: v for k, v in outputs.items() if k not in ("attention_mask", "mm_token_type_ids")}


def _with_image_parts(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return messages with parts for images, which come first in the user's message if there are none."""
    has_parts = any(isinstance(m.get("content"), list) for m in messages)
    first = next((i for i, m in enumerate(messages) if m.get("role") == "user"), None)
    if has_parts or not count or first is None:
        return messages
    parts = [{"type": "image"}] * count + [{"type": "text", "text": messages[first]["content"]}]
    return [*messages[:first], {**messages[first], "content": parts}, *messages[first + 1 :]]


def _load_processor(path: str) -> Any:
    """Load with `AutoProcessor`, or without the video processor, which would need torchvision."""
    config = transformers.AutoConfig.from_pretrained(path)
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise ValueError(f"transformers has no processor for model type {config.model_type!r}")
    family: Any = getattr(transformers, name)
    if "video_processor" not in family.get_attributes():
        return AutoProcessor.from_pretrained(path)
    image_only = type(name, (family,), {"check_argument_for_proper_class": lambda *_: None})
    tokenizer, images = AutoTokenizer.from_pretrained(path), AutoImageProcessor.from_pretrained(path)
    return image_only(images, tokenizer, None, chat_template=_processor_template(path))


def _processor_template(path: str) -> str | None:
    """Return the template of old folders, which have it in a file of its own."""
    file = Path(path, "chat_template.json")
    return json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.is_file() else None
