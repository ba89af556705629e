"""Optimizers, learning-rate schedule, gradient norm and gradient scaling of `FSDPEngine`.

Works on plain parameters and on DTensors of any mesh.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from arealite.api.cli_args import OptimizerConfig
from arealite.engine.fsdp.expert_parallel import is_expert
from arealite.engine.fsdp.parallel import Layout, local, slice_of

# Entries along the last dimension that share a scale.
_BLOCK = 128
# (dtype, levels, power): a share x of the block's largest value is stored as levels·|x|^(1/power), which is finer near
# zero. The second moment spans more orders of magnitude.
_CODES = {"exp_avg": (torch.int8, 127, 2.0), "exp_avg_sq": (torch.uint8, 255, 4.0)}


def make_optimizer(model: torch.nn.Module, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    """Make an AdamW optimizer. Weight decay acts on matrices and embeddings, not on norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2]
    vectors = [p for p in trained if p.dim() < 2]
    decays = ((matrices, config.weight_decay), (vectors, 0.0))
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
    settings = {"lr": lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.type != "adamw":
        return LowMemoryAdamW(groups, bits=8 if config.type == "adamw_8bit" else 16, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


def lr_share(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the share of the peak rate at step `step`, counted from 0.

    It rises linearly during the warm-up, then stays constant or falls linearly or by a cosine.
    """
    warmup = round(config.warmup_steps_proportion * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    # Without a known end there is nothing to decay towards.
    if config.lr_scheduler_type == "constant" or not total_steps:
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler_type == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share


def grad_norm(parameters: list[torch.nn.Parameter], stages: dist.ProcessGroup | None = None) -> float:
    """Return the 2-norm of all gradients over all ranks; `stages` are those of a pipeline.

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
    if stages is not None and dist.get_world_size(stages) > 1:
        squares = torch.tensor([total], dtype=torch.float64)
        dist.all_reduce(squares, group=stages)
        total = float(squares)
    return math.sqrt(total) if total == total else math.nan


@torch.no_grad()
def clip_gradients(
    model: torch.nn.Module, limit: float, partial: list[torch.nn.Parameter], layout: Layout | None
) -> float:
    """Clip the gradients to the norm `limit`, if that is not 0; return the norm before.

    Gradients of `partial` parameters are first summed over the tensor group. Those of experts are means over the ranks
    with the same experts, and become means over all ranks of d and c.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in partial:
        if parameter.grad is not None and layout is not None:
            dist.all_reduce(local(parameter.grad), group=layout.tp_group)
    if layout is not None and layout.experts is not None:
        scale_grads([p for p in parameters if is_expert(p)], 1.0 / layout.strategy.expert)
    norm = grad_norm(parameters, layout.pp_group if layout is not None else None)
    if limit and limit < norm < math.inf:
        scale_grads(parameters, limit / (norm + 1e-6))
    return norm


@torch.no_grad()
def scale_grads(parameters: list[torch.nn.Parameter], factor: torch.Tensor | float) -> None:
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]


class LowMemoryAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) with moments in bfloat16 or 8 bits (blocks as in arXiv 2110.02861).

    All arithmetic is fp32. Values stored in fewer bits (moments, and bfloat16 weights) are rounded stochastically, so
    that small updates survive on average. Ranks that hold the same values round them alike. With 8 bits the moments of
    vectors (norms, biases) stay fp32: they are few and sensitive. States have the parameter's shape and placement, so
    sharding and checkpoints need no special case. torchao's AdamW8bit reaches the same loss, but keeps its
    states in tensor subclasses.
    """

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float, bits: int = 16):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.bits = bits

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "this optimizer takes no closure"
        pairs = ((p, group) for group in self.param_groups for p in group["params"])
        for number, (parameter, group) in enumerate(pairs):
            if parameter.grad is not None:
                self._update(parameter, group, number)

    def _update(self, parameter: torch.nn.Parameter, group: dict, number: int) -> None:
        state = self.state[parameter]
        if not state:
            self._make_state(parameter, state)
        state["step"] += 1
        count = float(state["step"])
        # Seeded without any state of the rank: replicas round alike, and checkpoints need not save it.
        noise = torch.Generator(local(parameter).device)
        noise.manual_seed(hash((number, int(count), *_place(parameter))))
        beta1, beta2 = group["betas"]
        assert parameter.grad is not None
        weight, grad = local(parameter), local(parameter.grad).float()
        mean = load_moment(state, "exp_avg").lerp_(grad, 1.0 - beta1)
        square = load_moment(state, "exp_avg_sq").mul_(beta2)
        square.addcmul_(grad, grad, value=1.0 - beta2)
        store_moment(state, "exp_avg", mean, noise)
        store_moment(state, "exp_avg_sq", square, noise)
        step = mean.div_(1.0 - beta1**count)
        step.div_((square.div_(1.0 - beta2**count)).sqrt_().add_(group["eps"]))
        updated = weight.float() * (1.0 - group["lr"] * group["weight_decay"]) - group["lr"] * step
        store_rounded(weight, updated, noise)

    def _make_state(self, parameter: torch.nn.Parameter, state: dict) -> None:
        state["step"] = torch.zeros((), dtype=torch.float32)
        for key, (code_type, _, _) in _CODES.items():
            coded = self.bits == 8 and parameter.dim() > 1
            dtype = code_type if coded else torch.bfloat16 if self.bits == 16 else torch.float32
            state[key] = torch.zeros_like(parameter, dtype=dtype)
            if coded:
                state[f"{key}_scale"] = _zero_scales(parameter)


def _place(parameter: torch.Tensor) -> list[int]:
    """Return which part of a sharded parameter this rank holds; equal on ranks that hold the same part."""
    if not isinstance(parameter, DTensor):
        return []
    places = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
    return [index for index, placement in places if not placement.is_replicate()]


def fit_scales(parameter: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of scales saved with other blocks; a cut block becomes two of one scale."""
    block = parameter.shape[-1] // saved.shape[-1]
    part = math.gcd(block, local(parameter).shape[-1])
    scales = _zero_scales(parameter, part)
    local(scales).copy_(slice_of(scales, saved.repeat_interleave(block // part, dim=-1)))
    return scales


def _zero_scales(parameter: torch.Tensor, block: int | None = None) -> torch.Tensor:
    """Return one zero per block of a row, placed like the parameter and shorter in the last dimension."""
    mine = local(parameter)
    if block is None:
        block = math.gcd(mine.shape[-1], _BLOCK)
        block = block if block >= 32 else mine.shape[-1]
    scales = mine.new_zeros(*mine.shape[:-1], mine.shape[-1] // block, dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return scales
    shape = (*parameter.shape[:-1], parameter.shape[-1] // block)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        scales, parameter.device_mesh, parameter.placements, shape=torch.Size(shape), stride=stride
    )


def load_moment(state: dict, key: str) -> torch.Tensor:
    """Return a moment as a new fp32 tensor."""
    stored = local(state[key])
    if f"{key}_scale" not in state:
        return stored.to(torch.float32, copy=True)
    _, levels, power = _CODES[key]
    scale = local(state[f"{key}_scale"])
    share = stored.float() / levels
    value = _blocks(share.abs().pow_(power).copysign_(share), scale) * scale[..., None]
    return value.view(stored.shape)


def store_moment(state: dict, key: str, value: torch.Tensor, noise: torch.Generator) -> None:
    """Store fp32 `value` as the moment `key`, rounded stochastically."""
    stored = local(state[key])
    if f"{key}_scale" not in state:
        store_rounded(stored, value, noise)
        return
    _, levels, power = _CODES[key]
    scale = local(state[f"{key}_scale"])
    blocks = _blocks(value, scale)
    scale.copy_(blocks.abs().amax(dim=-1) if value.numel() else scale)
    share = (blocks / scale.clamp(min=1e-38)[..., None]).view(stored.shape)
    dither = torch.rand(share.shape, device=share.device, generator=noise)
    code = share.abs().pow_(1.0 / power).mul_(levels).add_(dither).floor_()
    code.clamp_(max=levels)
    if stored.dtype == torch.uint8:
        # A second moment of zero beside a nonzero first moment would make a huge step.
        code.clamp_(min=1.0).mul_(share > 0)
    stored.copy_(code.copysign_(share))


def _blocks(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return value.view(*scale.shape, value.shape[-1] // max(scale.shape[-1], 1))


def store_rounded(target: torch.Tensor, value: torch.Tensor, noise: torch.Generator) -> None:
    """Copy fp32 `value` into `target`, rounding to bfloat16 stochastically (exact on average)."""
    if target.dtype != torch.bfloat16:
        target.copy_(value)
        return
    options = {"dtype": torch.int32, "device": value.device, "generator": noise}
    dither = torch.randint(0, 1 << 16, value.shape, **options)
    bits = (value.contiguous().view(torch.int32) + dither) & -(1 << 16)
    target.copy_(bits.view(torch.float32))
