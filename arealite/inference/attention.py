"""The attention function of Hugging Face models, registered with their attention interface.

It passes queries, keys and values to the step's batch, which knows the paged KV cache: `cpu.attention.PagedBatch` or
`cuda.ops.DeviceBatch`. Used when a model is loaded.

Legend: N tokens of the step, H heads, Hkv KV heads, D head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from arealite.api.errors import ConfigError
from arealite.utils.decoders import has_vision

ATTENTION_NAME, SHAPES_NAME = "arealite_paged", "arealite_shapes"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, N, D]
    key: torch.Tensor,  # [1, Hkv, N, D]
    value: torch.Tensor,
    attention_mask: None,
    *,
    paged: Any = None,  # a PagedBatch, or on CUDA a DeviceBatch
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of every layer; returns [1, N, H, D]."""
    if paged is None:
        raise ConfigError(
            f"{type(module).__name__} does not pass the arguments of its model on to its attention, which the embedded "
            "engine needs: serve it with sglang or vllm"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer, own = module.layer_idx, value.shape[-1]
    dim = paged.keys[layer].shape[-1]
    is_narrow = not query.shape[-1] == own == dim  # latent attention, or layers of several widths
    if is_narrow:
        query, key, value = (F.pad(x, (0, dim - x.shape[-1])) for x in (query, key, value))
    out = paged.attention(layer, query, key, value, scale, sliding_window, softcap, s_aux)
    return out[..., :own] if is_narrow else out, None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask: the paged attention makes its own."""


def note_shapes(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Record number and size of the KV heads on the module; returns zeros."""
    module.kv_shape = key.shape[1], max(key.shape[-1], value.shape[-1])
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def use_attention(model: PreTrainedModel, name: str = ATTENTION_NAME) -> None:
    """Make the model use the attention function of this name."""
    for known, function in ((ATTENTION_NAME, paged_attention), (SHAPES_NAME, note_shapes)):
        ALL_ATTENTION_FUNCTIONS.register(known, function)
        ALL_MASK_ATTENTION_FUNCTIONS.register(known, no_mask)
    if has_vision(model.config):
        # Images are not paged.
        config: Any = model.config
        config._attn_implementation = {"": name, "text_config": name, "vision_config": "sdpa"}
        return
    model.config._attn_implementation = name
    model.config.get_text_config()._attn_implementation = name
