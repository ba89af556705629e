"""Distribution of a model over a mesh of data, pipeline, context and tensor parallel ranks.

`check_layout` checks it against the model before anything is loaded. Ranks with the same data-parallel index get the
same batch. Context parallelism splits the packed tokens into equal pieces; around attention, ranks exchange pieces for
heads with an all-to-all (Ulysses), or pass keys and values around a ring if the heads cannot be divided. The tensor
group splits linear layers, experts and the vocabulary (`tensor_parallel`). Expert groups are made of the ranks of d
and c (`expert_parallel`). Used by `FSDPEngine` and `packed_attention`.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedConfig

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.errors import AllocationError
from arealite.utils.decoders import has_vision, tensor_plan
from arealite.utils.model_config import check_experts, check_stages
from arealite.utils.routing import num_experts

_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce")
_EXPERT_STYLES = ("packed_colwise", "moe_tp_experts")


def check_layout(
    strategy: ParallelStrategy, config: PreTrainedConfig, world_size: int, stages_per_rank: int = 1
) -> None:
    """Raise `AllocationError` if the layout does not fit the ranks or the model."""
    if strategy.world_size != world_size:
        raise AllocationError(
            f"the training side is {strategy} ({strategy.world_size} ranks), but {world_size} ranks were started"
        )
    if has_vision(config) and strategy.context > 1:
        raise AllocationError(
            f"images cannot be split over context-parallel ranks, but {strategy} has c{strategy.context}: set c1 and "
            "give those ranks to d or t"
        )
    if has_vision(config) and strategy.expert > 1:
        raise AllocationError(
            f"expert parallelism of vision-language models is not supported, but {strategy} has e{strategy.expert}: "
            "leave out e, FSDP shards the experts over d"
        )
    tensor, text = strategy.tensor, config.get_text_config()
    check_experts(text.model_type, num_experts(config), strategy)
    if strategy.pipeline > 1:
        check_stages(config.model_type, text.num_hidden_layers, strategy.pipeline * stages_per_rank)
    if tensor == 1:
        return
    heads, kv_heads = _num_heads(config)
    inner = getattr(text, "intermediate_size", 0)
    sizes = {"attention heads": heads, "key-value heads": kv_heads, "intermediate size": inner,
             "experts": num_experts(config)}  # fmt: skip
    for what, size in sizes.items():
        if size % tensor:
            raise AllocationError(
                f"t{tensor} does not divide the model's {what} ({size}): use a divisor of it, or t1 and more of d or c"
            )
    plan = tensor_plan(config)
    unknown = {s for s in plan.values() if s not in _STYLES + _EXPERT_STYLES}
    if unknown or not plan:
        raise AllocationError(
            f"model type {text.model_type!r} has no supported tensor-parallel plan (unknown styles: "
            f"{sorted(unknown)}): use t1 and give those ranks to d (FSDP shards the weights over them too) or c"
        )


def _num_heads(config: PreTrainedConfig) -> tuple[int, int]:
    text = config.get_text_config()
    heads = text.num_attention_heads
    return heads, getattr(text, "num_key_value_heads", None) or heads


def trades_heads(config: PreTrainedConfig, strategy: ParallelStrategy) -> bool:
    """Return whether context ranks can divide the heads of a tensor rank; otherwise they form a ring."""
    heads, kv_heads = (n // strategy.tensor for n in _num_heads(config))
    size = strategy.context
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


class Layout:
    """The mesh `(dp, pp, cp, tp)` of one engine. Parameters are sharded over dp and cp together (`fsdp`).

    With expert parallelism `experts` is a second mesh `(efsdp, pp, ep, tp)` of the same ranks: dp and cp together are
    `ep`, whose ranks have different experts, and `efsdp`, over which each expert is sharded.
    """

    def __init__(self, strategy: ParallelStrategy, device: str):
        self.strategy = strategy
        sizes = (strategy.data, strategy.pipeline, strategy.context, strategy.tensor)
        self.mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "pp", "cp", "tp"))
        self.fsdp: DeviceMesh = self.mesh["dp", "cp"]._flatten("fsdp")
        self.dp_group = self.mesh.get_group("dp")
        self.cp_group = self.mesh.get_group("cp") if strategy.context > 1 else None
        self.tp_group = self.mesh.get_group("tp")
        self.dp_rank = self.mesh.get_local_rank("dp")
        self.pp_group = self.mesh.get_group("pp")
        self.pp_rank = self.mesh.get_local_rank("pp")
        self.experts = _expert_mesh(strategy, self.mesh, device) if strategy.expert > 1 else None


def _expert_mesh(strategy: ParallelStrategy, mesh: DeviceMesh, device: str) -> DeviceMesh:
    data, pipeline, context, tensor = mesh.mesh.shape
    # Context ranks first: they are neighbours.
    own_context = min(strategy.expert, context)
    own_data = strategy.expert // own_context
    ranks = mesh.mesh.reshape(data // own_data, own_data, pipeline, context // own_context, own_context, tensor)
    ranks = ranks.permute(0, 3, 2, 1, 4, 5).reshape(-1, pipeline, strategy.expert, tensor)
    return DeviceMesh(device, ranks, mesh_dim_names=("efsdp", "pp", "ep", "tp"))


def local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return value.to_local() if isinstance(value, DTensor) else value


@torch.no_grad()
def whole(value: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, detached. Collective if it is sharded."""
    if isinstance(value, DTensor):
        # On one rank the shard is the whole tensor, and a gather would copy it.
        value = value.to_local() if value.device_mesh.size() == 1 else value.full_tensor()
    return value.detach()


def offset_of(value: torch.Tensor) -> tuple[int, ...]:
    """Return where this rank's part of a tensor that may be sharded begins."""
    if not isinstance(value, DTensor):
        return (0,) * value.dim()
    return tuple(compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)[1])


def slice_of(part: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return the slice of `full` that this rank holds of the tensor `part`, which may be sharded."""
    if not isinstance(part, DTensor):
        return full
    shape, offset = compute_local_shape_and_global_offset(part.shape, part.device_mesh, part.placements)
    return full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


class _Exchange(torch.autograd.Function):
    """All-to-all: send piece `i` of dimension 0 to rank `i`; gradients are sent back."""

    @staticmethod
    def forward(ctx, pieces, group):
        ctx.group = group
        return _exchange(pieces, group)

    @staticmethod
    def backward(ctx, *grads):
        return _exchange(grads[0], ctx.group), None


def _exchange(pieces: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received


def tokens_to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange `[n, heads, D]` of own tokens for `[N, heads / c, D]` of all (arXiv 2309.14509)."""
    size = dist.get_world_size(group)
    if x.shape[1] < size:
        x = x.repeat_interleave(size // x.shape[1], dim=1)
    pieces = x.unflatten(1, (size, -1)).transpose(0, 1)
    return _Exchange.apply(pieces, group).flatten(0, 1)


def heads_to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Reverse `tokens_to_heads`: `[N, heads / c, D]` → `[n, heads, D]`."""
    size = dist.get_world_size(group)
    pieces = x.unflatten(0, (size, -1))
    return _Exchange.apply(pieces, group).transpose(0, 1).flatten(1, 2)


class _SumPieces(torch.autograd.Function):
    """Sum over ranks of the results for their own tokens.

    The loss is the same on all ranks, so each passes the gradient on to its own part: none is counted twice.
    """

    @staticmethod
    def forward(ctx, value, group):
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], None


def sum_pieces(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _SumPieces.apply(value, group)


class _SumGrads(torch.autograd.Function):
    """Identity whose gradient is summed over ranks: each rank used `value` for its own part of a sum."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx, *grads):
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_gradients(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _SumGrads.apply(value, group)


def _shift(x: torch.Tensor, group: dist.ProcessGroup, step: int) -> torch.Tensor:
    """Send `x` to the rank `step` places ahead in the ring, and return what the rank behind sent."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    received = torch.empty_like(x)
    to, source = (dist.get_global_rank(group, (rank + s) % size) for s in (step, -step))
    operations = [dist.P2POp(dist.isend, x.contiguous(), to, group), dist.P2POp(dist.irecv, received, source, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


class _Ring(torch.autograd.Function):
    """Rows of the `hops` ranks before this one, the farthest first; gradients go back and add up."""

    @staticmethod
    def forward(ctx, x, hops, group):
        ctx.hops, ctx.group = hops, group
        pieces = [x]
        for _ in range(hops):
            pieces.append(_shift(pieces[-1], group, 1))
        return torch.cat(pieces[:0:-1])

    @staticmethod
    def backward(ctx, *grads):
        pieces = grads[0].chunk(ctx.hops)
        total = pieces[0]
        for piece in pieces[1:]:
            total = _shift(total, ctx.group, -1) + piece
        return _shift(total, ctx.group, -1), None, None


@torch.compiler.disable
def with_earlier_pieces(x: torch.Tensor, hops: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's rows `[n, …]`, then those of the `hops` ranks before it: `[(1 + hops)·n, …]`."""
    return torch.cat([x, _Ring.apply(x, hops, group)]) if hops else x
