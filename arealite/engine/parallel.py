"""How a model is spread over ranks: data (FSDP), context (Ulysses) and tensor (DTensor) parallel, in this order of nearness.

`Layout` says which ranks share what; it is checked against the model before anything is loaded. Ranks of one data-parallel index
(its context and tensor neighbours) get the same batch. Context parallel cuts the packed tokens in equal pieces; around
attention an all-to-all trades pieces for heads. Used by `FSDPEngine` and the packed attention.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedConfig, PreTrainedModel

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.errors import AllocationError

_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce")


def fold_pipeline(strategy: ParallelStrategy) -> ParallelStrategy:
    """`d32p2` as `d64`: FSDP spreads every layer over all ranks, so stages, which are there to spread layers, join them."""
    return replace(strategy, data=strategy.data * strategy.pipeline, pipeline=1)


def check_layout(strategy: ParallelStrategy, config: PreTrainedConfig, world_size: int) -> None:
    """Refuse a layout that does not fit the ranks or the model, saying which number is in the way."""
    if strategy.expert > 1:
        raise AllocationError(
            f"the fsdp backend has data (d), tensor (t) and context (c) parallelism; {strategy} asks for more: set e1"
        )
    if strategy.world_size != world_size:
        raise AllocationError(
            f"the training side is {strategy} ({strategy.world_size} ranks), but {world_size} ranks were started"
        )
    text = config.get_text_config()
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    kv_heads = kv_heads or heads
    tensor, context = strategy.tensor, strategy.context
    for what, size in (("attention heads", heads), ("key-value heads", kv_heads), ("intermediate size", text.intermediate_size)):  # fmt: skip
        if size % tensor:
            raise AllocationError(
                f"t{tensor} does not divide the model's {what} ({size}): use a divisor of it"
            )
    local, local_kv = heads // tensor, kv_heads // tensor
    if local % context or (local_kv % context and context % local_kv):
        raise AllocationError(
            f"c{context} gives each rank a share of {local} attention and {local_kv} key-value heads (after t{tensor}), which it "
            "does not divide: use a smaller c"
        )
    unknown = {s for s in _plan(config).values() if s not in _STYLES}
    if tensor > 1 and (unknown or not _plan(config)):
        raise AllocationError(
            f"model type {text.model_type!r} has parts without a tensor-parallel plan here ({sorted(unknown) or 'none at all'}): use t1"
        )


class Layout:
    """The mesh `(dp, cp, tp)` of one engine. Parameters are sharded over dp and cp together (`fsdp`)."""

    def __init__(self, strategy: ParallelStrategy, device: str):
        self.strategy = strategy
        sizes = (strategy.data, strategy.context, strategy.tensor)
        self.mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "cp", "tp"))
        self.fsdp: DeviceMesh = self.mesh["dp", "cp"]._flatten("fsdp")
        self.dp_group = self.mesh.get_group("dp")
        self.cp_group = self.mesh.get_group("cp") if strategy.context > 1 else None
        self.tp_group = self.mesh.get_group("tp")
        self.dp_rank = self.mesh.get_local_rank("dp")


def apply_tensor_parallel(model: PreTrainedModel, layout: Layout) -> list[nn.Parameter]:
    """Split linear layers by the model's own plan; returns replicated parameters whose gradients are partial.

    Norms of single heads see only this rank's heads: their gradients must be summed over the tensor group.
    """
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    partial: list[nn.Parameter] = []
    for name, module in model.base_model.named_modules():
        style = _plan(model.config).get(re.sub(r"\.\d+\.", ".*.", name))
        if style in styles and isinstance(module, nn.Linear):
            parallelize_module(module, layout.mesh["tp"], styles[style]())
        elif style == "replicated_with_grad_allreduce":
            partial += list(module.parameters())
    return partial


def _plan(config: PreTrainedConfig) -> dict[str, str]:
    return getattr(config.get_text_config(), "base_model_tp_plan", None) or {}


# ---------------------------------------------------------------------------------------- context parallel


class _Exchange(torch.autograd.Function):
    """Piece `i` of dimension 0 goes to rank `i`; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx, pieces, group):
        ctx.group = group
        return _exchange(pieces, group)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, ctx.group), None


def _exchange(pieces: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received


def tokens_to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`[n, heads, D]` of this rank's tokens → `[N, heads / c, D]` of all tokens (Ulysses, arXiv 2309.14509)."""
    size = dist.get_world_size(group)
    if x.shape[1] < size:
        x = x.repeat_interleave(size // x.shape[1], dim=1)
    pieces = x.unflatten(1, (size, -1)).transpose(0, 1)
    return _Exchange.apply(pieces, group).flatten(0, 1)


def heads_to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The way back: `[N, heads / c, D]` → `[n, heads, D]`."""
    size = dist.get_world_size(group)
    pieces = x.unflatten(0, (size, -1))
    return _Exchange.apply(pieces, group).transpose(0, 1).flatten(1, 2)


class _SumPieces(torch.autograd.Function):
    """Sum over ranks of what each computed for its own tokens. The loss is the same on all of them, so each keeps the
    gradient of its own part: none is counted twice."""

    @staticmethod
    def forward(ctx, value, group):
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def sum_pieces(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _SumPieces.apply(value, group)
