"""Frozen linear layers in 8 or 4 bits: the base below adapters, or a reference model.

`fp8` is e4m3 with a scale per output row, a power of two: dequantizing is exact in bfloat16 and float32. `nf4` has the
16 levels of QLoRA (arXiv 2305.14314) and a bfloat16 scale per block of 64 weights. Layers are dequantized to the
compute type in each forward pass and again in each backward pass; autograd keeps the low-bit weight only. Codes are
buffers: every rank has all of them, FSDP gathers none, and checkpoints to resume from leave them out, because `path`
has the weights. Written in plain torch: bitsandbytes and torchao would be one more dependency for about a hundred
lines.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from arealite.api.cli_args import TrainEngineConfig
from arealite.api.errors import ConfigError
from arealite.engine.fsdp.lora import is_adapter
from arealite.utils.model_config import reject_low_bit_experts
from arealite.utils.routing import num_experts

# The largest number of e4m3, and the smallest exponent of a scale.
_LARGEST, _MIN_EXPONENT = 448.0, -126
_BLOCK = 64
# Quantiles of a normal distribution, with an exact zero (appendix E of the paper).
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# A type as wide as two numbers of `dtype`, to look up both numbers of a byte at once.
_TWICE = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}
_SCHEMA = "(Tensor x, Tensor codes, Tensor scales, Tensor? bias, str kind) -> Tensor"
_BACKWARD_SCHEMA = "(Tensor grad, Tensor codes, Tensor scales, str kind) -> Tensor"


def quantize(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (uint8) and scales of a matrix."""
    if kind == "fp8":
        rows = weight.float()
        largest = rows.abs().amax(dim=1, keepdim=True)
        mantissa, exponent = torch.frexp(largest / _LARGEST)
        # The smallest power of two with which the largest weight is in range.
        exponent = (exponent - (mantissa == 0.5).int()).clamp(min=_MIN_EXPONENT)
        scales = torch.ldexp(torch.ones_like(largest), exponent)
        # Conversions to e4m3 may turn infinity into the largest number.
        scales = torch.where(largest.isfinite(), scales, torch.nan)
        return (rows / scales).to(torch.float8_e4m3fn).view(torch.uint8), scales
    blocks = weight.float().reshape(-1, _BLOCK)
    scales = blocks.abs().amax(dim=1).to(torch.bfloat16)
    share = blocks / scales.float().clamp(min=1e-38)[:, None]
    levels = torch.tensor(_LEVELS, device=weight.device)
    nearest = torch.bucketize(share, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).view(-1, 2)
    return (nearest[:, 0] << 4 | nearest[:, 1]).view(len(weight), -1), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix of these codes in `dtype`."""
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn).to(dtype).mul_(scales.to(dtype))
    pairs = _level_pairs(dtype, codes.device).index_select(0, codes.view(-1).int())
    blocks = pairs.view(dtype).view(-1, _BLOCK).mul_(scales.to(dtype)[:, None])
    return blocks.view(len(codes), -1)


@cache
def _level_pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return both levels of each byte, as one number of twice the width."""
    levels = torch.tensor(_LEVELS, dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([levels[byte >> 4], levels[byte & 15]], dim=1).view(_TWICE[dtype]).view(-1)


def _linear(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> torch.Tensor:
    return functional.linear(x, dequantize(codes, scales, kind, x.dtype), bias)


def _linear_backward(grad: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: str) -> torch.Tensor:
    return grad @ dequantize(codes, scales, kind, grad.dtype)


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    _, codes, scales, _, ctx.kind = inputs
    ctx.save_for_backward(codes, scales)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    codes, scales = ctx.saved_tensors
    return torch.ops.arealite.low_bit_linear_backward(grad, codes, scales, ctx.kind), None, None, None, None


# Operators, not an autograd.Function that torch.compile sees through: it would find the same dequantized matrix in both
# passes, and could keep it from one to the other.
torch.library.define("arealite::low_bit_linear", _SCHEMA)
torch.library.impl("arealite::low_bit_linear", "default", _linear)
torch.library.register_fake("arealite::low_bit_linear", lambda x, codes, *_: x.new_empty(*x.shape[:-1], codes.shape[0]))
torch.library.register_autograd("arealite::low_bit_linear", _backward, setup_context=_save)
torch.library.define("arealite::low_bit_linear_backward", _BACKWARD_SCHEMA)
torch.library.impl("arealite::low_bit_linear_backward", "default", _linear_backward)
torch.library.register_fake(
    "arealite::low_bit_linear_backward",
    lambda grad, codes, scales, kind: grad.new_empty(*grad.shape[:-1], codes.shape[1] * (1 if kind == "fp8" else 2)),
)


class LowBitLinear(nn.Module):
    """A frozen linear layer whose weight is stored in low bits. Its gradient goes to the input only."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: nn.Linear, kind: str, device: str):
        """`device` is where the weight is quantized; the codes are where the weight was."""
        super().__init__()
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        self.register_parameter("bias", linear.bias)
        weight = linear.weight.detach()
        codes, scales = _empty(weight, kind) if weight.is_meta else quantize(weight.to(device), kind)
        self.register_buffer("codes", codes.to(weight.device), persistent=False)
        self.register_buffer("scales", scales.to(weight.device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.arealite.low_bit_linear(x, self.codes, self.scales, self.bias, self.kind)

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return torch.Size((self.out_features, self.in_features))

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(self.codes, self.scales, self.kind, dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


def _empty(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    if kind == "fp8":
        return weight.new_empty(rows, columns, dtype=torch.uint8), weight.new_empty(rows, 1, dtype=torch.float32)
    scales = weight.new_empty(rows * columns // _BLOCK, dtype=torch.bfloat16)
    return weight.new_empty(rows, columns // 2, dtype=torch.uint8), scales


def quantize_frozen(model: PreTrainedModel, config: TrainEngineConfig) -> None:
    """Replace the frozen linear layers of the decoder, one by one.

    They are quantized on the device that trains, which has one of them in full at a time. Embedding, norms, heads,
    adapters and a vision tower stay as they are.
    """
    kind = config.frozen_weight_dtype
    reject_low_bit_experts(model.config.model_type, num_experts(model.config))
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    decoder: Any = getattr(model.base_model, "language_model", model.base_model)
    found = [n for n, m in decoder.named_modules() if type(m) is nn.Linear and not is_adapter(f"{n}.")]
    if not found:
        raise ConfigError(f"frozen_weight_dtype={kind}: {type(model).__name__} has no linear layers: leave it out")
    for name in found:
        linear = decoder.get_submodule(name)
        if kind == "nf4" and (linear.in_features % 2 or linear.weight.numel() % _BLOCK):
            raise ConfigError(
                f"frozen_weight_dtype=nf4 has blocks of {_BLOCK} weights, which do not divide {name} of "
                f"{linear.out_features} x {linear.in_features}: use fp8"
            )
        parent, _, child = name.rpartition(".")
        setattr(decoder.get_submodule(parent), child, LowBitLinear(linear, kind, device))


def low_bit_weights(model: nn.Module) -> dict[str, LowBitLinear]:
    """Return the layers whose weights are in low bits, by the names of these weights."""
    return {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, LowBitLinear)}


def low_bit_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return codes and scales by name."""
    names = [name.removesuffix(".weight") for name in low_bit_weights(model)]
    return {f"{name}.{part}": model.get_buffer(f"{name}.{part}") for name in names for part in ("codes", "scales")}


def num_weights(model: nn.Module) -> int:
    """Return the number of parameters, with the weights that are in low bits."""
    low = sum(layer.shape.numel() for layer in low_bit_weights(model).values())
    return low + sum(parameter.numel() for parameter in model.parameters())
