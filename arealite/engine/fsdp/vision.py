"""Images in packed micro-batches: vision-language models train with the same engine.

A batch holds image sets, the output of the model's processor for the images of one prompt, padded along dimension 1:
`pixel_values` with `image_grid_thw [I, K, 3]` (Qwen-VL: patches `[I, P, D]`) or with `num_images [I]` (LLaVA: images
`[I, K, C, H, W]`). `image_index [B]` has the set of each row, -1 for none. Packing removes the padding and keeps the
order of the placeholders. The language model is trained; the vision tower and its projector too, unless
`freeze_vision` is set.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch
from arealite.utils.data import IMAGE_INDEX, VISION_KEYS
from arealite.utils.decoders import language_model, rope_positions


def vision_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of the vision tower and its projector: all but those of the decoder and head."""
    head = model.get_output_embeddings()
    language = {id(p) for part in (language_model(model), head) if part for p in part.parameters()}
    return [p for p in model.parameters() if id(p) not in language]


def _vision_inputs(rows: Batch) -> Batch:
    """Return the model's keyword inputs for the images of padded `rows`; empty if there are none."""
    if IMAGE_INDEX not in rows:
        return {}
    grids, pixels = rows.get("image_grid_thw"), rows["pixel_values"]
    # Patches or images of each set [I], without padding.
    counts = rows["num_images"] if grids is None else grids.prod(dim=-1).sum(dim=1)
    used = [i for i in rows[IMAGE_INDEX].tolist() if i >= 0 and counts[i]]
    if not used:
        return {}
    inputs = {"pixel_values": torch.cat([pixels[i, : int(counts[i])] for i in used])}
    if grids is not None:
        inputs["image_grid_thw"] = torch.cat([grids[i][grids[i].prod(dim=-1) > 0] for i in used])
    return inputs


def _without_sampled_placeholders(rows: Batch, image_token_id: int) -> torch.Tensor | None:
    """Return ids `[B, T]` for the model if an answer ends in a sampled placeholder, else None.

    The model would look for an image there. Nothing is predicted from the last token, so its input does not matter.
    """
    ids, mask = rows["input_ids"], rows["attention_mask"].bool()
    sampled = (ids == image_token_id) & mask
    sampled &= rows["loss_mask"].bool() if "loss_mask" in rows else torch.zeros_like(mask)
    if not sampled.any():
        return None
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    if (sampled & ~is_last).any():
        raise TrainingError(
            f"a trained answer goes on after the image placeholder (token {image_token_id}): end answers there, with "
            "the placeholder in gconfig.stop_token_ids, as VisionRLVRWorkflow does"
        )
    return ids.masked_fill(sampled, 0)


def take_vision(model: PreTrainedModel, rows: Batch, packed: Batch) -> Batch:
    """Return `packed` with the image sets replaced by the model's inputs.

    Models that use them also get `rope_positions [3, N]` (time, height, width). `model_ids [N]` replaces `input_ids` as
    input if an answer ends in a placeholder.
    """
    images = _vision_inputs(rows)
    packed = {k: v for k, v in packed.items() if k not in (*VISION_KEYS, IMAGE_INDEX)} | images
    ids, mask = rows["input_ids"], rows["attention_mask"]
    cleaned = _without_sampled_placeholders(rows, model.config.image_token_id)
    if cleaned is not None:
        ids = cleaned
        packed["model_ids"] = ids[mask.bool()]
    if "image_grid_thw" in images:
        positions = rope_positions(model, ids, mask, images["image_grid_thw"])
        if positions is not None:
            packed["rope_positions"] = positions[:, mask.bool()]
    return packed
