"""Images in packed micro-batches: vision-language models train with the same engine.

A batch holds image sets, the output of the model's processor for the images of one prompt, padded along dimension 1:
`pixel_values` with `image_grid_thw [I, K, 3]` (Qwen-VL: patches `[I, P, D]`) or with `num_images [I]` (LLaVA: images
`[I, K, C, H, W]`). `image_index [B]` has the set of each row, -1 for none. Packing removes the padding and keeps the
order of the placeholders. The language model is trained; the vision tower and its projector too, unless
`freeze_vision` is set.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from arealite.api.errors import TrainingError
from arealite.api.io_struct import Batch
from arealite.utils.data import IMAGE_INDEX, VISION_KEYS
from arealite.utils.decoders import IMAGE_FAMILIES, language_model, rope_positions


def vision_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of the vision tower and its projector: all but those of the decoder and head."""
    head = model.get_output_embeddings()
    language = {id(p) for part in (language_model(model), head) if part for p in part.parameters()}
    return [p for p in model.parameters() if id(p) not in language]


def _vision_inputs(rows: Batch, placeholders: torch.Tensor, is_shared: bool) -> Batch:
    """Return the model's inputs for the images of padded `rows`, whose `placeholders [B]` are counted.

    `is_shared`: each set comes once, and `image_tokens [M]` has the feature of each placeholder; else a set comes once
    for each of its rows. Empty if there are no images.
    """
    if IMAGE_INDEX not in rows:
        return {}
    grids, pixels = rows.get("image_grid_thw"), rows["pixel_values"]
    # Patches or images of each set [I], without padding.
    counts = rows["num_images"] if grids is None else grids.prod(dim=-1).sum(dim=1)
    used = [(row, i) for row, i in enumerate(rows[IMAGE_INDEX].tolist()) if i >= 0 and counts[i]]
    if not used:
        return {}
    spans: dict[int, tuple[int, int]] = {}
    for row, i in used:
        size, end = int(placeholders[row]), next(reversed(spans.values()))[1] if spans else 0
        start, end = spans.setdefault(i, (end, end + size))
        if end - start != size:
            raise TrainingError(f"rows with the same images have {end - start} and {size} image placeholder tokens")
    sets = list(spans) if is_shared else [i for _, i in used]
    inputs = {"pixel_values": torch.cat([pixels[i, : int(counts[i])] for i in sets])}
    if grids is not None:
        inputs["image_grid_thw"] = torch.cat([grids[i][grids[i].prod(dim=-1) > 0] for i in sets])
        inputs["row_grids"] = torch.cat([grids[i][grids[i].prod(dim=-1) > 0] for _, i in used])
    if is_shared:
        inputs["image_tokens"] = torch.cat([torch.arange(*spans[i]) for _, i in used])
    return inputs


def insert_images(model: PreTrainedModel, ids: torch.Tensor, mb: Batch) -> torch.Tensor:
    """Return embeddings `[N, H]` of packed `ids`, with image features in place of placeholders.

    The vision tower computes each image once, however many rows share it.
    """
    body: Any = model.base_model
    images = {key: mb[key] for key in ("pixel_values", "image_grid_thw") if key in mb}
    features = torch.cat(list(body.get_image_features(**images, return_dict=True).pooler_output))
    embeddings = body.get_input_embeddings()(ids)
    at = (ids == model.config.image_token_id).nonzero(as_tuple=True)[0]
    expected = int(mb["image_tokens"].max()) + 1
    if len(at) != len(mb["image_tokens"]) or len(features) != expected:
        raise TrainingError(
            f"the images of a micro-batch have {len(features)} features, but {expected} placeholder tokens: use the "
            "ids of the model's processor"
        )
    chosen = features.to(embeddings.dtype).index_select(0, mb["image_tokens"])
    return embeddings.index_copy(0, at, chosen)


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

    Models that use them also get `rope_positions [3, N]` (time, height, width). `image_tokens` is for `insert_images`.
    `model_ids [N]` replaces `input_ids` as input if an answer ends in a placeholder.
    """
    ids, mask, image = rows["input_ids"], rows["attention_mask"], model.config.image_token_id
    packed = {k: v for k, v in packed.items() if k not in (*VISION_KEYS, IMAGE_INDEX)}
    cleaned = _without_sampled_placeholders(rows, image)
    if cleaned is not None:
        ids = cleaned
        packed["model_ids"] = ids[mask.bool()]
    placeholders = ((ids == image) & mask.bool()).sum(dim=1)
    packed |= _vision_inputs(rows, placeholders, model.config.model_type in IMAGE_FAMILIES)
    grids = packed.pop("row_grids", None)
    positions = None if grids is None else rope_positions(model, ids, mask, grids)
    return packed if positions is None else packed | {"rope_positions": positions[:, mask.bool()]}
