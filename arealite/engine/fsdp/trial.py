"""Passes over made-up tokens, with which `FSDPEngine` compiles before the first batch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from arealite.algo.policy_losses import LossAndStats
from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.io_struct import Batch
from arealite.engine.fsdp.sharding import decoder_layers
from arealite.utils.decoders import has_vision

_LONGEST = 509
_GROUP_SIZE = 4


def trial_batch(max_tokens: int, config: PreTrainedConfig) -> Batch:
    """Return groups of answers to shared prompts that fill one micro-batch of at most `max_tokens`.

    All sizes differ: torch.compile takes sizes that are equal in its first batch to be equal in all.
    """
    longest = max(6, min(_LONGEST, max_tokens // 8))
    prompt, lengths = longest // 3, [longest - 1]
    # The second row is the longest. The first one of a group computes the prompt for all of it: its answer begins with
    # the largest token.
    while sum(lengths) + longest <= max_tokens:
        lengths.append(longest - 7 * (len(lengths) - 1) % (longest // 3))
    group_ids = torch.arange(len(lengths)) // _GROUP_SIZE
    position = torch.arange(longest)
    attention_mask = (position < torch.tensor(lengths)[:, None]).long()
    # Answers differ between rows, prompts between groups only.
    number = torch.where(position < prompt, group_ids[:, None], torch.arange(len(lengths))[:, None])
    input_ids = (number * longest + position) * 7919 % config.get_text_config().vocab_size * attention_mask
    input_ids[:, prompt] = _GROUP_SIZE - torch.arange(len(lengths)) % _GROUP_SIZE
    loss_mask = attention_mask * (position >= prompt)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask, "group_ids": group_ids}


def trial_loss(outputs: Batch, mb: Batch) -> LossAndStats:
    """Return a loss with a gradient for the output that every algorithm trains."""
    return outputs["logp" if "logp" in outputs else "values"].sum(), {}


def can_run_first_layers(model: PreTrainedModel, parallel: ParallelStrategy) -> bool:
    """Return whether a rank has a whole language model, and its layers are in one list."""
    is_whole = parallel.instance_size == 1 and model.get_output_embeddings() is not None
    layers = decoder_layers(model)
    return is_whole and not has_vision(model.config) and len(layers) > 1 and _owner(model, layers) is not None


@contextmanager
def first_layers(model: PreTrainedModel) -> Iterator[int]:
    """Leave out all layers but the first ones, of which every kind has one; yields their number.

    At least two: with adapters the input of the first one needs no gradient.
    """
    layers = decoder_layers(model)
    found = _owner(model, layers)
    assert found is not None, "call can_run_first_layers first"
    owner, name = found
    types = getattr(model.config.get_text_config(), "layer_types", None) or []
    types = types if len(types) == len(layers) else [""] * len(layers)
    kinds = [(kind, *(type(part) for part in layer.modules())) for kind, layer in zip(types, layers, strict=True)]
    count = max(2, 1 + max(kinds.index(kind) for kind in kinds))
    whole = getattr(owner, name)
    setattr(owner, name, nn.ModuleList(layers[:count]))
    try:
        yield count
    finally:
        setattr(owner, name, whole)


def _owner(model: PreTrainedModel, layers: list[nn.Module]) -> tuple[nn.Module, str] | None:
    """Return the module that has exactly these layers as a list, and the name of the list."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and list(child) == layers:
                return module, name
    return None
