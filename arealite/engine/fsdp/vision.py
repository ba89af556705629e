"""Images in packed micro-batches: vision-language models train through the same engine as text models.

Rows carry what the model's processor made for their images, padded along dimension 1: `pixel_values` with `image_grid_thw [B, K, 3]`
(Qwen-VL: patches `[B, P, D]`) or with `num_images [B]` (LLaVA: images `[B, K, C, H, W]`). Packing keeps the real ones only, in the
order of their placeholders. The language model is trained; the vision tower and its projector too, unless `freeze_vision` says so.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.errors import AllocationError
from arealite.api.io_struct import Batch
from arealite.utils.data import VISION_KEYS


def has_vision(config: PreTrainedConfig) -> bool:
    return getattr(config, "vision_config", None) is not None


def check_vision_layout(config: PreTrainedConfig, strategy: ParallelStrategy) -> None:
    if has_vision(config) and strategy.context > 1:
        raise AllocationError(
            f"images cannot be cut into context-parallel pieces, but {strategy} asks for c{strategy.context}: set c1 and give those "
            "ranks to d or t"
        )


def language_model(model: PreTrainedModel) -> nn.Module:
    """The decoder: a part of a vision-language model, all of another."""
    return getattr(model.base_model, "language_model", model)


def vision_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """What a vision-language model has besides its decoder and head: the tower and its projector."""
    head = model.get_output_embeddings()
    language = {id(p) for part in (language_model(model), head) if part for p in part.parameters()}
    return [p for p in model.parameters() if id(p) not in language]


def vision_inputs(rows: Batch) -> Batch:
    """Keyword inputs of the model for the images of padded `rows`; empty where there are none."""
    if "pixel_values" not in rows:
        return {}
    grids = rows.get("image_grid_thw")
    sizes = None if grids is None else grids.prod(dim=-1)  # [B, K], 0 where there is no image
    counts = rows["num_images"] if sizes is None else sizes.sum(dim=1)
    if not counts.any():
        return {}
    pairs = zip(rows["pixel_values"], counts.tolist(), strict=True)
    inputs = {"pixel_values": torch.cat([pixels[:count] for pixels, count in pairs])}
    return inputs if grids is None else inputs | {"image_grid_thw": grids[sizes > 0]}


def rope_positions(model: PreTrainedModel, rows: Batch) -> torch.Tensor | None:
    """Packed `[3, N]` positions (time, height, width) of models that place images so; None for others."""
    find = getattr(model.base_model, "get_rope_index", None)
    images = vision_inputs(rows)
    if find is None or "image_grid_thw" not in images:
        return None
    ids, mask = rows["input_ids"], rows["attention_mask"]
    inputs = {"input_ids": ids, "attention_mask": mask, "image_grid_thw": images["image_grid_thw"]}
    if "mm_token_type_ids" in inspect.signature(find).parameters:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    return find(**inputs)[0][:, mask.bool()]


def take_vision(model: PreTrainedModel, rows: Batch, packed: Batch) -> Batch:
    """`packed` with the padded image inputs replaced by what the model takes."""
    packed = {k: v for k, v in packed.items() if k not in VISION_KEYS}
    positions = rope_positions(model, rows)
    if positions is not None:
        packed["rope_positions"] = positions
    return packed | vision_inputs(rows)
