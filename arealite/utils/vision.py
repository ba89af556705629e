"""`VisionProcessor`: turns text and encoded images into token ids and image tensors.

It calls the Hugging Face processor of the model, which replaces each image placeholder of a text by as many placeholder
tokens as the image has features. Used by workflows and by the embedded server, so that generation and training see the
same token ids and pixels. Videos are not supported, so processors load with Pillow alone.

K images of a prompt, P patches of all of them (Qwen-VL), D values of a patch, C channels, H and W pixels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from arealite.api.vision_api import PlacedImage, has_image_parts
from arealite.utils.images.encoded import check_count, decode_image, find_images, from_data_url, image_bytes
from arealite.utils.script_check import end_check

# What the processors of supported families return for images.
_INPUTS = ({"pixel_values", "image_grid_thw"}, {"pixel_values"})
# Marks the place of an image in the texts of datasets.
_MARK = "<image>"
TEXT_COLUMNS = ("prompt", "problem", "question")
_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError)


@dataclass(frozen=True)
class VisionPrompt:
    """Token ids with expanded placeholders, and the images as they are and as model inputs, unpadded.

    `inputs`: `pixel_values [P, D]` with `image_grid_thw [K, 3]` (Qwen-VL), or `pixel_values [K, C, H, W]` (LLaVA);
    empty without images. `spans`: the tokens `start .. end` of each image. `placed`: all of it for each image alone.
    """

    input_ids: list[int]
    placed: list[PlacedImage]

    @property
    def images(self) -> list[bytes]:
        return [image.data for image in self.placed]

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(image.start, image.end) for image in self.placed]

    @property
    def inputs(self) -> Batch:
        keys = self.placed[0].inputs if self.placed else ()
        return {key: torch.cat([image.inputs[key] for image in self.placed]) for key in keys}


class VisionProcessor:
    """The processor of one vision-language model."""

    def __init__(self, processor: Any, path: str):
        self.processor, self.path = processor, path
        self.tokenizer = processor.tokenizer
        self.image_token = str(processor.image_token)
        self.image_token_id = int(processor.image_token_id)
        self.chat_template = processor.chat_template or getattr(self.tokenizer, "chat_template", None)
        # Turns behind the first are rendered by the tokenizer: by the same template.
        self.tokenizer.chat_template = self.chat_template

    def __reduce__(self) -> tuple[Any, ...]:
        """Load it again in another process: processors without their video part cannot be pickled."""
        return VisionProcessor.load, (self.path,)

    @classmethod
    def load(cls, path: str) -> VisionProcessor:
        """Load the processor in a model folder; raises `ConfigError` if there is none that can be used."""
        try:
            return cls(_load_processor(path), path)
        except _ERRORS as error:
            if not Path(path).is_dir():
                end_check(f"the image processor of {path} is not downloaded")
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
        features = self._features(images)
        counts = [*(count for _, count in features), 0]
        expanded = "".join(piece + self.image_token * n for piece, n in zip(pieces, counts, strict=True))
        # Templates that begin with the first token must not get it twice.
        first = self.tokenizer.bos_token
        has_first = bool(first) and text.startswith(first)
        ids = self.tokenizer.encode(expanded, add_special_tokens=not has_first)
        return self._placed(ids, images, features)

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

        A row has `images` (or `image`) and a prompt: `messages`, a `problem` or `question` for the chat template, or a
        `prompt` that is taken as it is. Datasets mark the place of images as <image>, whatever the model's placeholder
        is. Without marks, images come first. `input_ids` have expanded placeholders.
        """
        images = [image_bytes(image, image_folder) for image in find_images(data)]
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
        first: list[dict[str, str]] = [{"type": "image"}] * (len(images) if len(pieces) == 1 else 0)
        message = {"role": "user", "content": first + _image_parts(text)}
        return self.encode_messages([message], images, **variables)

    def match(self, input_ids: list[int], images: list[bytes]) -> VisionPrompt:
        """Pair token ids whose placeholders are expanded already with their images."""
        features = self._features(images)
        found, expected = input_ids.count(self.image_token_id), sum(count for _, count in features)
        if found != expected:
            raise RequestError(
                f"the prompt has {found} image placeholder tokens, but its {len(images)} images have {expected} "
                "features: send the ids that the model's processor returns for these images"
            )
        return self._placed(input_ids, images, features)

    def take_images(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Take the images out of messages: see `ImageReader.take_images`. No file is read."""
        images: list[bytes] = []

        def part_of(part: Any) -> Any:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "image_url":
                given = part.get("image_url")
                url = given.get("url") if isinstance(given, Mapping) else given
                images.append(from_data_url(str(url)))
            elif kind == "image":
                image = part.get("image")
                images.append(from_data_url(image) if isinstance(image, str) else image_bytes(image))
            else:
                return part
            return {"type": "image"}

        taken = [
            {**m, "content": [part_of(part) for part in m["content"]]}
            if isinstance(m.get("content"), Sequence) and not isinstance(m["content"], str)
            else dict(m)
            for m in messages
        ]
        return taken, images

    def place(self, ids: Sequence[int], images: list[bytes]) -> tuple[list[int], list[PlacedImage]]:
        """Expand the one placeholder of each image: see `ImageReader.place`."""
        found = list(ids).count(self.image_token_id)
        if found != len(images):
            raise RequestError(
                f"the messages have {found} image placeholders ({self.image_token}) for {len(images)} images: the chat "
                "template must write one for each image, and text must not contain it"
            )
        features = self._features(images)
        counts = iter([count for _, count in features])
        expanded: list[int] = []
        for token in ids:
            expanded += [token] * (next(counts) if token == self.image_token_id else 1)
        return expanded, self._placed(expanded, images, features).placed

    def _placed(self, ids: list[int], images: list[bytes], features: list[tuple[Batch, int]]) -> VisionPrompt:
        """Return a prompt whose placeholders are those of the images, with the tokens of each."""
        at = [i for i, token in enumerate(ids) if token == self.image_token_id]
        placed, first = [], 0
        for image, (inputs, count) in zip(images, features, strict=True):
            placed.append(PlacedImage(image, at[first], at[first + count - 1] + 1, inputs))
            first += count
        return VisionPrompt(ids, placed)

    def _features(self, images: list[bytes]) -> list[tuple[Batch, int]]:
        """Return the model's inputs for each image, and its number of placeholder tokens."""
        check_count(len(images))
        features = []
        for output in [self._call(decode_image(image)) for image in images]:
            ids = output.pop("input_ids")[0].tolist()
            if output.keys() not in _INPUTS:
                raise ConfigError(
                    f"{type(self.processor).__name__} returns {sorted(output)} for images; supported are models of the "
                    "Qwen2-VL and LLaVA kinds"
                )
            self._check_placeholders(ids, output)
            features.append((output, ids.count(self.image_token_id)))
        return features

    def _check_placeholders(self, ids: list[int], inputs: Batch) -> None:
        """Raise `ConfigError` if an image has tokens other than the placeholder, or several tiles."""
        count, tiles = ids.count(self.image_token_id), 1 if "image_grid_thw" in inputs else len(inputs["pixel_values"])
        if not count or tiles > 1 or ids != self.tokenizer.encode(self.image_token * count):
            raise ConfigError(
                f"{type(self.processor).__name__} makes {tiles} tile(s) of an image, and {len(ids)} tokens of which "
                f"{count} are {self.image_token}; supported are models of the Qwen2-VL and LLaVA kinds, where an image "
                "is one tile and all its tokens are the placeholder"
            )

    def _call(self, picture: Any) -> Batch:
        try:
            outputs = self.processor(text=[self.image_token], images=[picture], return_tensors="pt")
        except (ValueError, ArithmeticError, LookupError, RuntimeError) as error:
            raise RequestError(f"the image processor rejects an image of {picture.size}: {error}") from error
        return {k: v for k, v in outputs.items() if k not in ("attention_mask", "mm_token_type_ids")}


def _image_parts(text: str) -> list[dict[str, str]]:
    """Return a text as parts of a message: one of type `image` for each mark, and the text between them."""
    parts: list[dict[str, str]] = []
    for i, piece in enumerate(text.split(_MARK)):
        parts += [{"type": "image"}] * (i > 0)
        parts += [{"type": "text", "text": piece}] * bool(piece)
    return parts


def _with_image_parts(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return messages with parts for images, where texts have marks if there are no parts yet.

    Without marks, images come first in the first message of the user. What the assistant wrote has no marks.
    """
    if has_image_parts(messages):
        return messages
    placed = [message if message.get("role") == "assistant" else _split_marks(message) for message in messages]
    first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
    if has_image_parts(placed) or not count or first is None:
        return placed
    content = [*[{"type": "image"}] * count, *_text_parts(messages[first])]
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]


def _text_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _split_marks(message: dict[str, Any]) -> dict[str, Any]:
    texts = [part.get("text") for part in _text_parts(message)]
    if not any(isinstance(text, str) and _MARK in text for text in texts):
        return message
    return {**message, "content": [part for text in texts for part in _image_parts(str(text or ""))]}


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
