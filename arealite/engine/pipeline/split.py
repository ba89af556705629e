"""Divides a Hugging Face decoder into pipeline stages.

A stage is a view of the model: its own layers, the embedding on the first stage, norm and head on the last one, and
`Skipped` in place of everything else. Modules keep their names, so checkpoints and published weights do not depend on
the number of stages. Stages of one rank share no parameter.
"""

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class Skipped(nn.Module):
    """Stands in for a part of the model that another stage has: returns its input, or `states` if set."""

    def __init__(self) -> None:
        super().__init__()
        self.states: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states if self.states is None else self.states


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage; the first stages get one more, because the last one has the head."""
    small, more = divmod(num_layers, num_stages)
    starts = [stage * small + min(stage, more) for stage in range(num_stages + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


class ModelParts:
    """The layers, embedding, norm and head of a model, which may be on the meta device."""

    def __init__(self, model: PreTrainedModel, num_ranks: int, stages_per_rank: int):
        self.model: Any = model
        self.base: Any = model.base_model
        self.num_ranks = num_ranks
        self.stages = split_layers(len(self.base.layers), num_ranks * stages_per_rank)
        self.head_name = "lm_head" if model.get_output_embeddings() is not None else "score"
        head = getattr(model, self.head_name)
        self.is_tied = self.head_name == "lm_head" and head.weight is self.base.embed_tokens.weight
        # A tied head is in another process than the embedding: it gets a copy of the weights.
        self.head: nn.Module = _with_own_weight(head) if self.is_tied else head

    def stages_of(self, rank: int) -> list[int]:
        return list(range(rank, len(self.stages), self.num_ranks))

    def owner(self, name: str) -> int:
        """Return the first pipeline rank that has a parameter or buffer."""
        base = f"{self.model.base_model_prefix}."
        part, _, rest = name.removeprefix(base).partition(".")
        if part == "layers":
            layer = int(rest.split(".")[0])
            return next(i for i, layers in enumerate(self.stages) if layer in layers) % self.num_ranks
        return self.num_ranks - 1 if part in ("norm", self.head_name) else 0

    def view(self, stage: int) -> tuple[PreTrainedModel, Skipped | None]:
        """Return a stage of the model, and the part that brings in the states of the stage before it."""
        layers, is_last = self.stages[stage], stage == len(self.stages) - 1
        model, base = _shallow_copy(self.model), _shallow_copy(self.base)
        parts: list[nn.Module] = [m if i in layers else Skipped() for i, m in enumerate(self.base.layers)]
        setattr(model, self.model.base_model_prefix, base)
        base.layers = nn.ModuleList(parts)
        if stage > 0:
            base.embed_tokens = Skipped()
        if not is_last:
            base.norm = Skipped()
        setattr(model, self.head_name, self.head if is_last else Skipped())
        # In place of the layer before: what the model does between embedding and layers was done on the first stage.
        entry: Any = parts[layers[0] - 1] if stage > 0 else None
        return model, entry

    def drop_others(self, rank: int) -> None:
        """Remove from the model what is on other ranks, and the copy of a tied head."""
        stages = self.stages_of(rank)
        for index in range(len(self.base.layers)):
            if not any(index in self.stages[stage] for stage in stages):
                self.base.layers[index] = Skipped()
        if rank > 0:
            self.base.embed_tokens = Skipped()
        if rank < self.num_ranks - 1:
            self.base.norm = Skipped()
        if rank < self.num_ranks - 1 or self.is_tied:
            setattr(self.model, self.head_name, Skipped())


def _shallow_copy(module: Any) -> Any:
    """Return a module with the same parts, which may be replaced by others."""
    result = copy.copy(module)
    result._modules = dict(module._modules)
    return result


def _with_own_weight(head: Any) -> nn.Module:
    result = copy.copy(head)
    weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    result._parameters = {**head._parameters, "weight": weight}
    return result
