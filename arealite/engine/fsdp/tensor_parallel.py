"""Tensor parallelism: splits a model over the ranks of a tensor group.

Linear layers are split by the model's own plan (DTensor). Experts are distributed: each rank runs some of them on all
tokens. Embedding and output head are split by vocabulary rows, so no rank has logits of the full vocabulary.
`FSDPEngine` applies it to a model on the meta device, before sharding. Results are the same on all ranks of a group.
"""

import logging
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from arealite.engine.fsdp.parallel import Layout, local, sum_gradients, sum_pieces
from arealite.utils.decoders import tensor_plan

# torch warns in each run that gathering a weight split by both FSDP and the tensor group takes two collectives.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def apply_tensor_parallel(model: PreTrainedModel, layout: Layout) -> list[str]:
    """Split `model`; return the names of replicated parameters whose gradients are partial.

    Per-head norms, and activations (Apertus), see only this rank's part: their gradients are summed over the group.
    """
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    partial: set[int] = set()
    decoder = getattr(model.base_model, "language_model", model.base_model)
    plan = tensor_plan(model.config)
    for name, module in decoder.named_modules():
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if style in styles and isinstance(module, nn.Linear):
            parallelize_module(module, layout.mesh["tp"], styles[style]())
        elif style == "moe_tp_experts" and layout.experts is None:
            _distribute_experts(module, layout)
        elif style == "replicated_with_grad_allreduce" or name.endswith(".act_fn"):
            partial |= set(map(id, module.parameters()))
    _split_vocabulary(model, layout)
    return [name for name, parameter in model.named_parameters() if id(parameter) in partial]


def _split_rows(module: nn.Module, layout: Layout) -> None:
    """Shard dimension 0 of the module's parameters over the tensor group."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        split = distribute_tensor(parameter.detach(), layout.mesh["tp"], [Shard(0)])
        module.register_parameter(name, nn.Parameter(split))


def _distribute_experts(experts: Any, layout: Layout) -> None:
    """Give each rank a range of the experts; it skips tokens of other ranks, and outputs are summed."""
    group, original = layout.tp_group, experts.forward
    _split_rows(experts, layout)
    experts.num_experts //= layout.strategy.tensor
    # With this flag transformers' grouped kernels skip the tokens of other ranks, whose index is `count`.
    experts._is_expert_parallel = True
    count, first = experts.num_experts, experts.num_experts * dist.get_rank(group)

    def forward(hidden_states, top_k_index, top_k_weights):
        hidden_states = sum_gradients(hidden_states, group)
        top_k_weights = sum_gradients(top_k_weights, group)
        here = (top_k_index >= first) & (top_k_index < first + count)
        index = torch.where(here, top_k_index - first, count)
        whole = dict(experts._parameters)
        experts._parameters.update({k: local(v) for k, v in whole.items()})
        try:
            out = original(hidden_states, index, torch.where(here, top_k_weights, 0.0))
        finally:
            experts._parameters.update(whole)
        # A rank without a routed token must stay in the graph too: FSDP needs its gradients.
        return sum_pieces(out + 0.0 * sum(local(v).sum() for v in whole.values()), group)

    experts.forward = forward


def _split_vocabulary(model: PreTrainedModel, layout: Layout) -> None:
    """Split embedding and head by rows.

    They stay replicated if the group does not divide the vocabulary, or if the head has a bias.
    """
    table: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if table.num_embeddings % layout.strategy.tensor or getattr(head, "bias", None) is not None:
        return
    tied = head is not None and head.weight is table.weight
    group, padding, original = layout.tp_group, table.padding_idx, table.forward
    table.padding_idx = None  # not a row of every shard
    _split_rows(table, layout)
    if head is not None and tied:
        head.weight = table.weight
    elif head is not None:
        _split_rows(head, layout)

    def forward(ids):
        whole = table.weight
        index, here = find_rows(ids, len(local(whole)), group)
        table._parameters["weight"] = local(whole)
        try:
            # The module's own: Gemma's scales what it looks up.
            out = original(index) * here[..., None]
        finally:
            table._parameters["weight"] = whole
        if padding is not None:
            out = torch.where((ids == padding)[..., None], out.detach(), out)
        return sum_pieces(out, group)

    table.forward = forward


def find_rows(ids: torch.Tensor, num_rows: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each id's row in this rank's vocabulary shard (0 if in another), and whether it is here."""
    row = ids - num_rows * dist.get_rank(group)
    here = (row >= 0) & (row < num_rows)
    return torch.where(here, row, 0), here
