"""Chooses sizes of micro-batches and logit chunks, and whether activations are recomputed.

Used by `FSDPEngine` for the keys of its config that are null, by the free memory of the device when the first batch
arrives. The estimate of
activations is fitted to measured peaks of Qwen2 models of 0.5B and 1.5B parameters. What a config sets is kept.
"""

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from arealite.api.cli_args import TrainEngineConfig
from arealite.engine.fsdp.flops import FlopCounter
from arealite.engine.fsdp.model import PackedModel
from arealite.engine.fsdp.parallel import local
from arealite.utils import distributed

logger = logging.getLogger("arealite.engine")
# Larger micro-batches gain little and need more memory.
_MOST_TOKENS = 32768
# Activations are recomputed if micro-batches without that would be smaller than this.
_FEW_TOKENS = 16384
_CPU_CHUNK = 1024
# Share of the free memory that is planned; the rest is for fragmentation and temporaries.
_PLANNED_SHARE = 0.8
# Numbers kept for the backward pass, per number that the weights of a layer put out.
_KEPT_PER_OUTPUT = {"compiled": 1.3, "eager": 2.0}
# Bytes per logit: fp32 logits and the gradient in 16 bits.
_LOGIT_BYTES = 6
# Bytes of both optimizer states per parameter.
_STATE_BYTES = {"adamw_bf16": 4.0, "adamw_8bit": 2.0}


@dataclass(frozen=True)
class MemoryPlan:
    max_tokens_per_mb: int
    gradient_checkpointing: bool
    logprob_chunk_size: int


def plan_memory(model: PreTrainedModel, config: TrainEngineConfig, device: str) -> MemoryPlan:
    """Return the sizes for `model`, whose weights are on the device already; the same on all ranks."""
    if device != "cuda":
        return MemoryPlan(
            config.max_tokens_per_mb or _FEW_TOKENS,
            bool(config.gradient_checkpointing),
            config.logprob_chunk_size or _CPU_CHUNK,
        )
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return choose_sizes(model, config, _smallest_of_ranks(free - _reserved_bytes(model, config)))


def apply_plan(module: PackedModel, plan: MemoryPlan) -> MemoryPlan:
    """Set what the model itself needs to know of a plan; returns the plan."""
    module.chunk_size = plan.logprob_chunk_size
    if plan.gradient_checkpointing:
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
    if distributed.rank() == 0:
        logger.info("%s", plan)
    return plan


def choose_sizes(model: PreTrainedModel, config: TrainEngineConfig, free_bytes: float) -> MemoryPlan:
    """Return the sizes that fit into `free_bytes` beside weights, gradients and optimizer."""
    text = model.config.get_text_config()
    budget = max(0.0, _PLANNED_SHARE * free_bytes)
    chunk = config.logprob_chunk_size or _power_of_two(budget / 10 / (_LOGIT_BYTES * text.vocab_size), 256, 4096)
    budget -= _LOGIT_BYTES * chunk * text.vocab_size
    kept = _KEPT_PER_OUTPUT["compiled" if config.compile else "eager"]
    layers = text.num_hidden_layers
    layer_bytes = 2 * kept * FlopCounter(model).body / text.hidden_size / layers
    all_bytes = layer_bytes * layers if config.optimizer is not None else layer_bytes
    recomputes = config.gradient_checkpointing
    if recomputes is None:
        recomputes = config.optimizer is not None and budget < all_bytes * (config.max_tokens_per_mb or _FEW_TOKENS)
    if recomputes:
        # The input of each layer, and one layer at a time in the backward pass.
        all_bytes = 2 * text.hidden_size * layers + 2 * layer_bytes
    fits = int(budget / all_bytes) // 1024 * 1024
    return MemoryPlan(config.max_tokens_per_mb or min(max(fits, 1024), _MOST_TOKENS), recomputes, chunk)


def _reserved_bytes(model: PreTrainedModel, config: TrainEngineConfig) -> float:
    """Return what gradients, optimizer states and gathered weights will need besides the weights."""
    sizes = [(local(p).numel(), p.requires_grad, p.numel()) for p in model.parameters()]
    compute_bytes = getattr(torch, config.dtype).itemsize
    gathered = compute_bytes * sum(full for *_, full in sizes)
    if config.optimizer is None or config.cpu_offload:
        return gathered
    param_bytes = getattr(torch, config.param_dtype).itemsize
    states = _STATE_BYTES.get(config.optimizer.type, 2 * param_bytes)
    return gathered + (param_bytes + states) * sum(own for own, trained, _ in sizes if trained)


def _smallest_of_ranks(value: float) -> float:
    if distributed.world_size() == 1 or not dist.is_initialized():
        return value
    smallest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return float(smallest)


def _power_of_two(limit: float, least: int, most: int) -> int:
    """Return the largest power of two up to `limit`, within bounds."""
    return max(least, min(most, 1 << max(int(limit).bit_length() - 1, 0)))
