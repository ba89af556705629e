"""Expert parallelism: the ranks of an expert group have different experts and send tokens to them.

A group is made of ranks of d and c, which have different tokens. In each layer a rank sends every token once to each
rank that has experts of it (all-to-all), computes what it received, and sends the results back, where they are summed.
With tensor parallelism the experts are divided over e·t ranks; ranks of a tensor group have the same tokens, and each
handles those of its own experts. FSDP shards an expert over the other ranks of d and c. `FSDPEngine` applies it to a
model on the meta device, before sharding.

N tokens of this rank, K experts of a token, S rows that are sent, R rows that are received, P pairs of a received token
and an expert.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from arealite.api.errors import AllocationError
from arealite.engine.fsdp.parallel import Layout, local, sum_gradients, sum_pieces
from arealite.utils.routing import expert_blocks


def apply_expert_parallel(model: PreTrainedModel, layout: Layout) -> None:
    """Give each rank of an expert group a range of the experts of each layer."""
    assert layout.experts is not None
    owners = layout.experts["ep"]
    if layout.strategy.tensor > 1:
        owners = layout.experts["ep", "tp"]._flatten("experts")
    for block in expert_blocks(model):
        experts = block.experts
        for name, parameter in list(experts.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.detach(), owners, [Shard(0)])
            experts.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        experts.num_experts //= owners.size()
        experts.forward = _Dispatcher(experts, layout)


def sharded_dimension(parameter: nn.Parameter, mesh: DeviceMesh) -> Shard:
    """Return the dimension of an expert's parameter that FSDP divides over the ranks of `mesh`.

    The experts of a rank if they can be divided, otherwise a dimension of their matrices.
    """
    for dim, size in enumerate(local(parameter).shape):
        if size % mesh.size() == 0:
            return Shard(dim)
    raise AllocationError(
        f"weights of experts {tuple(parameter.shape)} cannot be divided over {mesh.size()} ranks, the ones of d·c that "
        "have the same experts: use a larger e, or another d"
    )


def is_expert(parameter: Tensor) -> bool:
    """Return whether a parameter is divided over an expert group."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return "efsdp" in (names or ())


class _Dispatcher:
    """The forward pass of one layer's experts: tokens to their experts' ranks, and results back."""

    def __init__(self, experts: Any, layout: Layout):
        assert layout.experts is not None
        self.experts, self.compute = experts, experts.forward
        self.group, self.size = layout.experts.get_group("ep"), layout.strategy.expert
        self.num_tensor, self.tensor_rank = layout.strategy.tensor, layout.experts.get_local_rank("tp")
        self.tensor_group = layout.tp_group if self.num_tensor > 1 else None

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.tensor_group is not None:
            hidden_states = sum_gradients(hidden_states, self.tensor_group)
            top_k_weights = sum_gradients(top_k_weights, self.tensor_group)
        token, index, counts = self._plan(top_k_index)
        states, weights = _exchange_rows((hidden_states[token], top_k_weights[token]), counts, self.group)
        outputs = self._compute(states, _send_rows(index, counts, self.group), weights)
        sent, received = counts
        (returned,) = _exchange_rows((outputs,), (received, sent), self.group)
        total = hidden_states.new_zeros(hidden_states.shape, dtype=torch.float32)
        result = total.index_add(0, token, returned.float()).to(hidden_states.dtype)
        return result if self.tensor_group is None else sum_pieces(result, self.tensor_group)

    @torch.no_grad()
    def _plan(self, chosen: Tensor) -> tuple[Tensor, Tensor, tuple[list[int], list[int]]]:
        """Return the token of each row that is sent, its experts `[S, K]` on the receiver, and the counts.

        Rows are sorted by receiver. An expert on another rank than the receiver has the index `num_experts`. The counts
        are those of the rows that are sent to each rank, and received from each.
        """
        count = self.experts.num_experts
        owner = chosen // count
        here = owner % self.num_tensor == self.tensor_rank
        receiver = torch.where(here, owner // self.num_tensor, self.size)
        wanted = torch.zeros(self.size + 1, len(chosen), dtype=torch.bool, device=chosen.device)
        wanted.scatter_(0, receiver.T, True)
        rank, token = wanted[:-1].nonzero(as_tuple=True)
        index = torch.where(receiver[token] == rank[:, None], chosen[token] % count, count)
        sent = wanted[:-1].sum(dim=1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        counts = torch.stack([sent, received]).tolist()
        return token, index, (counts[0], counts[1])

    def _compute(self, states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of this rank's experts for each received token, `[R, H]`."""
        row, slot = (index < self.experts.num_experts).nonzero(as_tuple=True)
        pairs = states[row], index[row, slot][:, None], weights[row, slot][:, None]
        if not len(row):
            # FSDP needs gradients from every rank: compute one token and drop the result.
            pairs = states.new_zeros(1, states.shape[1]), index.new_zeros(1, 1), weights.new_zeros(1, 1)
        whole = dict(self.experts._parameters)
        self.experts._parameters.update({name: local(value) for name, value in whole.items()})
        try:
            outputs = self.compute(*pairs)
        finally:
            self.experts._parameters.update(whole)
        if not len(row):
            return states + 0.0 * outputs.sum()
        # As precise as the sum over the experts of a token on one rank.
        total = states.new_zeros(states.shape, dtype=torch.float32)
        return total.index_add(0, row, outputs.float()).to(states.dtype)


class _ExchangeRows(torch.autograd.Function):
    """Sends rows of several tensors to the ranks of a group; gradients are sent back.

    One function for all tensors, so that the collectives of the backward pass have the same order on all ranks.
    """

    @staticmethod
    def forward(ctx, counts, group, *tensors):
        ctx.counts, ctx.group = counts, group
        return tuple(_send_rows(tensor, counts, group) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *(_send_rows(grad, ctx.counts[::-1], ctx.group) for grad in grads)


def _exchange_rows(
    tensors: tuple[Tensor, ...], counts: tuple[list[int], list[int]], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    return _ExchangeRows.apply(counts, group, *tensors)


def _send_rows(rows: Tensor, counts: tuple[list[int], list[int]], group: dist.ProcessGroup) -> Tensor:
    """Send `counts[0][i]` rows to rank `i`; return the `counts[1]` rows that arrive."""
    sent, received = counts
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
