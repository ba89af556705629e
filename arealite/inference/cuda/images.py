"""Prompts with images on the device: the vision tower, and prefills by embeddings.

Owned by the CUDA runner of a vision-language model. The vision tower of the Hugging Face model and a prefill that
contains images run outside of graphs; all other passes are the graphs of text. Their angles are those of the position
plus `rope_delta`, by which the images of a prompt move the text behind them.

Legend: S slots (row S is padding), N tokens of a prefill, H hidden size, D head size.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from arealite.api.errors import ConfigError
from arealite.inference.cuda.fused_model import FusedDecoder
from arealite.inference.cuda.ops import DeviceBatch
from arealite.inference.scheduler import Chunk
from arealite.inference.slots import SlotTable
from arealite.inference.vision import PromptImages, VisionDecoder


class ImagePrefill:
    """Computes chunks of prompts with images."""

    def __init__(self, model: PreTrainedModel, decoder: object):
        if not isinstance(decoder, FusedDecoder):
            raise ConfigError(
                f"the language model of {type(model).__name__} has layers that cannot read images on CUDA: set "
                "device=cpu, or serve it with sglang or vllm"
            )
        self.decoder, self.vision = decoder, VisionDecoder(model)
        self.slots: SlotTable  # set by `attach`, with the table below
        self.rope_delta: torch.Tensor  # [S + 1]

    def attach(self, slots: SlotTable) -> None:
        """Read sequences from this table."""
        self.slots = slots
        self.rope_delta = torch.zeros(slots.num_slots + 1, dtype=torch.int32, device=self.vision.device)

    def take(self, rows: np.ndarray) -> None:
        """Copy `rope_delta` of the slots `rows` to the device."""
        delta = torch.from_numpy(self.slots.rope_delta[rows].astype(np.int32))
        self.rope_delta[torch.from_numpy(rows).to(self.vision.device)] = delta.to(self.vision.device)

    def rope(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Positions [N] in the tables of angles of text behind all images; None: the index."""
        return positions + self.rope_delta.index_select(0, rows) if self.vision.has_grid else None

    def is_needed(self, chunks: list[Chunk]) -> bool:
        """Whether a chunk has tokens of an image, or text before one."""
        pairs = [(chunk, self._images(chunk)) for chunk in chunks]
        return any(images is not None and chunk.start < images.spans[-1][1] for chunk, images in pairs)

    def prefill(self, chunks: list[Chunk], ids: torch.Tensor, batch: DeviceBatch) -> None:
        """Compute chunks that lie one after the other in `ids` [N]; the rest of it is padding."""
        found = [self._images(chunk) for chunk in chunks]
        self.vision.compute([images for images in found if images is not None])
        embeddings = self.vision.embed(ids)
        rope, offset = np.zeros((3, len(ids)), np.int64), 0
        for chunk, images in zip(chunks, found, strict=True):
            part = slice(offset, offset + chunk.end - chunk.start)
            rope[:, part] = np.arange(chunk.start, chunk.end)
            if images is not None:
                self.vision.insert(embeddings[part], images, chunk.start)
                places = images.positions(chunk.start, chunk.end)
                if places is not None:
                    rope[:, part] = places
            offset = part.stop
        at = torch.from_numpy(rope if self.vision.has_grid else rope[:1]).to(ids.device)
        batch.rope = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        self.decoder.run(embeddings, batch, *self.decoder.angles(at))

    def _images(self, chunk: Chunk) -> PromptImages | None:
        return self.slots.sequence[chunk.slot].request.images
