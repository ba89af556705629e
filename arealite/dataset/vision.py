"""Batches for supervised training of vision-language models: prompts with images, and answers."""

from typing import Any

import torch

from arealite.api.errors import DatasetError
from arealite.api.io_struct import Batch
from arealite.api.vision_api import image_columns
from arealite.utils.data import concat_padded
from arealite.utils.vision import VisionProcessor

Row = dict[str, Any]


def collate_vision_sft(rows: list[Row], processor: VisionProcessor, image_folder: str | None = None) -> Batch:
    """Make one padded batch of rows with `images`, a prompt (`VisionProcessor.encode_row`) and `answer`.

    Images are processed here, batch by batch: as tensors they take a hundred times the memory. The answer and the end
    token are trained on.
    """
    return concat_padded([_row(row, processor, image_folder) for row in rows])


def _row(row: Row, processor: VisionProcessor, image_folder: str | None) -> Batch:
    tokenizer = processor.tokenizer
    if tokenizer.eos_token_id is None:
        raise DatasetError("the tokenizer has no end-of-text token, so an answer could never end")
    prompt = processor.encode_row(row, image_folder)
    body = [*tokenizer.encode(str(row["answer"]), add_special_tokens=False), tokenizer.eos_token_id]
    ids = torch.tensor([prompt.input_ids + body])
    loss_mask = torch.zeros_like(ids)
    loss_mask[:, len(prompt.input_ids) :] = 1
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": loss_mask}
    return batch | image_columns([prompt.placed])
