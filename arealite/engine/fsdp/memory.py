"""Chooses sizes of micro-batches and logit chunks, and whether activations are recomputed.

Used by `FSDPEngine` for the keys of its config that are null, by the free memory of the device when the first batch
arrives. What a config sets is kept. The formulas are in `arealite.utils.memory.estimate`.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.cli_args import TrainEngineConfig
from arealite.api.errors import TrainingError
from arealite.engine.fsdp.low_bit import num_weights
from arealite.engine.fsdp.model import PackedModel
from arealite.engine.fsdp.parallel import local
from arealite.engine.pipeline.model import PipelinedModel
from arealite.utils import distributed
from arealite.utils.memory.estimate import (
    CPU_CHUNK,
    MOST_TOKENS,
    MemoryPlan,
    activation_bytes,
    choose_sizes,
    cpu_sizes,
    reserved_bytes,
    sums_gradients,
)
from arealite.utils.memory.model_size import ModelSize

logger = logging.getLogger("arealite.engine")
# Another process uses this GPU if more than a CUDA context and communication buffers is taken.
_OTHERS = 4e9
# What stays free for other processes, beside a copy of the weights: at most this share of what is free now.
_ROOM, _MOST_ROOM = 2e9, 0.15
# Share of the device that `early_tokens` fill: servers that start there take a share of what is free.
_EARLY_SHARE = 0.05


def plan_memory(
    model: PreTrainedModel, config: TrainEngineConfig, device: str, layout: ParallelStrategy | None = None
) -> MemoryPlan:
    """Return the sizes for `model`, whose weights are on the device already; the same on all ranks.

    The first of several stages keeps activations of as many micro-batches: as much as one needs in all layers.
    """
    if device != "cuda":
        return cpu_sizes(config)
    free = torch.cuda.mem_get_info()[0] - _room_for_servers(2.0 * num_weights(model))
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    sizes = [(local(p).numel(), p.requires_grad, p.numel()) for p in model.parameters()]
    trained = sum(own for own, is_trained, _ in sizes if is_trained)
    layout, whole = layout or ParallelStrategy(), sum(full for *_, full in sizes)
    stage_trained = sum(full for _, is_trained, full in sizes if is_trained) if layout.pipeline > 1 else trained
    size, summed = ModelSize.of(model.config.to_dict(), whole), stage_trained if sums_gradients(config, layout) else 0.0
    free -= reserved_bytes(config, trained, size.gathered_at_once(layout, whole), summed)
    return choose_sizes(size, config, _smallest_of_ranks(free))


def early_tokens(model: PreTrainedModel, config: TrainEngineConfig, device: str, num_layers: int) -> int:
    """Return the size of a micro-batch that needs little memory in `num_layers`.

    As large as possible: compiled code is tuned for the size that it sees first.
    """
    most = config.max_tokens_per_mb or MOST_TOKENS
    if device != "cuda":
        return min(most, CPU_CHUNK)
    size = ModelSize.of(model.config.to_dict(), sum(p.numel() for p in model.parameters()))
    token = activation_bytes(replace(size, layers=num_layers), config, recomputes=False)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return min(most, max(1024, int(_EARLY_SHARE * total / token)))


def apply_plan(module: PackedModel | PipelinedModel, plan: MemoryPlan) -> MemoryPlan:
    """Set what the model and the allocator need to know of a plan; returns the plan."""
    module.chunk_size = plan.logprob_chunk_size
    if plan.gradient_checkpointing:
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
    if next(module.parameters()).is_cuda:
        _leave_room(2.0 * num_weights(module))
    if distributed.rank() == 0:
        logger.info("%s", plan)
    return plan


def explains_out_of_memory(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of an engine: if the memory of the GPU ends, an error says what to set."""

    @wraps(method)
    def explained(engine: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(engine, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            plan: MemoryPlan = engine.memory
            cheaper = "" if plan.gradient_checkpointing else "gradient_checkpointing=true or "
            raise TrainingError(
                f"the memory of the GPU does not suffice for micro-batches of {plan.max_tokens_per_mb:,} tokens. Set "
                f"{cheaper}max_tokens_per_mb={plan.max_tokens_per_mb // 2} of this model, or lower server.mem_fraction "
                f"if a server shares the GPU (docs/performance.md, Out of memory). torch says: {error}"
            ) from error

    return explained


def _leave_room(published: float) -> None:
    """Limit torch's allocator on a GPU with servers: memory that it keeps for reuse is lost to them."""
    if room := _room_for_servers(published):
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + free - room) / total)


def _room_for_servers(published: float) -> float:
    """Return the bytes that servers on this GPU need, or 0 if there are none.

    `published` bytes are those of the copy that servers read; it is made outside of torch's allocator.
    """
    free, total = torch.cuda.mem_get_info()
    if total - free - torch.cuda.memory_reserved() <= _OTHERS:
        return 0.0
    return min(_ROOM + published, _MOST_ROOM * free)


def _smallest_of_ranks(value: float) -> float:
    smallest = torch.tensor([value], dtype=torch.float64)
    if distributed.world_size() > 1 and dist.is_initialized():
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return float(smallest)
