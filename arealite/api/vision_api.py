"""Images in sequences of tokens: what workflows, sessions and batches hold of them.

`Trajectory` and the gateway's sessions collect a `PlacedImage` for every image of a conversation, in any turn.
`image_columns` makes the image columns of a batch. `utils.vision.VisionProcessor` is the `ImageReader`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import RequestError
from arealite.api.io_struct import IMAGE_FILES, IMAGE_INDEX, IMAGE_NAMES, Batch

# Larger images are not kept beside rollouts.
MAX_KEPT_IMAGE = 1 << 20
_LENGTH_BYTES = 4


@dataclass(frozen=True)
class PlacedImage:
    """An encoded image in a sequence of tokens.

    The tokens `start .. end` stand for it. `inputs` are those of the model.
    """

    data: bytes
    start: int
    end: int
    inputs: Batch = field(compare=False, repr=False)

    def shifted(self, count: int) -> PlacedImage:
        """Return the image `count` tokens further."""
        return replace(self, start=self.start + count, end=self.end + count)


class ImageReader(Protocol):
    """Reads the images of messages and finds out how many tokens each has."""

    tokenizer: Any

    @property
    def placeholder_ids(self) -> list[int]: ...

    def take_images(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Return messages with image parts without data (`{"type": "image"}`), and the images in order."""
        ...

    def place(self, ids: Sequence[int], images: list[bytes]) -> tuple[list[int], list[PlacedImage]]:
        """Expand the one placeholder of each image in `ids`; returns tokens and placed images."""
        ...


def has_image_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether content of a message has a part that is no text."""
    contents = [message.get("content") for message in messages]
    return any(
        isinstance(part, Mapping) and part.get("type", "text") != "text"
        for content in contents
        if isinstance(content, Sequence) and not isinstance(content, str)
        for part in content
    )


def stop_at_placeholders(reader: ImageReader, gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
    """Return parameters with which an answer ends at a sampled placeholder: it would have no image."""
    stops = dict.fromkeys([*gconfig.stop_token_ids, *reader.placeholder_ids])
    return replace(gconfig, stop_token_ids=list(stops))


def check_sampled(reader: ImageReader, sampled: Sequence[int]) -> None:
    """Raise `RequestError` if the model has sampled a placeholder, for which there is no image."""
    found = [token for token in reader.placeholder_ids if token in sampled]
    if found:
        raise RequestError(
            f"the model has sampled the image placeholder (token {found[0]}): the conversation ends there"
        )


def image_columns(rows: Sequence[Sequence[PlacedImage]]) -> Batch:
    """Return the image columns of a batch, given the images of each row in token order.

    Rows with the same images share one image set. Empty if no row has an image.
    """
    keys = [tuple(image.data for image in row) for row in rows]
    sets = {key: row for key, row in zip(keys, rows, strict=True) if key}
    if not sets:
        return {}
    numbers = {key: i for i, key in enumerate(sets)}
    names = next(iter(sets.values()))[0].inputs
    columns: Batch = {}
    for name in names:
        joined = [torch.cat([image.inputs[name] for image in row]) for row in sets.values()]
        columns[name] = pad_sequence(joined, batch_first=True)
    if "image_grid_thw" not in columns:
        columns["num_images"] = torch.tensor([len(row) for row in sets.values()])
    columns |= _kept_columns([[image.data for image in row] for row in sets.values()])
    return columns | {IMAGE_INDEX: torch.tensor([numbers.get(key, -1) for key in keys])}


def _kept_columns(sets: list[list[bytes]]) -> Batch:
    """Return hashes `[I, K]` and files `[I, L]`: behind each other, each with its length in front."""
    names, files = [], []
    for images in sets:
        kept = [image for image in images if len(image) <= MAX_KEPT_IMAGE]
        names.append(torch.tensor([_hash(image) if len(image) <= MAX_KEPT_IMAGE else 0 for image in images]))
        joined = b"".join(len(image).to_bytes(_LENGTH_BYTES, "little") + image for image in kept)
        files.append(torch.frombuffer(bytearray(joined or b"\0"), dtype=torch.uint8))
    return {IMAGE_NAMES: pad_sequence(names, batch_first=True), IMAGE_FILES: pad_sequence(files, batch_first=True)}


def _hash(image: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(image, digest_size=8).digest(), "big") >> 1


def kept_images(batch: Batch) -> dict[int, bytes]:
    """Return the encoded images that a batch carries, by their hashes."""
    found: dict[int, bytes] = {}
    if IMAGE_NAMES not in batch or IMAGE_FILES not in batch:
        return found
    for names, files in zip(batch[IMAGE_NAMES].tolist(), batch[IMAGE_FILES], strict=True):
        data, start = files.numpy(force=True).tobytes(), 0
        for name in names:
            if name:
                length = int.from_bytes(data[start : start + _LENGTH_BYTES], "little")
                start += _LENGTH_BYTES
                found[name] = data[start : start + length]
                start += length
    return found
