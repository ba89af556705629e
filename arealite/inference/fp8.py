"""Linear layers with weights in FP8 (e4m3): quantization, the layer, and the conversion of a model.

Used by the embedded engine with `weight_dtype=fp8`. A weight has a scale in float32 for each output channel, chosen
when it is loaded; an activation has one for each token, chosen in every pass. Their product runs on the FP8 tensor
cores and is returned in bfloat16. New weights are quantized into the same memory, which CUDA graphs read.

Legend: M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError
from arealite.inference.llama_like import body_of, is_llama_like
from arealite.inference.sharding import RowLinear
from arealite.utils.routing import expert_blocks

FP8 = torch.float8_e4m3fn
# What layers in FP8 take and return, and in which new weights are rounded before they are quantized.
WIDE = torch.bfloat16
LARGEST = 448.0
MULTIPLE = 16  # of K and N
_CAPABILITY = (8, 9)
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Quantized(NamedTuple):
    """Vectors in FP8 with a scale each: activations of tokens, or rows of a weight."""

    values: torch.Tensor  # [M, K]
    scales: torch.Tensor  # [M, 1] in float32


def quantize(x: torch.Tensor) -> Quantized:
    """Quantize the rows of `x` [..., K]. The largest number of a row becomes the largest one of FP8."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scales = torch.where(largest > 0, (largest / LARGEST).clamp(min=1e-30), 1.0)
    return Quantized(divide(x, scales), scales)


def divide(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Numbers in FP8 for given scales."""
    return (x.float() / scales).to(FP8)


def multiply(x: Quantized, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product of activations and a weight [N, K] with scales [N], plus `bias`, in bfloat16."""
    if not weight.is_cuda:  # torch for x86 CPUs takes one scale for all rows only
        wide = (x.values.float() * x.scales) @ (weight.float() * scale[:, None]).t()
        return (wide if bias is None else wide + bias).to(WIDE)
    scales = {"scale_a": x.scales, "scale_b": scale[None]}
    return torch._scaled_mm(x.values, weight.t(), bias=bias, out_dtype=WIDE, use_fast_accum=True, **scales)


class Fp8Linear(nn.Module):
    """A linear layer with its weight in FP8.

    `sum_ranks` adds the products of tensor-parallel ranks, in place.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        sum_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)  # [N, K]
        self.scale: torch.Tensor
        self.register_buffer("scale", scale, persistent=False)  # [N]
        self.bias, self._sum_ranks = bias, sum_ranks

    @property
    def sums_ranks(self) -> bool:
        return self._sum_ranks is not None

    @classmethod
    def of(cls, linear: nn.Linear | RowLinear) -> Fp8Linear:
        """The layer with its weight quantized."""
        values, scales = quantize(linear.weight.detach())
        return cls(values, scales[:, 0], linear.bias, linear._sum if isinstance(linear, RowLinear) else None)

    @classmethod
    def join(cls, layers: list[Fp8Linear]) -> Fp8Linear:
        """Join layers with the same input in one.

        Their weights, scales and biases become views of its own.
        """
        weight = torch.cat([layer.weight.data.view(torch.uint8) for layer in layers]).view(FP8)
        scale = torch.cat([layer.scale for layer in layers])
        has_bias = layers[0].bias is not None
        bias = torch.cat([layer.bias.data for layer in layers if layer.bias is not None]) if has_bias else None
        start = 0
        for layer in layers:
            part = slice(start, start + layer.weight.shape[0])
            layer.weight.data, layer.scale = weight[part], scale[part]
            if bias is not None and layer.bias is not None:
                layer.bias.data = bias[part]
            start = part.stop
        return cls(weight, scale, bias)

    def forward(self, x: torch.Tensor | Quantized) -> torch.Tensor:
        if not isinstance(x, Quantized):  # the model's own forward pass, which the fused one is compared with
            return self(quantize(x.flatten(0, -2))).unflatten(0, x.shape[:-1])
        out = multiply(x, self.weight, self.scale, None if self._sum_ranks else self.bias)
        if self._sum_ranks is None:
            return out
        out = self._sum_ranks(out)
        return out if self.bias is None else out + self.bias


class Fp8Matrices:
    """One matrix of each expert of a layer in FP8, [E, N, K]; its module has the scales [E, N] too."""

    def __init__(self, experts: nn.Module, name: str):
        self._experts, self._name = experts, name

    @property
    def weight(self) -> nn.Parameter:
        return getattr(self._experts, self._name)

    @property
    def scale(self) -> torch.Tensor:
        return getattr(self._experts, f"{self._name}_scale")


def fp8_layers(model: nn.Module) -> dict[str, Fp8Linear | Fp8Matrices]:
    """The layers and matrices of experts in FP8, by the names of their weights."""
    found: dict[str, Fp8Linear | Fp8Matrices] = {}
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            found[f"{name}.weight"] = module
            continue
        own = [key for key, weight in module.named_parameters(recurse=False) if weight.dtype == FP8]
        found |= {f"{name}.{key}": Fp8Matrices(module, key) for key in own}
    return found


def verified(layer: Fp8Linear | Fp8Matrices, sample: torch.Tensor, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return `sample`, elements as they were before quantization, if the weight holds them at `at`.

    Where it holds something else, return that.
    """
    held, scale = layer.weight.detach().view(torch.uint8)[at].view(FP8), layer.scale[at[:-1]]
    is_held = divide(sample, scale).view(torch.uint8) == held.view(torch.uint8)
    return torch.where(is_held, sample, (held.float() * scale).to(sample.dtype))


def stage_pairs(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], model: nn.Module, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Bring new weights to the device, in the types of their targets; in FP8 with their scales."""
    layers = {id(layer.weight): layer for layer in fp8_layers(model).values()}
    for target, value in pairs:
        layer = layers.get(id(target))
        if layer is None:
            yield target, value.to(device, target.dtype)
            continue
        values, scales = quantize(value.to(device, WIDE))
        yield target, values
        yield layer.scale, scales[..., 0]


def loaded_dtype(target: torch.Tensor) -> torch.dtype:
    """The type to which new values of a parameter are rounded, before any quantization."""
    return WIDE if target.dtype == FP8 else target.dtype


def check_device(config: ServerConfig, device: torch.device) -> None:
    """Raise `ConfigError` if FP8 is asked for on a device that does not have it."""
    wanted = [key for key in ("kv_cache_dtype", "weight_dtype") if getattr(config, key) == "fp8"]
    if wanted and device.type != "cuda":
        raise ConfigError(f"{wanted[0]}=fp8 works on CUDA only, and the device is {device.type}: use {wanted[0]}=auto")
    if config.weight_dtype == "fp8" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise ConfigError(
            f"weight_dtype=fp8 needs compute capability {'.'.join(map(str, _CAPABILITY))} or newer (Ada, Hopper), "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, torch.cuda.get_device_capability(device)))}: "
            "use weight_dtype=auto"
        )


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers of a decoder, without the head and without experts.

    Raises `ConfigError` for a model whose layers cannot be in FP8.
    """
    if not is_llama_like(model) and not expert_blocks(model):
        raise ConfigError(
            "weight_dtype=fp8 serves Llama-like decoders (Llama, Mistral, Qwen2, Qwen3) and mixtures of experts, not "
            f"{type(model).__name__}: use weight_dtype=auto"
        )

    def is_linear(block: nn.Module, name: str) -> bool:
        return isinstance(getattr(block, name, None), nn.Linear | RowLinear)

    names = {module: name for name, module in model.named_modules()}
    blocks = [(block, names[block]) for layer in body_of(model).layers for block in (layer.self_attn, layer.mlp)]
    found = [f"{prefix}.{name}" for block, prefix in blocks for name in _LAYERS if is_linear(block, name)]
    for name in found:
        _check_weight(model.get_parameter(f"{name}.weight"), name)
    return found


def _check_weight(weight: torch.Tensor, name: str) -> None:
    if weight.dtype != WIDE:
        given = str(weight.dtype).removeprefix("torch.")
        raise ConfigError(f"weight_dtype=fp8 computes in bfloat16, the model is loaded in {given}: set dtype=bfloat16")
    if any(size % MULTIPLE for size in weight.shape):
        raise ConfigError(
            f"weight_dtype=fp8 needs layers whose sizes are multiples of {MULTIPLE}, {name} has {list(weight.shape)} "
            "on each rank: use weight_dtype=auto, or fewer ranks (tensor_parallel)"
        )
