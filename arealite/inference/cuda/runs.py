"""Decode attention for long contexts: functions that launch the kernels of `run_kernels`.

A plan is made once for a forward pass and used by all its layers. Nothing here reads from the device, so all of it can
be captured in a CUDA graph: the grid is fixed, and the runs follow the lengths of the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import triton

from arealite.inference.cuda import run_kernels as _run_kernels

# Type checkers do not know that a Triton kernel is indexed by its grid.
run_kernels: Any = _run_kernels
SHORT_CONTEXT = 4096  # servers with contexts up to this one need no runs, and no graphs for them
_MIN_TILES = 4  # of a run: shorter ones cost more when they are joined than they gain


@dataclass(frozen=True)
class Tuning:
    """Sizes of the kernel. `programs`: runs per multiprocessor, as many as its shared memory holds."""

    block_n: int
    stages: int
    num_warps: int
    programs: int


@dataclass
class RunPlan:
    """How the tiles of a forward pass are divided. Items are tokens, or groups of tokens of one sequence."""

    begin: torch.Tensor  # [items + 1] tiles before an item
    run: torch.Tensor  # [runs, 4] length, first item, first KV head, first tile
    tuning: Tuning
    first: torch.Tensor | None = None  # [items] first token of each item, and number of its tokens; None: one token
    count: torch.Tensor | None = None
    max_count: int = 1


def choose_tuning(element_size: int, rows: int, dim: int) -> Tuning:
    """Sizes for heads of `dim` elements of `element_size` bytes, and tiles of `rows` queries."""
    if element_size == 4:
        return Tuning(32, 2, 4, 1)
    if rows > 16 or dim > 128:
        return Tuning(64, 3, 4, 2)
    return Tuning(32, 3, 1, 8) if element_size == 1 else Tuning(128, 3, 8, 1)


# Nanoseconds on one H200 (benchmark/attention.py). Of the kernel for short contexts: of one program per token, of the
# second kernel that joins parts. Of runs: whatever the length. Bytes per nanosecond of both, also of a cache in FP8.
_SHORT_PER_TOKEN, _SHORT_JOIN, _RUNS_ALWAYS = 32.0, 3000.0, 8000.0
_SHORT_SPEED, _RUNS_SPEED = 4250, 4000
_SHORT_SPEED_FP8, _RUNS_SPEED_FP8 = 2600, 3300


def is_faster_in_runs(
    lengths: np.ndarray, splits: int, num_kv_heads: int, head_dim: int, element_size: int = 2
) -> bool:
    """Whether runs are faster than one program for each of `splits` parts of a sequence and KV head.

    `lengths` are those of the contexts. The kernel for short contexts waits for its longest part, so it is slower if
    there are few sequences, or if one is much longer than the others; and it reads FP8 more slowly.
    """
    size = float(lengths.sum()) * num_kv_heads * 2 * head_dim * element_size
    short_speed, runs_speed = (_SHORT_SPEED, _RUNS_SPEED) if element_size > 1 else (_SHORT_SPEED_FP8, _RUNS_SPEED_FP8)
    short = max(lengths.max() / splits * _SHORT_PER_TOKEN, size / short_speed)
    if splits > 1:
        short += _SHORT_JOIN
    return bool(size / runs_speed + _RUNS_ALWAYS < short)


def plan_runs(
    positions: torch.Tensor,
    num_kv_heads: int,
    tuning: Tuning,
    first: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    max_count: int = 1,
) -> RunPlan:
    """Divide the contexts of the tokens at `positions` [N], or of items of tokens, into runs."""
    num_items = positions.shape[0] if first is None else first.shape[0]
    num_runs = num_multiprocessors(positions.device) * tuning.programs
    begin = torch.empty(num_items + 1, dtype=torch.int32, device=positions.device)
    run = torch.empty(num_runs, 4, dtype=torch.int32, device=positions.device)
    run_kernels.plan_runs_kernel[(num_runs,)](
        positions, positions if first is None else first, positions if count is None else count, begin, run,
        num_items, num_runs, _MIN_TILES, HKV=num_kv_heads, BLOCK_N=tuning.block_n,
        ITEMS=triton.next_power_of_2(num_items), DECODE=first is None, num_warps=4,
    )  # fmt: skip
    return RunPlan(begin, run, tuning, first, count, max_count)


def attend_runs(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    rows: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    plan: RunPlan,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of queries [N, H, D] over the cache: [N, H, D]. `scale` and `softcap` include log2(e)."""
    n, num_heads, dim = q.shape
    block_size, num_kv = keys.shape[1:3]
    group, tuning = num_heads // num_kv, plan.tuning
    most, num_runs = plan.max_count * group, plan.run.shape[0]
    wide = max(16, triton.next_power_of_2(dim))
    out = torch.empty(n, num_heads, dim, dtype=q.dtype, device=q.device)
    part = torch.empty(num_runs, 2, most, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_runs, 2, most, dtype=torch.float32, device=q.device)
    first, count = (positions if x is None else x for x in (plan.first, plan.count))
    key_scales, value_scales = scales or (lse, lse)
    sizes = {"H": num_heads, "HKV": num_kv, "G": group, "D": dim, "WIDTH": wide, "ROWS": most}
    decode, precise = plan.first is None, q.dtype == torch.float32 and scales is None
    run_kernels.attend_runs_kernel[(num_runs,)](
        q, keys, values, key_scales, value_scales, out, part, lse, rows, positions, table, first, count, plan.run,
        table.stride(0), q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        scale, softcap or 1.0, **sizes, BS=block_size, ALIGNED=aligned_tokens(block_size),
        BLOCK_M=max(16, triton.next_power_of_2(most)), BLOCK_N=tuning.block_n,
        STAGES=tuning.stages, DECODE=decode, PRECISE=precise,
        SOFTCAP=softcap is not None, SCALED=scales is not None, num_warps=tuning.num_warps,
    )  # fmt: skip
    run_kernels.merge_runs_kernel[(plan.begin.shape[0] - 1, num_kv * most)](
        part, lse, out, first, count, plan.begin, plan.run, **sizes, SPLITS=32, DECODE=decode, num_warps=2
    )  # fmt: skip
    return out


def aligned_tokens(block_size: int) -> int:
    """Number of tokens that lie side by side in a block, as a power of two; at most 16, a load of FP8."""
    return min(16, block_size & -block_size)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; a few on the CPU, where Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 5
