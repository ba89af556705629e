"""Images in packed micro-batches: vision-language models train with the same engine.

Rows hold the output of the model's processor for their images, padded along dimension 1: `pixel_values` with
`image_grid_thw [B, K, 3]` (Qwen-VL: patches `[B, P, D]`) or with `num_images [B]` (LLaVA: images `[B, K, C, H, W]`).
Packing removes the padding and keeps the order of the placeholders. The language model is trained; the vision tower
and its projector too, unless `freeze_vision` is set.
"""

import inspect

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from arealite.api.io_struct import Batch
from arealite.utils.data import VISION_KEYS


def has_vision(config: PreTrainedConfig) -> bool:
    return getattr(config, "vision_config", None) is not None


def language_model(model: PreTrainedModel) -> nn.Module:
    """Return the decoder: a part of a vision-language model, or the whole of a text model."""
    return getattr(model.base_model, "language_model", model)


def vision_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of the vision tower and its projector: all but those of the decoder and head."""
    head = model.get_output_embeddings()
    language = {id(p) for part in (language_model(model), head) if part for p in part.parameters()}
    return [p for p in model.parameters() if id(p) not in language]


def _vision_inputs(rows: Batch) -> Batch:
    """Return the model's keyword inputs for the images of padded `rows`; empty if there are none."""
    if "pixel_values" not in rows:
        return {}
    grids = rows.get("image_grid_thw")
    # Patches of each image [B, K]: 0 for padding.
    counts = rows["num_images"] if grids is None else grids.prod(dim=-1).sum(dim=1)
    if not counts.any():
        return {}
    pairs = zip(rows["pixel_values"], counts.tolist(), strict=True)
    inputs = {"pixel_values": torch.cat([pixels[:count] for pixels, count in pairs])}
    return inputs if grids is None else inputs | {"image_grid_thw": grids[grids.prod(dim=-1) > 0]}


def take_vision(model: PreTrainedModel, rows: Batch, packed: Batch) -> Batch:
    """Return `packed` with the padded image inputs replaced by the model's inputs.

    Models that use them also get `rope_positions [3, N]` (time, height, width).
    """
    images = _vision_inputs(rows)
    packed = {k: v for k, v in packed.items() if k not in VISION_KEYS} | images
    find = getattr(model.base_model, "get_rope_index", None)
    if find is None or "image_grid_thw" not in images:
        return packed
    ids, mask = rows["input_ids"], rows["attention_mask"]
    inputs = {"input_ids": ids, "attention_mask": mask, "image_grid_thw": images["image_grid_thw"]}
    if "mm_token_type_ids" in inspect.signature(find).parameters:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    return packed | {"rope_positions": find(**inputs)[0][:, mask.bool()]}
