"""Shards a model with FSDP2, fills it, and keeps its weights gathered over several passes.

Used by `FSDPEngine` and by pipeline stages. Only rank 0 has the full weights; it sends them tensor by tensor.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import PreTrainedModel

from arealite.api.cli_args import TrainEngineConfig
from arealite.api.errors import ConfigError
from arealite.engine.fsdp.expert_parallel import sharded_dimension
from arealite.engine.fsdp.model import PackedModel
from arealite.engine.fsdp.parallel import Layout, local, slice_of
from arealite.utils import distributed
from arealite.utils.decoders import language_model
from arealite.utils.imports.compiler_imports import import_compiler
from arealite.utils.routing import expert_blocks


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks, which are sharded, checkpointed and compiled one by one."""
    names = set(model._no_split_modules or ())
    # FSDP makes subclasses of their classes.
    layers = [m for m in language_model(model).modules() if names & {base.__name__ for base in type(m).__mro__}]
    if not layers:
        raise ConfigError(f"{type(model).__name__} does not declare its layers (_no_split_modules): use another model")
    return layers


def compile_layers(model: PreTrainedModel, config: TrainEngineConfig, device: str) -> None:
    """Compile the layers, if this is configured, when they are first called."""
    if config.compile and (device, config.dtype) != ("cuda", "float32"):  # padded attention
        import_compiler().join()
        # One graph for all layers: symbolic floats (epsilons, scales) would compile the second layer again.
        torch._dynamo.config.specialize_float = True
        for layer in decoder_layers(model):
            _fix_sizes(layer)
            layer.compile(dynamic=True)


def _fix_sizes(layer: nn.Module) -> None:
    """Let torch.compile take head sizes as numbers: only lengths vary.

    It takes numbers of modules that FSDP manages for variables. Each operation then adds guards about quotients of
    them, which are computed again at every start, also if the graph is in the cache.
    """
    for child in layer.children():
        if type(getattr(child, "head_dim", None)) is int and "forward" not in vars(child):
            # No closure: all layers share the code, and with it the graph.
            child.forward = MethodType(_forward_with_fixed_sizes, child)


def _forward_with_fixed_sizes(self: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.comptime.comptime.force_static(self.head_dim)  # pyright: ignore[reportAttributeAccessIssue]
    return type(self).forward(self, *args, **kwargs)


def shard(module: PackedModel, layout: Layout, config: TrainEngineConfig, stays_gathered: bool = False) -> None:
    """Shard the meta `module` layer by layer and allocate its parameters, which `fill` then fills.

    With `stays_gathered` weights are kept after a forward pass until the caller shards them again.
    """
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": layout.fsdp, "mp_policy": policy}
    module.is_one_shard = layout.fsdp.size() == 1
    if module.is_one_shard or stays_gathered:
        options["reshard_after_forward"] = False
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    if layout.experts is not None:
        _shard_experts(module.model, layout.experts["efsdp"], options)
    for layer in decoder_layers(module.model):
        fully_shard(layer, **options)
    fully_shard(module, **options)
    register_fsdp_forward_method(module, "check_logprobs")
    module.to_empty(device="cpu" if config.cpu_offload else layout.fsdp.device_type)


def _shard_experts(model: PreTrainedModel, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Shard experts over the ranks that have the same ones. Their inputs keep their types."""
    policy = replace(options["mp_policy"], cast_forward_inputs=False)
    for block in expert_blocks(model):
        placement = partial(sharded_dimension, mesh=mesh)
        fully_shard(block.experts, **options | {"mesh": mesh, "mp_policy": policy}, shard_placement_fn=placement)


class keep_gathered:
    """Keeps weights that are not divided over ranks in the compute type during several passes.

    FSDP would convert weights and gradients in each pass. `last_pass` is called before the last backward pass. After
    the block the model has its parameters again, which optimizer and checkpoints use. Weights that are divided over
    ranks are freed after each pass as usual.
    """

    def __init__(self, module: PackedModel):
        parts = (part for part in module.modules() if isinstance(part, FSDPModule))
        self.parts = list(parts) if module.is_one_shard else []

    def __enter__(self) -> "keep_gathered":
        self._set_last(False)
        return self

    def last_pass(self) -> None:
        self._set_last(True)

    def __exit__(self, *_: object) -> None:
        self._set_last(True)
        for part in self.parts:
            part.reshard()

    def _set_last(self, is_last: bool) -> None:
        for part in self.parts:
            part.set_requires_gradient_sync(is_last, recurse=False)
            part.set_reshard_after_backward(is_last, recurse=False)


def check_logprobs(module: PackedModel, device: str) -> None:
    """Raise `ConfigError` if packed log-probs differ from those of the model's own forward pass."""
    # Layers are compiled for training batches, not for this one.
    with torch.compiler.set_stance("force_eager"), keep_gathered(module):
        module.check_logprobs(device)
    if isinstance(module, FSDPModule):
        # Otherwise an optimizer made now would hold the gathered tensors.
        module.reshard()


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def fill(model: nn.Module, full: PreTrainedModel | None, device: str, like: Mapping[str, torch.Tensor]) -> None:
    """Copy weights and buffers of rank 0's `full` into this rank's part of the model.

    Buffers that no checkpoint holds (rotary frequencies) are copied too: they are undefined after the meta device.
    `like` has the names, shapes and types of the whole model.
    """
    copy_from_first(model, all_tensors(full) if full is not None else {}, device, like)
    # Offloaded weights are on the host, but buffers are used on the device.
    for owner in model.modules():
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = buffer if buffer is None else buffer.to(device)


@torch.no_grad()
def copy_from_first(
    model: nn.Module, source: Mapping[str, torch.Tensor], device: str, like: Mapping[str, torch.Tensor]
) -> None:
    """Copy full tensors, which only rank 0 has, into parameters and buffers that may be sharded.

    All ranks call it with the names, shapes and types `like`; a rank needs to have only some of the tensors.
    """
    own = all_tensors(model)
    for name, tensor in like.items():
        if distributed.rank() == 0:
            value = source[name].detach().to(device, tensor.dtype).contiguous()
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if distributed.world_size() > 1:
            dist.broadcast(value, src=0)
        if name in own:
            local(own[name]).copy_(slice_of(own[name], value))
