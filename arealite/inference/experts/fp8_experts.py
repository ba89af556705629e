"""Experts of mixtures with weights in FP8 (e4m3): conversion, and the pass that reads them.

Used by the embedded engine with `weight_dtype=fp8`. Both matrices of an expert have a scale in float32 for each output
channel, and activations one for each token, as in `Fp8Linear`. The modules stay those of transformers, with the same
names of parameters: only their numbers and the function that its interface for experts calls are others.

Legend: S pairs of a token and an expert, sorted by expert; E experts of this rank, K inputs, N outputs.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from arealite.api.errors import ConfigError
from arealite.inference.fp8 import FP8, MULTIPLE, WIDE, Quantized, quantize
from arealite.utils.routing import expert_blocks

IMPLEMENTATION = "arealite_fp8"
MATRICES = ("gate_up_proj", "down_proj")


def multiply_groups(x: Quantized, weight: torch.Tensor, scale: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return x[rows of e] @ weight[e].T for each expert, [S, N] in bfloat16.

    `weight` is [E, N, K], `scale` [E, N]; the rows of expert e end at `ends[e]`. Rows behind the last are zero.
    """
    out = torch.zeros(x.values.shape[0], weight.shape[1], dtype=WIDE, device=weight.device)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        rows = slice(start, end)
        wide = (x.values[rows].float() * x.scales[rows]) @ (weight[expert].float() * scale[expert][:, None]).t()
        out[rows], start = wide.to(WIDE), end
    return out


def expert_layers(model: PreTrainedModel) -> list[str]:
    """Names of the modules with experts. Raises `ConfigError` if they cannot be in FP8."""
    found, names = [block.experts for block in expert_blocks(model)], {m: n for n, m in model.named_modules()}
    for experts in found:
        is_plain = experts.has_gate and experts.is_concatenated and not experts.is_transposed
        if not is_plain or experts.has_bias or getattr(experts, "has_post_expert_norm", False):
            raise ConfigError(
                "weight_dtype=fp8 serves experts with a gate and without biases (Qwen3-MoE, Mixtral, DeepSeek-V3), not "
                f"those of {type(model).__name__}: use weight_dtype=auto"
            )
        for name in MATRICES:
            weight = getattr(experts, name)
            if weight.dtype != WIDE or any(size % MULTIPLE for size in weight.shape[1:]):
                given = f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
                raise ConfigError(
                    f"weight_dtype=fp8 needs experts in bfloat16 whose sizes are multiples of {MULTIPLE}, {name} is "
                    f"{given}: set dtype=bfloat16, or use weight_dtype=auto"
                )
    return [names[experts] for experts in found]


def convert_experts(experts: Any) -> None:
    """Quantize the weights of a layer's experts, and let transformers call `forward_fp8` for them."""
    ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = forward_fp8
    for name in MATRICES:
        values, scales = quantize(getattr(experts, name).detach())
        setattr(experts, name, nn.Parameter(values, requires_grad=False))
        experts.register_buffer(f"{name}_scale", scales[..., 0], persistent=False)
    # A config of its own: that of the model is also used to load models that are not in FP8.
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation_internal = IMPLEMENTATION


def forward_fp8(experts: Any, hidden: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the sum of each token's experts, weighted by `shares`, [T, H].

    `index` and `shares` are [T, experts of a token]. An index of E is an expert of another rank, which is skipped.
    """
    return FORWARDS[hidden.device.type](experts, hidden, index, shares)


def forward_reference(experts: Any, hidden: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Compute `forward_fp8` with the operations of torch."""
    top_k, count = index.shape[-1], experts.num_experts
    ids, order = torch.sort(index.reshape(-1), stable=True)
    ends = torch.bincount(ids, minlength=count + 1)[:count].cumsum(0)
    x = quantize(hidden)
    tokens = order // top_k
    x = Quantized(x.values.view(torch.uint8)[tokens].view(FP8), x.scales[tokens])
    gated = experts._apply_gate(multiply_groups(x, experts.gate_up_proj, experts.gate_up_proj_scale, ends))
    out = multiply_groups(quantize(gated), experts.down_proj, experts.down_proj_scale, ends)
    out = out * shares.reshape(-1)[order][:, None]
    unsorted = torch.empty_like(out)
    unsorted[order] = out
    return unsorted.view(*index.shape, -1).sum(1).to(hidden.dtype)


# By type of device. `arealite.inference.cuda.experts` adds that of Triton kernels.
FORWARDS: dict[str, Callable[..., torch.Tensor]] = {"cpu": forward_reference}
