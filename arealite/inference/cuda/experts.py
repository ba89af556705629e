"""Experts of mixtures on CUDA: a few Triton kernels where transformers launches some twenty.

The modules of transformers stay as they are and call `forward_grouped` through the interface that it has for experts.
Routers that take the largest of a softmax get `choose_experts` as their forward. Weights are in half precision or in
FP8 (`experts.fp8_experts`).

Legend: see `group_kernels`.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from arealite.inference.cuda import group_kernels as _kernels
from arealite.inference.cuda.ops import quantize
from arealite.inference.cuda.split_k import is_early, launch_options
from arealite.inference.experts import fp8_experts
from arealite.inference.fp8 import FP8
from arealite.utils.routing import expert_blocks

# Type checkers do not know that a Triton kernel is indexed by its grid.
kernels: Any = _kernels
IMPLEMENTATION = "arealite_grouped"
# Routers that choose by a softmax over all experts, and the type of their shares if it is not that of the logits.
_SOFTMAX_ROUTERS = {
    "Qwen3MoeTopKRouter": None,
    "Qwen2MoeTopKRouter": None,
    "OlmoeTopKRouter": None,
    "MixtralTopKRouter": torch.float32,
}


class _Tiles(NamedTuple):
    """Sizes of the tiles of a product, and how many parts of its operands are loaded ahead."""

    rows: int
    columns: int  # of gate and of up; other products have twice as many
    terms: int
    stages: int


def use_grouped_kernels(model: PreTrainedModel) -> None:
    """Let layers with experts call `choose_experts` and `forward_grouped`, where these compute the same."""
    for block in expert_blocks(model):
        experts, router = block.experts, block.router
        if type(router).__name__ in _SOFTMAX_ROUTERS:
            router.forward = partial(choose_experts, router)
        is_plain = experts.has_gate and experts.is_concatenated and not experts.is_transposed
        is_plain &= not (experts.has_bias or getattr(experts, "has_post_expert_norm", False))
        is_half = experts.down_proj.dtype in (torch.bfloat16, torch.float16)
        if is_plain and is_half and isinstance(experts.act_fn, type(ACT2FN["silu"])):
            # A config of its own: that of the model is used to load others too.
            experts.config = copy.copy(experts.config)
            experts.config._experts_implementation_internal = IMPLEMENTATION


def has_grouped_kernels(experts: Any) -> bool:
    """Whether the forward pass of these experts is `forward_grouped`, without a sum over ranks."""
    name = getattr(experts.config, "_experts_implementation_internal", None)
    is_part = getattr(experts, "_is_expert_parallel", False)
    return name in (IMPLEMENTATION, fp8_experts.IMPLEMENTATION) and not is_part


def choose_experts(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits of a router [T, E], and the shares and indices of each token's experts [T, K]."""
    logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    num_tokens, num_experts = logits.shape
    index = torch.empty(num_tokens, router.top_k, dtype=torch.int64, device=logits.device)
    shares = torch.empty_like(index, dtype=_SOFTMAX_ROUTERS[type(router).__name__] or logits.dtype)
    early = is_early(logits)
    kernels.choose_experts_kernel[(num_tokens,)](
        logits, index, shares, num_experts, router.top_k, NORMALIZED=getattr(router, "norm_topk_prob", True),
        EXPERTS=triton.next_power_of_2(num_experts), EARLY=early, num_warps=1, **launch_options(early),
    )  # fmt: skip
    return logits, shares, index


def forward_grouped(experts: Any, hidden: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the sum of each token's experts, weighted by `shares`, [T, size]."""
    return expert_parts(experts, hidden, index, shares).sum(0)


def expert_parts(experts: Any, hidden: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return what each token's experts compute, weighted by `shares`, [K, T, size].

    `index` and `shares` are [T, K]. An index of E is an expert of another rank, which is skipped.
    """
    num_tokens, top_k = index.shape
    num_pairs, num_experts = num_tokens * top_k, experts.num_experts
    tiles = _choose_tiles(num_pairs, num_experts, experts.down_proj.dtype == FP8)
    num_tiles = num_pairs // tiles.rows + num_experts
    order = torch.empty(num_pairs, dtype=torch.int32, device=hidden.device)
    places = torch.empty(num_tiles, 3, dtype=torch.int32, device=hidden.device)
    early = is_early(hidden)
    options = {"EARLY": early, **launch_options(early)}
    block = min(4096, max(16, triton.next_power_of_2(num_pairs)))
    kernels.group_pairs_kernel[(num_experts,)](
        index.contiguous(), order, places, num_pairs, num_tiles, BLOCK=block, BM=tiles.rows, TILES=16, **options
    )
    inner, size = experts.down_proj.shape[2], hidden.shape[1]
    gated = hidden.new_empty(num_pairs, inner)
    columns = tiles.columns
    kernels.gated_experts_kernel[(triton.cdiv(inner, columns), num_tiles)](
        *_operands(experts, "gate_up_proj", hidden), order, places, gated, top_k, size, inner,
        **_constants(tiles, columns, inner, size, experts.gate_up_proj), **options,
    )  # fmt: skip
    # Pairs of other ranks are not written. Transformers 5.17 has no such attribute.
    make = torch.zeros if getattr(experts, "_is_expert_parallel", False) else torch.empty
    out = make(top_k, num_tokens, size, dtype=hidden.dtype, device=hidden.device)
    columns = 2 * tiles.columns
    kernels.down_experts_kernel[(triton.cdiv(size, columns), num_tiles)](
        *_operands(experts, "down_proj", gated), shares.contiguous(), order, places, out,
        num_tokens, top_k, size, inner, **_constants(tiles, columns, size, inner, experts.down_proj), **options,
    )  # fmt: skip
    return out


def _choose_tiles(num_pairs: int, num_experts: int, in_fp8: bool) -> _Tiles:
    """Return the fastest tiles on an H200 (benchmark/results/experts_h200.md)."""
    # Half as many pairs again as an expert has in the mean, so that most experts have one tile.
    rows = min(128, max(16, triton.next_power_of_2(int(1.5 * num_pairs / num_experts))))
    if in_fp8:
        return _Tiles(rows, 64, 128, 3 if rows == 128 else 4)
    if num_pairs >= 128 * num_experts:
        return _Tiles(128, 128, 64, 4)
    # Few rows wait for weights, which long parts read fastest.
    return _Tiles(rows, 64, 128, 3) if rows <= 32 else _Tiles(rows, 64, 64, 4 if rows == 64 else 3)


def _constants(tiles: _Tiles, columns: int, num_columns: int, length: int, weight: torch.Tensor) -> dict[str, Any]:
    """Return constants of a product's kernel.

    The product has `num_columns` columns, `columns` of them in a tile, and sums of `length` terms.
    """
    is_whole = num_columns % columns == 0 and length % tiles.terms == 0
    return {
        "BM": tiles.rows, "BN": columns, "BK": tiles.terms, "WHOLE": is_whole, "SCALED": weight.dtype == FP8,
        "WIDEN": not weight.is_cuda, "num_warps": 8 if tiles.rows == 128 else 4, "num_stages": tiles.stages,
    }  # fmt: skip


def _operands(experts: Any, name: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tokens and weights of a product with their scales.

    Scales are read only if both are in FP8.
    """
    weight = getattr(experts, name)
    if weight.dtype != FP8:
        return x, x, weight, weight
    values, scales = quantize(x)
    return values, scales, weight, getattr(experts, f"{name}_scale")


ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = forward_grouped
fp8_experts.FORWARDS["cuda"] = forward_grouped
