"""Routers of mixture-of-experts models: where they are, and how the experts of tokens are stored.

The embedded server records the experts that each token takes, and the trainer uses the same ones (routing replay).
Small numerical differences between both would choose other experts, which changes log-probs far more than rounding.

Stored as `[tokens, L · K]`: L layers with experts, K experts of a token.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from arealite.utils.decoders import language_model
from arealite.utils.model_config import EXPERT_COUNTS


class ExpertBlock(NamedTuple):
    """One layer's router, which returns logits, weights and indices of the experts, and its experts."""

    layer: nn.Module
    router: nn.Module
    experts: Any


def num_experts(config: PreTrainedConfig) -> int:
    """Return the number of routed experts of a layer; 0 for a dense model."""
    text = config.get_text_config()
    return next((count for name in EXPERT_COUNTS if (count := getattr(text, name, None))), 0)


def expert_blocks(model: PreTrainedModel) -> list[ExpertBlock]:
    """Return the layers with routed experts, in their order."""
    recorder: Any = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    router_class = getattr(recorder, "target_class", recorder)
    found = []
    for layer in getattr(language_model(model).base_model, "layers", ()):
        routers = [m for m in layer.modules() if isinstance(router_class, type) and isinstance(m, router_class)]
        experts = [m for m in layer.modules() if hasattr(m, "down_proj") and getattr(m, "num_experts", 0)]
        if len(routers) == len(experts) == 1:
            found.append(ExpertBlock(layer, routers[0], experts[0]))
    return found


def index_dtype(experts: int) -> torch.dtype:
    """Return the type in which indices of experts are stored; it has room for `NO_EXPERT`."""
    return torch.uint8 if experts < 256 else torch.int16
