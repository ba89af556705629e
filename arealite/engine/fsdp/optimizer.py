"""Parameter groups, learning-rate schedule, gradient norm and gradient scaling of `FSDPEngine`.

Works on plain parameters and on DTensors of any mesh.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from arealite.api.cli_args import OptimizerConfig
from arealite.engine.fsdp.lowmem_adamw import LowMemoryAdamW
from arealite.engine.fsdp.parallel import local


def make_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make an AdamW optimizer. Weight decay acts on matrices and embeddings, not on norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2]
    vectors = [p for p in trained if p.dim() < 2]
    decays = ((matrices, config.weight_decay), (vectors, 0.0))
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
    settings = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.type != "adamw":
        return LowMemoryAdamW(groups, bits=8 if config.type == "adamw_8bit" else 16, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the rate of step `step` (from 0): linear warm-up, then constant, linear or cosine."""
    warmup = round(config.warmup_steps_proportion * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    # Without a known end there is nothing to decay towards.
    if config.lr_scheduler_type == "constant" or not total_steps:
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler_type == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


def grad_norm(parameters: list[torch.nn.Parameter]) -> float:
    """Return the 2-norm of all gradients over all ranks.

    Each rank squares its local part; sums go over the mesh dimensions along which a gradient is sharded. Gradients on
    different meshes (tensor parallel and not) are summed apart, because torch's own norm does not mix them.
    """
    by_layout: dict[Any, list[torch.Tensor]] = {}
    for grad in (p.grad for p in parameters if p.grad is not None):
        layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        by_layout.setdefault(layout, []).append(local(grad))
    total = 0.0
    for layout, grads in by_layout.items():
        square = torch.nn.utils.get_total_norm(grads, foreach=True).double().square()
        for dim, placement in enumerate(layout[1] if layout else ()):
            # Not `is_shard()`: it is False for the strided shards of tensor-parallel layers.
            if not placement.is_replicate() and layout[0].size(dim) > 1:
                dist.all_reduce(square, group=layout[0].get_group(dim))
        total += float(square)
    return math.sqrt(total) if total == total else math.nan


def scale_grads(parameters: list[torch.nn.Parameter], factor: torch.Tensor | float) -> None:
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]
