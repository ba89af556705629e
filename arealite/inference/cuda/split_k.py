"""Linear layers for few tokens: their inputs are divided over the multiprocessors (split-K).

With at most 64 tokens, cuBLAS reads a weight of 5 MB at a fifth and one of 30 MB at half of the memory's bandwidth; in
FP8, torch's products are slower still (`benchmark/products.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import nn

from arealite.inference.cuda import split_kernels as _split_kernels
from arealite.inference.cuda.runs import num_multiprocessors
from arealite.inference.fp8 import WIDE, Fp8Linear, Quantized

# Type checkers do not know that a Triton kernel is indexed by its grid.
split_kernels: Any = _split_kernels
Product = Callable[[Any], Any]  # of a tensor or of `Quantized` tokens with a weight: a tensor or `Parts`
MAX_TOKENS = 64
_TILE = 64  # outputs of a program
_MAX_BYTES = 32_000_000  # of a weight in half precision: larger ones cuBLAS reads as fast
_CAPABILITY = (9, 0)  # the first with programmatic dependent launch


@dataclass
class Parts:
    """A product whose parts have not been added: the kernel that reads it adds them, and the bias."""

    sums: torch.Tensor  # [parts, M, N]
    bias: torch.Tensor | None


class SplitLinear:
    """A linear layer that returns `Parts` of few tokens if that is faster.

    `adds_parts`: the kernel that reads the product can add them.
    """

    def __init__(self, linear: Product, weight: torch.Tensor, bias: torch.Tensor | None, adds_parts: bool):
        self.linear, self.weight, self.bias = linear, weight, bias
        self.scale = linear.scale if isinstance(linear, Fp8Linear) else None
        num_outputs, num_inputs = weight.shape
        steps = (256, 128, 64, 32, 16) if self.scale is not None and adds_parts else (128, 64, 32, 16)
        self.step = next(size for size in steps if num_inputs % size == 0)
        sizes = num_outputs // _TILE, num_inputs // self.step, num_multiprocessors(weight.device)
        self.num_parts = choose_parts(*sizes) if adds_parts else 1

    def __call__(self, x: torch.Tensor | Quantized) -> torch.Tensor | Parts:
        values = x.values if isinstance(x, Quantized) else x
        is_faster = self.num_parts > 1 or self.scale is not None
        return self._split(x) if is_faster and values.shape[0] <= MAX_TOKENS else self.linear(x)

    def _split(self, x: torch.Tensor | Quantized) -> torch.Tensor | Parts:
        values, scales = x if isinstance(x, Quantized) else (x, x)
        (m, _), (n, k) = values.shape, self.weight.shape
        parts = self.num_parts
        kind = torch.float32 if parts > 1 else WIDE
        out = torch.empty(parts, m, n, dtype=kind, device=values.device)
        early = is_early(values)
        split_kernels.split_product_kernel[(n // _TILE, parts)](
            values, scales, self.weight, values if self.scale is None else self.scale,
            values if self.bias is None else self.bias, out, m, n, k, triton.cdiv(k // self.step, parts) * self.step,
            BM=MAX_TOKENS, BN=_TILE, BK=self.step, IS_PART=parts > 1, BIASED=self.bias is not None,
            SCALED=self.scale is not None, WIDEN=not values.is_cuda, EARLY=early,
            num_warps=4, num_stages=4, **launch_options(early),
        )  # fmt: skip
        return Parts(out, self.bias) if parts > 1 else out[0]


def split_linear(layer: nn.Module) -> Product:
    """Let a linear layer divide products of few tokens; a layer that cannot is returned as it is.

    Its reader is `add_norm`, which adds parts but no bias.
    """
    if not isinstance(layer, Fp8Linear | nn.Linear) or (isinstance(layer, Fp8Linear) and layer.sums_ranks):
        return layer
    return split_product(layer, layer.weight, None) if layer.bias is None else layer


def split_product(linear: Product, weight: torch.Tensor, bias: torch.Tensor | None, adds_parts: bool = True) -> Product:
    """The same of a function that multiplies by `weight` and adds `bias`."""
    can_split = weight.shape[0] % _TILE == 0 and weight.shape[1] % 16 == 0
    if weight.is_cuda:
        is_new = torch.cuda.get_device_capability(weight.device) >= _CAPABILITY
        is_fp8 = isinstance(linear, Fp8Linear)
        is_small = weight.dtype != torch.float32 and weight.nbytes <= _MAX_BYTES  # Triton rounds products of float32
        can_split &= is_new and (is_fp8 or is_small)
    return SplitLinear(linear, weight, bias, adds_parts) if can_split else linear


@cache
def choose_parts(tiles: int, steps: int, num_programs: int) -> int:
    """Number of parts of a product with `tiles` tiles of outputs, whose programs take `steps` steps each.

    The time is that of all rounds of programs; a program costs as much as two steps, whatever its length.
    """
    if tiles >= num_programs:  # sums would cost more than they gain
        return 1

    def cost(parts: int) -> int:
        return -(-tiles * parts // num_programs) * (-(-steps // parts) + 2)

    best = min(range(1, max(2, min(16, steps // 2) + 1)), key=cost)
    return -(-steps // -(-steps // best))  # without empty parts


def is_early(x: torch.Tensor) -> bool:
    """Whether kernels of a pass over tokens `x` [M, …] may start before the one before them has ended."""
    return x.is_cuda and x.shape[0] <= MAX_TOKENS and torch.cuda.get_device_capability(x.device) >= _CAPABILITY


def launch_options(early: bool) -> dict[str, Any]:
    """Options of a launch; Triton's interpreter does not know them."""
    return {"launch_pdl": True} if early else {}
