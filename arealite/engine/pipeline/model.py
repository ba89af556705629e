"""`PipelinedModel`: the stages of one rank, and what passes between ranks besides hidden states.

Checkpoints and published weights are gathered from all stages under the names of the whole model. A head that is tied
to the embedding is a copy on the last stage: its gradient is added to the embedding's on the first stage, which has
the optimizer state, and new values are sent back after each step.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from arealite.api.cli_args import TrainEngineConfig
from arealite.engine.fsdp.parallel import Layout, local
from arealite.engine.fsdp.routing import Routing
from arealite.engine.fsdp.sharding import all_tensors, fill, shard
from arealite.engine.pipeline.split import ModelParts
from arealite.engine.pipeline.stage import StageModel


class PipelinedModel(nn.Module):
    """`model` has the parameters of this rank under the names of the whole model; `stages` run them."""

    def __init__(self, empty: PreTrainedModel, config: TrainEngineConfig, layout: Layout):
        """Divide the meta model `empty`, which is changed, and shard this rank's stages."""
        super().__init__()
        # The whole model, on the meta device.
        self.like = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in all_tensors(empty).items()}
        self.all_parameters: dict[str, torch.Tensor] = {n: self.like[n] for n, _ in empty.named_parameters()}
        saved = empty.state_dict().keys()
        self.saved_buffers = {n: self.like[n] for n, _ in empty.named_buffers() if n in saved}
        self.rank, self.group = layout.pp_rank, layout.pp_group
        self.ranks = dist.get_process_group_ranks(self.group)
        parts = ModelParts(empty, len(self.ranks), config.pipeline_stages_per_rank)
        self._owner = {name: parts.owner(name) for name in self.like}
        self.num_stages = len(parts.stages)
        self.device_type = layout.mesh.device_type
        self.dtype = getattr(torch, config.dtype)
        stages, indices = [], parts.stages_of(self.rank)
        self.routing = Routing(empty, config, {layer for index in indices for layer in parts.stages[index]})
        for index in indices:
            is_last = index == self.num_stages - 1
            stages.append(StageModel(*parts.view(index), config, layout, self.routing, index, is_last))
        parts.drop_others(self.rank)
        self.model = empty
        for stage in stages:
            shard(stage, layout, config, stays_gathered=True)
        self.stages: list[StageModel] = stages
        self._registered = nn.ModuleList(stages)
        self.ring, self.has_lm_head = stages[0].ring, parts.head_name == "lm_head"
        self._has_tied = parts.is_tied
        self._embedding: Any = parts.base.embed_tokens
        self._head: Any = parts.head

    def fill(self, full: PreTrainedModel | None) -> None:
        """Copy the weights of rank 0's `full` into the stages of all ranks."""
        fill(self.model, full, self.device_type, self.like)
        self.copy_tied()

    @property
    def chunk_size(self) -> int:
        return self.stages[0].chunk_size

    @chunk_size.setter
    def chunk_size(self, size: int) -> None:
        for stage in self.stages:
            stage.chunk_size = size

    def reshard(self) -> None:
        """Free gathered weights: parameters are again those that optimizer and checkpoints use."""
        for part in self._registered.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def fetch(self, name: str, dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor of the whole model, which `make` returns on the stage that has it. Collective.

        Only rank 0 gets the tensors of other stages; on other ranks they have no values.
        """
        owner, shape = self._owner[name], self.like[name].shape
        value = make() if owner == self.rank else torch.empty(shape, dtype=dtype, device="meta")
        # The pipeline of rank 0 sends them; the ranks of the other ones only take part in gathering.
        if owner > 0 and self.ranks[0] == 0:
            if owner == self.rank:
                dist.send(value.contiguous(), dst=0, group=self.group)
            elif self.rank == 0:
                value = torch.empty(shape, dtype=dtype, device=self.device_type)
                dist.recv(value, src=self.ranks[owner], group=self.group)
        return value

    def after_step(self, *_: object) -> None:
        """Implement the hook that optimizers call after each step."""
        self.copy_tied()

    def copy_tied(self) -> None:
        """Send the embedding's values to the head that is tied to it. Collective."""
        if self._tied is None:
            return
        values = local(self._tied.detach())
        if self.rank == 0:
            dist.send(values, dst=self.ranks[-1], group=self.group)
        else:
            dist.recv(values, src=self.ranks[0], group=self.group)

    def add_tied_gradients(self) -> None:
        """Add the gradient of a tied head to the embedding's, and clear it. Collective."""
        if self._tied is None or not self._tied.requires_grad:
            return
        assert self._tied.grad is not None
        gradient = local(self._tied.grad)
        if self.rank == 0:
            other = torch.empty_like(gradient)
            dist.recv(other, src=self.ranks[-1], group=self.group)
            gradient.add_(other)
        else:
            dist.send(gradient, dst=self.ranks[0], group=self.group)
            self._tied.grad = None

    @property
    def _tied(self) -> nn.Parameter | None:
        """This rank's copy of a weight that embedding and head share; None if it has none."""
        if not self._has_tied or 0 < self.rank < len(self.ranks) - 1:
            return None
        return (self._embedding if self.rank == 0 else self._head).weight
